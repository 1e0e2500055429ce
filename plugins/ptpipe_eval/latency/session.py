"""Measure the latency of models together: what stages and commands call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from safetensors.numpy import save_file

from ptpipe import NamedCode, StageError, host
from ptpipe.launching import python_command
from ptpipe_eval.latency.estimate import MIN_STARTS
from ptpipe_eval.latency.inputs import CellBatches
from ptpipe_eval.latency.latencies import Latency, Measured, StartUp, Threads
from ptpipe_eval.latency.request import CellInputs, Request, StoredModel

if TYPE_CHECKING:
    from ptpipe_torch import Deployable

METHOD = (
    "a process for each model and a second one for the baseline, all but one stopped, on real samples prepared "
    "beforehand, garbage collection off, freed memory kept; rounds of blocks of 5 ms in random order, several times "
    "in fresh processes; ratios are paired by round, intervals are Student's t over starts (of twelve and more without "
    "the lowest and the highest fifth), 95 %"
)

_FEW_STARTS_FACTOR = 2
"""Of a bound that few starts tell: two processes with one model may differ by 30 %, by where their memory is."""
_MAX_ERROR_LINES = 5
_LIBRARIES = ("ptpipe_torch.ort", "torch", "torchvision", "timm", "transformers")
"""That take long to import, in an order in which they can be."""

OnProgress: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Called after every round with `elapsed_s`, `batch_size` and `num_threads`."""


@dataclass(frozen=True)
class Session:
    """What is measured, beside the models."""

    inputs: Sequence[CellBatches]
    """What is predicted; at least one cell."""
    threads: tuple[Threads, ...]
    budget_s: float
    precision: float
    seed: int
    code: NamedCode
    folder: Path
    """For copies of the models; deleted afterwards."""

    def measure(
        self, names: Sequence[str], models: Sequence[Deployable], baseline: int, on_progress: OnProgress
    ) -> tuple[Measured, ...]:
        """Measure the models together. `names`: of the models, for errors. `baseline`: the position of one of them.

        Raises StageError where a model can't be loaded or fails, or its process dies.
        """
        with TemporaryDirectory(prefix="latency-", dir=self.folder) as name:
            folder = Path(name)
            request = Request(
                tuple(_stored(folder / f"model-{i}", *pair) for i, pair in enumerate(zip(names, models, strict=True))),
                baseline,
                tuple(_saved_inputs(folder / f"cell-{i}", cell) for i, cell in enumerate(self.inputs)),
                tuple(_num_threads(threads) for threads in self.threads),
                self.budget_s,
                self.precision,
                self.seed,
                self.code,
                tuple(name for name in _LIBRARIES if name in sys.modules),
            )
            result = _answered(request, on_progress)
        return tuple(self._measured(result, position) for position in range(len(models)))

    def _measured(self, result: Mapping[str, Any], position: int) -> Measured:
        cells = iter(result["cells"])
        latencies = [_latency(next(cells), position, threads) for threads in self.threads for _ in self.inputs]
        return Measured(tuple(latencies), StartUp(**result["start_ups"][position]))


def _latency(cell: Mapping[str, Any], position: int, threads: Threads) -> Latency:
    own = cell["models"][position]
    ratio, median_ms = own["ratio"], own["median_ms"]
    has_interval = isfinite(cell["noise"])
    percentiles_ms: dict[str, Any] = {
        f"p{percent}_ms": _rounded(value) for percent, value in own["percentiles_ms"].items()
    }
    return Latency(
        batch_size=cell["batch_size"],
        length=cell["length"],
        threads=threads,
        num_threads=cell["num_threads"],
        median_ms=_rounded(median_ms["value"]),
        low_ms=_rounded(median_ms["low"]) if has_interval else None,
        high_ms=_rounded(median_ms["high"]) if has_interval else None,
        ratio=_rounded(ratio["value"]),
        ratio_low=_rounded(ratio["low"]) if has_interval else None,
        ratio_high=_rounded(ratio["high"]) if has_interval else None,
        speed=own["verdict"],
        noise=_rounded(cell["noise"]) if has_interval else None,
        num_starts=cell["num_starts"],
        num_runs=own["num_calls"],
        cpu_ms=_rounded(own["cpu_ms"]),
        waited_fraction=_rounded(own["waited_fraction"]),
        num_disturbed=cell["num_disturbed"],
        bound_ms=None if has_interval else _rounded(_bound_ms(own["slowest_block_ms"], cell["num_starts"])),
        round_ratios=tuple(_rounded(row[position]) for row in cell["ratios_RM"]),
        **percentiles_ms,
    )


def _bound_ms(slowest_block_ms: float, num_starts: int) -> float:
    """Return what a median is below that other programs disturbed: they slow all blocks down, and speed up none."""
    return slowest_block_ms * (1 if num_starts >= MIN_STARTS else _FEW_STARTS_FACTOR)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _num_threads(threads: Threads) -> int:
    return 1 if threads == "one" else host.num_threads()


def _answered(request: Request, on_progress: OnProgress) -> dict[str, Any]:
    """Return the server's result."""
    with _server() as (server, errors):
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(request.to_json() + "\n")
        server.stdin.flush()
        for line in server.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "result":
                return event
            if event["event"] == "error":
                raise StageError(f"latency: {event['message']}")
            on_progress(event)
        raise StageError(f"latency: the process that measures has ended: {_last_lines(errors)}")


def _stored(folder: Path, name: str, model: Deployable) -> StoredModel:
    folder.mkdir()
    model.save(folder)
    return StoredModel(name, type(model).__module__, type(model).__qualname__, str(folder), model.input_form)


def _saved_inputs(folder: Path, cell: CellBatches) -> CellInputs:
    folder.mkdir()
    files: dict[str, list[str]] = {}
    for form, batches in cell.batches.items():
        for position, batch in enumerate(batches):
            file = folder / f"{form}-{position}.safetensors"
            save_file({name: np.ascontiguousarray(array) for name, array in batch.items()}, file)
            files.setdefault(form, []).append(str(file))
    return CellInputs(cell.batch_size, cell.length, files)


@contextmanager
def _server() -> Iterator[tuple[subprocess.Popen[str], IO[bytes]]]:
    """Start the server; on exit it has ended."""
    with TemporaryFile() as errors:
        server = subprocess.Popen(  # noqa: S603  # ptpipe itself
            python_command("ptpipe_eval.latency.server"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            process_group=0,
        )
        try:
            yield server, errors
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.communicate()


def _last_lines(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").split("\n")
    return " / ".join(line.strip() for line in lines[-_MAX_ERROR_LINES:] if line.strip()) or "without a word"
