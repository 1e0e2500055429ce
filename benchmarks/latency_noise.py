"""How often `eval.latency` is wrong: claims about two copies of one model, and planted slowdowns that it finds.

A session measures a baseline, a copy of it, and a model that computes `--slowdown` percent more products of matrices,
as a manifest does. A claim about the copy is false; the slowdown should be found. `--busy` keeps one processor busy
meanwhile: then sessions may be unmeasurable, but not wrong.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ptpipe import Check, NamedCode, hookimpl
from ptpipe.launching import load_vocabulary
from ptpipe_eval.latency.inputs import CellBatches
from ptpipe_eval.latency.latencies import Latency
from ptpipe_eval.latency.session import Session
from ptpipe_torch import BATCH, Deployable, Predictor, Signature, TensorSpec

SIZE = 48


@hookimpl
def ptpipe_doctor() -> Iterable[Check]:
    """Make this file a plugin, which the measuring processes load."""
    return []


class Products(Deployable):
    """Multiplies two matrices a number of times: its work is exactly proportional to that."""

    format = "products"
    size_bytes = 8
    signature = Signature(
        (TensorSpec("rows", "float32", (BATCH, SIZE)),), (TensorSpec("products", "float32", (BATCH, SIZE)),)
    )

    def __init__(self, number: int) -> None:
        self.number = number

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        weights = np.eye(SIZE, dtype=np.float32)

        def predict(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
            rows = inputs["rows"]
            for _ in range(self.number):
                rows = rows @ weights
            return {"products": rows}

        yield predict

    def save(self, folder: Path) -> None:
        (folder / "number.txt").write_text(str(self.number))

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(int((folder / "number.txt").read_text()))


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
    (plugin,) = [own for own in load_vocabulary([__file__]).plugins if own.source == "manifest"]
    baseline = plugin.module.Products(100)
    models = [baseline, baseline, plugin.module.Products(round(100 + options.slowdown))]
    inputs = [CellBatches(32, None, {"normalized": [{"rows": np.ones((32, SIZE), np.float32)}]})]
    found: list[tuple[Latency, Latency]] = []
    seconds = []
    print(f"{'session':>7} {'seconds':>7} {'starts':>6} {'noise':>7} {'copy':>26} {'slower':>26}")
    with TemporaryDirectory() as folder, busy(options.busy):
        for number in range(options.sessions):
            code = NamedCode((__file__,))
            session = Session(inputs, (options.threads,), options.budget_s, 0.01, number, code, Path(folder))
            begin_s = time.monotonic()
            measured = session.measure(["baseline", "copy", "slower"], models, 0, lambda event: None)
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
