"""What the comparisons with the user's network cost in `mnist_qat.yaml`: how long each check of each stage takes.

The run is the manifest's own, in this process, with `ptpipe run`; the functions that check are timed where the stages
call them. What a check shares with the stage's own work (a network that is built once for both) counts as work.

    python benchmarks/check_cost.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any

from ptpipe.cli import cli
from ptpipe_onnx import export
from ptpipe_quant import stages

TARGET_S = 3.0
MANIFEST = Path(__file__).parents[1] / "manifests" / "mnist_qat.yaml"
CHECKS: tuple[tuple[Any, str, str], ...] = (
    (stages.FloatRun, "of", "quant.dynamic: the float layers' inputs and outputs"),
    (stages, "names_to_quantize", "quant.dynamic: each layer on trial"),
    (stages, "check_dynamic_layers", "quant.dynamic: int8 layers against float ones"),
    (stages.Expected, "of", "quant.prepare*: the user's network"),
    (stages, "check_prepared", "quant.prepare*: the prepared network against it"),
    (stages, "dry_run", "quant.prepare*: conversion on trial"),
    (stages, "check_runs", "quant.*: the int8 network runs"),
    (stages, "check_int8", "quant.convert: int8 layers against the fake-quantized network"),
    (export.onnx.checker, "check_model", "export.onnx: the file is valid ONNX"),
    (export, "compare_exactly", "export.onnx: integers of the file"),
    (export.layerwise, "compare_file", "export.onnx: outputs layer by layer"),
    (export, "compare_outputs", "export.onnx: outputs of the test images"),
)


def time_checks(spent_s: dict[str, list[float]]) -> None:
    """Replace each check by one that also notes its seconds."""

    def timed(function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                spent_s[label].append(time.perf_counter() - started_s)

        return wrapper

    for owner, name, label in CHECKS:
        setattr(owner, name, timed(getattr(owner, name), label))


def run() -> None:
    spent_s: dict[str, list[float]] = defaultdict(list)
    time_checks(spent_s)
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        with redirect_stdout(log), redirect_stderr(log):
            arguments = ["run", str(MANIFEST), "--artifacts", str(Path(folder) / "artifacts")]
            exit_code = cli.main(arguments, standalone_mode=False)
        if exit_code:
            sys.exit(f"ptpipe run ended with {exit_code}")
    width = max(map(len, spent_s))
    for _, _, label in CHECKS:
        print(f"{label:{width}}  {len(spent_s[label])} x  {sum(spent_s[label]):6.2f} s")
    total_s = sum(map(sum, spent_s.values()))
    print(f"{'all':{width}}       {total_s:6.2f} s, target {TARGET_S} s")


if __name__ == "__main__":
    run()
