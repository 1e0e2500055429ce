"""ONNX Runtime, imported without its telemetry: the only place that imports it first.

Recent wheels for Linux and macOS report sessions and models to their vendor, from a thread of their own, and write
files into the temporary folder. ONNX Runtime reads the variable once, when it is imported; a value that the user has
set stays as it is, `0` too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_OPT_OUT = "ORT_DISABLE_TELEMETRY"


@contextmanager
def _telemetry_disabled() -> Iterator[None]:
    if _OPT_OUT in os.environ:
        yield
        return
    os.environ[_OPT_OUT] = "1"
    try:
        yield
    finally:
        del os.environ[_OPT_OUT]


with _telemetry_disabled():
    import onnxruntime as ort

__all__ = ["ort"]
