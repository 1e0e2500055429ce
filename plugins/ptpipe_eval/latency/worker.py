"""A worker: one process that holds one model, idle until it is asked for a block of calls.

It answers each line of JSON with a block of calls, with the inputs of cell 1: `{"warm_up": 1}` with the last of those
that it took to get ready, `{"block": [1, 600]}` with 600. It ends when the pipe does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import statistics
import time
from collections.abc import Mapping
from itertools import cycle, islice, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.numpy import load_file

from ptpipe import JSON, PtpipeError
from ptpipe_eval.latency.request import Request, StoredModel
from ptpipe_torch import freed_memory_kept

if TYPE_CHECKING:
    from ptpipe_torch import Deployable, Predictor

_WARM_UP_WINDOW = 3
_WARM_UP_GAIN = 0.95
_MIN_WARM_UP_NS, _MAX_WARM_UP_NS = 20_000_000, 300_000_000
_KIBIBYTE = 1024


class Worker:
    """The model in this process."""

    def __init__(self, predict: Predictor, request: Request, input_form: str) -> None:
        self._predict = predict
        self._inputs = [cycle(list(map(load_file, own.files[input_form]))) for own in request.inputs]

    def warm_up(self, cell: int) -> dict[str, JSON]:
        """Predict until calls stop getting faster: memory mapped, kernels selected, clock raised. Return the last ones.

        A call that takes longer than all of that is the only one.
        """
        spent_ns, before_ns, num_calls = 0, float("inf"), 1
        while True:
            timed, durations_ns = self._timed(cell, num_calls)
            spent_ns += sum(durations_ns)
            now_ns = statistics.median(durations_ns)
            if spent_ns >= _MAX_WARM_UP_NS or (now_ns > _WARM_UP_GAIN * before_ns and spent_ns >= _MIN_WARM_UP_NS):
                return timed
            before_ns = now_ns
            num_calls = _WARM_UP_WINDOW if _WARM_UP_WINDOW * now_ns < _MAX_WARM_UP_NS else 1

    def block(self, cell: int, num_calls: int) -> dict[str, JSON]:
        """Time calls one by one, after one that finds other models' data in the caches.

        That one counts where a single call is wanted and takes so long that caches don't matter.
        """
        first, (first_ns,) = self._timed(cell, 1)
        return first if num_calls == 1 and first_ns >= _MAX_WARM_UP_NS else self._timed(cell, num_calls)[0]

    def _timed(self, cell: int, num_calls: int) -> tuple[dict[str, JSON], list[int]]:
        """Return a block of calls, and how long each took."""
        predict, batches = self._predict, list(islice(self._inputs[cell], num_calls))
        waited_ns, cpu_ns, clock = waiting_ns(), time.process_time_ns(), time.perf_counter_ns
        ends_ns = [clock()]
        for batch in batches:
            predict(batch)
            ends_ns.append(clock())
        cpu_ns, waited_after_ns = time.process_time_ns() - cpu_ns, waiting_ns()
        if waited_ns is not None and waited_after_ns is not None:
            waited_ns = max(0, waited_after_ns - waited_ns)  # a thread that ended takes its count with it
        durations_ns = [end - start for start, end in pairwise(ends_ns)]
        return {"durations_ns": [*durations_ns], "cpu_ns": cpu_ns, "waited_ns": waited_ns}, durations_ns

    def call_ns(self, cell: int) -> int:
        """Return how long one prediction takes; the first one allocates and compiles."""
        return self._timed(cell, 1)[1][0]


def run_worker(pipe: Connection, stored: StoredModel, request: Request, num_threads: int) -> None:
    """Load the model and answer until the pipe ends: the whole life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session ends its workers
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    try:
        before_bytes, started_ns = _peak_bytes(), time.perf_counter_ns()
        with freed_memory_kept(), load_model(stored, request).predictor(num_threads) as predict:
            load_ns = time.perf_counter_ns() - started_ns
            worker = Worker(predict, request, stored.input_form)
            first_ns = worker.call_ns(_smallest(request))
            gc.collect()
            gc.disable()  # its pauses would count as latency
            _answer(pipe, {"load_ns": load_ns, "first_call_ns": first_ns})
            while line := _next(pipe):
                (command, argument), *_ = line.items()
                if command == "peak_memory":
                    _answer(pipe, {"bytes": max(0, _peak_bytes() - before_bytes)})
                elif command == "warm_up":
                    _answer(pipe, worker.warm_up(argument))
                else:
                    _answer(pipe, worker.block(*argument))
    except PtpipeError as error:
        _answer(pipe, {"error": str(error)})
    except Exception as error:  # noqa: BLE001  # a predictor may raise anything
        _answer(pipe, {"error": f"{type(error).__name__}: {error}"})


def _smallest(request: Request) -> int:
    """Return the number of the cell with the smallest batch."""
    return min(range(len(request.inputs)), key=lambda number: request.inputs[number].batch_size)


def load_model(stored: StoredModel, request: Request) -> Deployable:
    """Load the model with its class, which the session's process had loaded."""
    artifact_type: type[Deployable] = getattr(importlib.import_module(stored.module), stored.type)
    return artifact_type.load(Path(stored.folder)).with_source_functions(request.code.source_functions)


def waiting_ns() -> int | None:
    """Return how long this process's threads, together, have waited for a processor so far; None outside Linux."""
    waited_ns = None
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            # Time on a processor, time waiting for one, number of slices: Documentation/scheduler/sched-stats.rst.
            _, task_waited_ns, _ = file.read_text(encoding="ascii").split()
        except OSError:
            continue  # the thread has just ended
        waited_ns = (waited_ns or 0) + int(task_waited_ns)
    return waited_ns


def _peak_bytes() -> int:
    """Return the largest resident set so far; of a forked process, of all since its libraries were loaded."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBIBYTE


def _next(pipe: Connection) -> dict[str, Any] | None:
    try:
        command: dict[str, Any] = json.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return None
    return command


def _answer(pipe: Connection, content: Mapping[str, JSON]) -> None:
    pipe.send_bytes(json.dumps(content).encode())
