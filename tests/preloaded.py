"""What processes of the fork server have imported when they start: a run would need seconds for it.

Nothing may have computed anything: threads, those of OpenMP among them, don't survive a fork.
"""

import gc
import warnings
from importlib import import_module

from ptpipe.plan.vocabulary import BUILT_IN

_USED = (
    *("ptpipe_train.parallel.ddp", "ptpipe_train.parallel.fsdp", "ptpipe_train.parallel.pp", "ptpipe_train.supervised"),
    *("ptpipe_torch.data.dataloader", "ptpipe_torch.data.augment", "ptpipe_elastic.worker", "ptpipe_eval.compare"),
    *("ptpipe_quant.stages", "ptpipe_quant.tuning.stage", "ptpipe_onnx.export", "ptpipe_onnx.torch_exporter"),
    *("onnxruntime", "onnxscript", "torch._dynamo", "torch.export._trace", "torch.onnx._internal.exporter._core"),
    *("ptpipe_eval.latency.server", "ptpipe_report.html.report", "ptpipe_report.screen"),
    *("jinja2", "ruamel.yaml", "scipy.special", "sympy.tensor.tensor"),
)

FILTERS_AT_START = [*warnings.filters]
"""Those of the interpreter, before libraries add theirs."""

for name in (*BUILT_IN, *_USED):
    import_module(name)
import_module("ptpipe_onnx.torch_exporter")._make_registry(opset_version=18)  # the default
gc.freeze()  # what is imported stays
