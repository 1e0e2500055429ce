"""Measure the latency of several models together.

`session` is what stages call. It starts one process, the server, which forks a worker for each model (a second one for
the baseline: the control), lets one worker run at a time, and repeats that with fresh workers until the intervals are
narrow. `estimate` turns what they measured into figures.
"""
