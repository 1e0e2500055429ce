"""What this machine can do at most: multiply-accumulates a second in float32 and int8, bytes a second.

Measured once a machine, in about a second, and kept in the user's cache. Best of many short calls: other programs make
calls slower, never faster. Only what was measured is a limit: a kernel that computes convolutions in fewer products
than a direct one (Winograd) may be faster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ptpipe import host, write_atomically
from ptpipe_eval.graph.facts import Peaks
from ptpipe_torch.model.onnx_file import session_options

_VERSION = 1
_SIZE = 384
"""Of the matrices: large against a call's cost, small against a cache of a megabyte."""
_SECONDS = 0.12
_WORKING_SETS = tuple(1 << power for power in (20, 22, 24, 26))
"""Bytes that are read over and over: from the caches up to the memory."""


def machine_peaks(num_threads: int) -> Peaks:
    """Return the peaks of this machine, from the cache, or measured and written there.

    Several threads can do at least what one can.
    """
    path = _cache_path(num_threads)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] == _VERSION:
            return Peaks.from_json(content)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not measured yet, or not a file of ours
    found = measure_peaks(num_threads)
    if num_threads > 1:
        found = found.at_least(machine_peaks(1))
    with suppress(OSError):  # a user without a folder of their own: measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"version": _VERSION, **asdict(found)}).encode())
    return found


def forget_peaks(num_threads: int) -> None:
    """Delete what was measured, so that the next session measures it again."""
    with suppress(OSError):
        _cache_path(num_threads).unlink()


def measure_peaks(num_threads: int, seconds: float = _SECONDS) -> Peaks:
    """Measure, each figure for so many seconds."""
    import torch

    from ptpipe_torch import torch_threads

    macs_per_s = {
        dtype: _SIZE**3 / _best_s(_matrix_product(dtype, num_threads), seconds) for dtype in ("float32", "int8")
    }
    bytes_per_s = {}
    with torch_threads(num_threads):
        for size in _WORKING_SETS:
            values = torch.ones(size // 4)
            bytes_per_s[str(size)] = size / _best_s(values.sum, seconds / 2)
    return Peaks(num_threads, macs_per_s, bytes_per_s)


def _best_s(call: Callable[[], object], seconds: float) -> float:
    """Return the time of the fastest of the calls that fit into so many seconds, at least three."""
    best, count, end = float("inf"), 0, time.perf_counter() + seconds
    while count < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best, count = min(best, time.perf_counter() - started), count + 1
    return best


def _matrix_product(dtype: str, num_threads: int) -> Callable[[], object]:
    """Return a call of ONNX Runtime's product of two square matrices, the kernel that most of its others build on."""
    from onnx import TensorProto, helper, numpy_helper

    from ptpipe_torch.ort import ort

    kind = "MatMul" if dtype == "float32" else "MatMulInteger"
    of_input, of_weight = (np.float32, np.float32) if dtype == "float32" else (np.uint8, np.int8)
    result = TensorProto.FLOAT if dtype == "float32" else TensorProto.INT32
    shape = (_SIZE, _SIZE)
    weight = np.ones(shape, of_weight)
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", "w"], ["y"])],
        "peak",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(np.dtype(of_input)), shape)],
        [helper.make_tensor_value_info("y", result, shape)],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(
        model.SerializeToString(), session_options(num_threads), providers=["CPUExecutionProvider"]
    )
    feed = {"x": np.ones(shape, of_input)}
    return lambda: session.run(None, feed)


def _cache_path(num_threads: int) -> Path:
    from platformdirs import user_cache_path

    folder = user_cache_path("ptpipe", appauthor=False, opinion=False) / "peaks"
    return folder / f"{host.fingerprint()}-{num_threads}.json"
