"""What a model's graph and files tell without a stopwatch: the same on every machine and in every run.

`costs` is what stages call: sizes, weights by dtype, multiply-accumulates, operators. `onnx_graph` and `torch_graph`
count, `counts` has the formulas. `peaks` measures what this machine can do at most, `roofline` compares.
"""
