"""Whether ONNX Runtime multiplies matrices of integers right on this processor.

From 1.21 to 1.24 it does not on Intel processors with AMX, for 32 rows and more, and 17 to 31 columns or, in deep
matrices, some larger numbers such as 63. It gives neither an error nor a warning.
"""

from __future__ import annotations

import base64

import numpy as np

FIXED_IN = "1.25"
_MODEL = base64.b64decode(
    "CAg6YgoYCgFhCgFiEgF5Ig1NYXRNdWxJbnRlZ2VyEgFnWhUKAWESEAoOCAISCgoDEgFyCgMSAWRaFQoBYhIQCg4IAxIKCgMSAWQKAxIBY2IVCg"
    "F5EhAKDggGEgoKAxIBcgoDEgFjQgQKABAS"
)
"""A file with one operator: MatMulInteger of `a`, uint8 (r, d), and `b`, int8 (d, c). A target may have no onnx."""
_ROWS, _DEPTH, _COLUMNS = 33, 4, 31


def are_right() -> bool:
    """Return whether products of a shape that fails on some processors are those that NumPy computes."""
    from ptpipe_torch.model.onnx_file import session_options
    from ptpipe_torch.ort import ort

    a = np.arange(_ROWS * _DEPTH, dtype=np.uint8).reshape(_ROWS, _DEPTH)
    b = (np.arange(_DEPTH * _COLUMNS) - 60).astype(np.int8).reshape(_DEPTH, _COLUMNS)
    session = ort.InferenceSession(_MODEL, session_options(num_threads=1), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"a": a, "b": b})
    return bool(np.array_equal(found, a.astype(np.int32) @ b.astype(np.int32)))


def problem(version: str) -> str:
    """Return what is wrong on this processor with this version of ONNX Runtime."""
    return (
        f"onnxruntime {version} multiplies integers wrongly on this processor (AMX), for some numbers of classes and "
        f"channels and batches of 32 and more; {FIXED_IN} and later are right"
    )
