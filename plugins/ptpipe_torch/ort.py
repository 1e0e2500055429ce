"""ONNX Runtime, imported without its telemetry: the only place that imports it first.

Recent wheels for Linux and macOS report sessions and models to their vendor, from a thread of their own, and write
files into the temporary folder. ONNX Runtime reads the variable once, when it is imported; a value that the user has
set stays as it is, `0` too.
"""

from __future__ import annotations

import os

from ptpipe_torch.runtime import environment_variables

_OPT_OUT = "ORT_DISABLE_TELEMETRY"

with environment_variables({_OPT_OUT: os.environ.get(_OPT_OUT, "1")}):
    import onnxruntime as ort

__all__ = ["ort"]
