"""The process that starts workers and decides what runs when: `python -m ptpipe_eval.latency.server`.

It reads one request and writes events to its standard output, one JSON object a line: `progress` after every round,
then either `result` or `error`. It ends as soon as its standard input does, so that it never outlives the run. It loads
libraries once, uses none of them, and forks: a worker is ready in milliseconds, with memory of its own.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from ptpipe import JSON, StageError
from ptpipe.launching import load_vocabulary
from ptpipe_eval.latency import estimate
from ptpipe_eval.latency.estimate import Block, CellEstimate, Round
from ptpipe_eval.latency.latencies import StartUp
from ptpipe_eval.latency.request import CellInputs, Request
from ptpipe_eval.latency.worker import run_worker
from ptpipe_torch import torchvision

_BLOCK_NS = 5_000_000
"""A round is short against the slow moments of a virtual machine, 40 to 200 ms, which then slow all of it alike."""
_MAX_CALLS = 2000
_MAX_ROUNDS, _ROUNDS_S = 16, 2.0
"""Of a start and a batch size: so many, or as many as fit into the time."""
_MIN_PRECISE_STARTS = 5
_MIN_CALLS = 2 * estimate.MIN_STARTS - 1
"""Of each model that there must be time for, beside its first one: two of a start, to warm up and to measure."""
_OVERTIME = 2
"""Times the budget that slow models may take for the fewest starts that give an interval."""


class WorkerError(Exception):
    """A worker has failed or died; the message is for the user."""


class _SessionEndedError(Exception):
    """No process waits for the result any more."""


@dataclass
class _WorkerProcess:
    """A worker, stopped unless it answers: threads that wait actively for the next call would take others' time."""

    name: str
    pid: int
    pipe: Connection
    ready: dict[str, Any] = field(default_factory=dict)
    """Its first answer."""

    def start_up(self) -> StartUp:
        """Return what it took so far."""
        peak = self.ask(peak_memory=None)
        return StartUp(self.ready["load_ns"] / 1e6, self.ready["first_call_ns"] / 1e6, int(peak["bytes"]))

    def ask(self, **command: JSON) -> dict[str, Any]:
        """Send a command and return the answer."""
        os.kill(self.pid, signal.SIGCONT)
        with suppress(BrokenPipeError):
            self.pipe.send_bytes(json.dumps(command).encode())
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return its next answer. Raises WorkerError where it fails or has died, _SessionEndedError at any time."""
        try:
            select.select([self.pipe.fileno(), sys.stdin.fileno()], [], [])
            if not self.pipe.poll():
                raise _SessionEndedError
            content: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        except EOFError:
            raise WorkerError(f"{self.name}: {self._death()}") from None
        if "error" in content:
            raise WorkerError(f"{self.name}: {content['error']}")
        os.kill(self.pid, signal.SIGSTOP)
        return content

    def end(self) -> None:
        """Close the pipe, which ends the worker, and wait for that."""
        self.pipe.close()
        if self.pid:
            os.kill(self.pid, signal.SIGCONT)
            os.waitpid(self.pid, 0)

    def kill(self) -> None:
        """End the worker at once: one that is stopped would stay, one that predicts may take any time."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def _death(self) -> str:
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if os.WIFSIGNALED(status):
            return f"the process that measured it was ended by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"the process that measured it ended with exit code {os.waitstatus_to_exitcode(status)}"


@dataclass
class _Cell:
    """What was measured with the inputs of one cell."""

    number: int
    inputs: CellInputs
    rounds: list[Round] = field(default_factory=list)
    call_ns: Sequence[int] = ()
    """How long a call of each model takes, about."""
    is_too_slow: bool = False
    """Whether even the fewest calls that give an interval take longer than the budget allows."""


