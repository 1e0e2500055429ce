"""How often `eval.latency` is wrong: claims about two copies of one model, and planted slowdowns that it finds.

A session measures an ONNX file of 100 products of matrices, a copy of it, and one of `--slowdown` percent more
products, as `eval.latency` does. A claim about the copy is false; the slowdown should be found. `--busy` keeps one
processor busy meanwhile: then sessions may be unmeasurable, but not wrong.

    python benchmarks/latency_noise.py --sessions 100 --budget-s 20
    python benchmarks/latency_noise.py --sessions 10 --budget-s 60 --busy
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ptpipe import NamedCode
from ptpipe_eval.latency.inputs import CellBatches
from ptpipe_eval.latency.latencies import Latency
from ptpipe_eval.latency.session import Session
from ptpipe_torch import BATCH, OnnxFile, Signature, TensorSpec

SIZE = 48
NUM_PRODUCTS = 100
SIGNATURE = Signature(
    (TensorSpec("rows", "float32", (BATCH, SIZE)),), (TensorSpec("products", "float32", (BATCH, SIZE)),)
)


def products(path: Path, number: int) -> OnnxFile:
    """Write a file that multiplies two matrices a number of times: its work is exactly proportional to that."""
    weights = numpy_helper.from_array(np.eye(SIZE, dtype=np.float32), "weights")
    names = ["rows", *(f"rows_{index}" for index in range(1, number)), "products"]
    nodes = [helper.make_node("MatMul", [name, "weights"], [names[index + 1]]) for index, name in enumerate(names[:-1])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [BATCH, SIZE]) for name in (names[0], names[-1])]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return OnnxFile(path, SIGNATURE, "float32")


@contextmanager
def busy(is_wanted: bool) -> Iterator[None]:
    """Keep a processor busy."""
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_wanted else None
    try:
        yield
    finally:
        if rival is not None:
            rival.kill()
            rival.wait()


def main() -> None:
    """Print what sessions say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=20.0)
    parser.add_argument("--slowdown", type=float, default=3.0, help="of the planted model, in percent (3)")
    parser.add_argument("--threads", choices=("one", "all"), default="one")
    parser.add_argument("--busy", action="store_true", help="keep one processor busy")
    options = parser.parse_args()
    inputs = [CellBatches(32, None, {"normalized": [{"rows": np.ones((32, SIZE), np.float32)}]})]
    found: list[tuple[Latency, Latency]] = []
    seconds = []
    print(f"{'session':>7} {'seconds':>7} {'starts':>6} {'noise':>7} {'copy':>26} {'slower':>26}")
    numbers = {"baseline": NUM_PRODUCTS, "copy": NUM_PRODUCTS, "slower": round(NUM_PRODUCTS + options.slowdown)}
    with TemporaryDirectory() as folder, busy(options.busy):
        models = [products(Path(folder, f"{name}.onnx"), number) for name, number in numbers.items()]
        for number in range(options.sessions):
            session = Session(inputs, (options.threads,), options.budget_s, 0.01, number, NamedCode(), Path(folder))
            begin_s = time.monotonic()
            measured = session.measure(list(numbers), models, 0, lambda event: None)
            seconds.append(time.monotonic() - begin_s)
            copy, slower = measured[1].latencies[0], measured[2].latencies[0]
            found.append((copy, slower))
            noise = "-" if copy.noise is None else f"{100 * copy.noise:.2f} %"
            line = f"{number + 1:>7} {seconds[-1]:>7.1f} {copy.num_starts:>6} {noise:>7}"
            print(f"{line} {_text(copy):>26} {_text(slower):>26}", flush=True)
    for name, own in (("copy", [pair[0] for pair in found]), ("slower", [pair[1] for pair in found])):
        print(f"{name}: {dict(Counter(latency.speed for latency in own))}")
    print(f"{statistics.median(seconds):.1f} s a session (median)")


def _text(latency: Latency) -> str:
    return f"{latency.ratio:.4f}x {latency.speed}"


if __name__ == "__main__":
    main()
