"""The command `ptpipe sweep`: run a manifest with many values of its options over one store, and compare the results.

It has neither stages nor hooks: each trial is a run of its own, in a process of its own, as `ptpipe run` would run it.
"""