class Server:
    """Measures what one request asks for."""

    def __init__(self, request: Request, out: IO[str]) -> None:
        self._request, self._out = request, out
        self._models = [*request.models, request.models[request.baseline]]
        self._random = random.Random(request.seed)  # noqa: S311  # the order of measuring is no secret
        self._started_s = time.monotonic()
        self._start_ups: list[list[StartUp]] = []
        self._too_slow_s = 0.0

    def run(self) -> None:
        """Measure all cells and write the result."""
        cells: list[dict[str, Any]] = []
        all_threads = self._request.threads
        for position, num_threads in enumerate(all_threads):
            left_s = self._request.budget_s - self._spent_s()
            share_s = max(left_s / (len(all_threads) - position), self._request.budget_s / len(all_threads))
            for inputs, cell in self._measure(num_threads, share_s):
                sizes = {"batch_size": inputs.batch_size, "length": inputs.length, "num_threads": num_threads}
                cells.append({**sizes, **asdict(cell)})
        start_ups = [_typical(own) for own in zip(*self._start_ups, strict=True)][:-1]
        self._tell(event="result", cells=cells, start_ups=list(map(asdict, start_ups)))

    def _measure(self, num_threads: int, budget_s: float) -> Iterator[tuple[CellInputs, CellEstimate]]:
        cells = [_Cell(number, inputs) for number, inputs in enumerate(self._request.inputs)]
        baseline, begin_s = self._request.baseline, self._spent_s()
        unfinished, start = cells, 0
        while unfinished:
            rounds_s = min(_ROUNDS_S, budget_s / estimate.MIN_STARTS / len(unfinished))
            with self._workers(num_threads) as workers:
                for cell in unfinished:
                    self._warm_up(cell, workers, _OVERTIME * budget_s if start == 0 else math.inf)
                    if not cell.is_too_slow:
                        self._add_rounds(cell, workers, start, num_threads, rounds_s)
                self._start_ups.append([worker.start_up() for worker in workers])
            start += 1
            unfinished = [cell for cell in unfinished if not cell.is_too_slow]
            spent_s = self._spent_s() - begin_s
            has_result = any(estimate.undisturbed(cell.rounds, num_threads) for cell in unfinished)
            if spent_s > _OVERTIME * budget_s or (
                spent_s > budget_s and (start >= estimate.MIN_STARTS or not has_result)
            ):
                break
            if start >= _MIN_PRECISE_STARTS:
                found = [(cell, estimate.estimate_cell(cell.rounds, baseline, num_threads)) for cell in unfinished]
                unfinished = [cell for cell, own in found if not estimate.is_precise(own, self._request.precision)]
        for cell in cells:
            yield cell.inputs, estimate.estimate_cell(cell.rounds, baseline, num_threads)

    def _warm_up(self, cell: _Cell, workers: Sequence[_WorkerProcess], max_s: float) -> None:
        """Get ready, and learn how long a call takes. Where that is too long for the budget, it is all we know."""
        began_s = time.monotonic()
        blocks = tuple(Block(**worker.ask(warm_up=cell.number)) for worker in workers)
        cell.call_ns = [int(block.median_ns) for block in blocks]
        cell.is_too_slow = _MIN_CALLS * sum(cell.call_ns) > 1e9 * max_s
        if cell.is_too_slow:
            cell.rounds.append(Round(0, blocks))
            self._too_slow_s += time.monotonic() - began_s

    def _add_rounds(
        self, cell: _Cell, workers: Sequence[_WorkerProcess], start: int, num_threads: int, rounds_s: float
    ) -> None:
        """Measure rounds of these workers: where some are disturbed, up to twice as many as wanted, in twice the time.

        On a busy machine a round takes several times as long as the calls that the workers warmed up with.
        """
        batch_size = cell.inputs.batch_size
        num_calls = [min(_MAX_CALLS, max(1, _BLOCK_NS // own)) for own in cell.call_ns]
        round_ns = sum((1 + count) * own for count, own in zip(num_calls, cell.call_ns, strict=True))
        num_wanted = min(_MAX_ROUNDS, max(1, int(1e9 * rounds_s) // round_ns))
        end_s = self._elapsed_s() + _OVERTIME * rounds_s
        for _ in range(2 * num_wanted):
            cell.rounds.append(self._round(workers, cell.number, start, num_calls))
            self._tell(event="progress", elapsed_s=self._elapsed_s(), batch_size=batch_size, num_threads=num_threads)
            good = estimate.undisturbed(cell.rounds, num_threads)
            if sum(own.start == start for own in good) == num_wanted or self._elapsed_s() > end_s:
                return

    def _round(self, workers: Sequence[_WorkerProcess], cell: int, start: int, num_calls: Sequence[int]) -> Round:
        order = self._shuffled()
        blocks = {position: Block(**workers[position].ask(block=[cell, num_calls[position]])) for position in order}
        return Round(start, tuple(blocks[position] for position in range(len(workers))))

    @contextmanager
    def _workers(self, num_threads: int) -> Iterator[list[_WorkerProcess]]:
        """Start a worker for each model and the control, in random order, since what starts first may fare better."""
        workers: dict[int, _WorkerProcess] = {}
        try:
            for position in self._shuffled():
                pipes = [worker.pipe for worker in workers.values()]
                workers[position] = worker = self._fork(position, num_threads, pipes)
                worker.ready = worker.answer()
            yield [workers[position] for position in range(len(self._models))]
        except _SessionEndedError:
            for worker in workers.values():
                worker.kill()
            os._exit(1)
        finally:
            for worker in workers.values():
                worker.end()

    def _fork(self, position: int, num_threads: int, others: Sequence[Connection]) -> _WorkerProcess:
        here, there = Pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for pipe in (here, *others):  # else they would not end when the server does
                    pipe.close()
                run_worker(there, self._models[position], self._request, num_threads)
                code = 0
            finally:
                os._exit(code)
        there.close()
        return _WorkerProcess(self._models[position].name, pid, here)

    def _shuffled(self) -> list[int]:
        """Return the positions of all models and the control in random order."""
        return self._random.sample(range(len(self._models)), len(self._models))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _spent_s(self) -> float:
        """Return what was spent of the budget: all but the time to learn that calls are too slow for it."""
        return self._elapsed_s() - self._too_slow_s

    def _tell(self, **content: Any) -> None:
        self._out.write(json.dumps(content) + "\n")
        self._out.flush()


def _typical(start_ups: Sequence[StartUp]) -> StartUp:
    """Return the median of each figure."""
    from statistics import median

    return StartUp(
        median(own.load_ms for own in start_ups),
        median(own.first_call_ms for own in start_ups),
        int(median(own.peak_memory_bytes for own in start_ups)),
    )


def _preload(request: Request) -> None:
    """Import what the workers need, and start none of its threads."""
    for name in request.libraries:
        torchvision() if name == "torchvision" else importlib.import_module(name)
    load_vocabulary(request.code.plugins, Path(request.code.folder))


def _own_stdout() -> IO[str]:
    """Return what was the standard output; from now on prints go to the standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def main() -> None:
    """Serve one request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the session hears, and closes the standard input
    out = _own_stdout()
    request = Request.from_json(sys.stdin.readline())
    _preload(request)
    server = Server(request, out)
    try:
        server.run()
    except (WorkerError, StageError) as error:
        out.write(json.dumps({"event": "error", "message": str(error)}) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
