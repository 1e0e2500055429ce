"""How many starts and rounds a budget gives, with a clock of the test's."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from ptpipe import NamedCode
from ptpipe_eval.latency.latencies import StartUp
from ptpipe_eval.latency.request import CellInputs, Request, StoredModel
from ptpipe_eval.latency.server import Server

CALL_NS = 1_000_000
START_S = 0.2
BLOCK_S = 0.006
"""Five calls, and one before them."""
MODEL = StoredModel("net", "nets", "Net", "folder", "normalized")


class Clocked(Server):
    """Its workers answer at once; on its clock a command takes what it would on a machine `slowdown` times slower."""

    def __init__(self, budget_s: float, slowdown: float, waited_fraction: float) -> None:
        inputs = (CellInputs(1, None, {}), CellInputs(32, None, {}))
        request = Request((MODEL, MODEL), 0, inputs, (1,), budget_s, 1e-9, 7, NamedCode(), ())
        super().__init__(request, io.StringIO())
        self.now_s, self.slowdown, self.waited_fraction = 0.0, slowdown, waited_fraction
        self.num_starts = 0

    def _elapsed_s(self) -> float:
        return self.now_s

    @contextmanager
    def _workers(self, num_threads: int) -> Iterator[list[Any]]:
        self.now_s += self.slowdown * START_S
        self.num_starts += 1
        yield [ClockedWorker(self) for _ in range(3)]


class ClockedWorker:
    def __init__(self, server: Clocked) -> None:
        self.server = server

    def ask(self, **command: Any) -> dict[str, Any]:
        server, is_round = self.server, "block" in command
        server.now_s += server.slowdown * BLOCK_S
        call_ns = int(CALL_NS * (server.slowdown if is_round else 1))  # it warms up in a moment that is quiet
        return {
            "durations_ns": [call_ns] * 5,
            "cpu_ns": 5 * CALL_NS,
            "waited_ns": int(server.waited_fraction * 5 * call_ns),
        }

    def start_up(self) -> StartUp:
        return StartUp(1.0, 1.0, 1)


def measured(budget_s: float, slowdown: float, waited_fraction: float) -> tuple[Clocked, Sequence[Any]]:
    server = Clocked(budget_s, slowdown, waited_fraction)
    return server, [cell for _, cell in server._measure(1, budget_s)]


@pytest.mark.parametrize(("budget_s", "num_starts", "num_rounds"), [(1.0, 3, 9), (5.0, 5, 16)])
def test_a_quiet_machine_has_all_rounds_of_every_start(budget_s: float, num_starts: int, num_rounds: int) -> None:
    """As many as fit into a third of the budget, three times, or sixteen until all is precise."""
    server, cells = measured(budget_s, 1.0, 0.0)
    assert server.num_starts == num_starts and server.now_s < 2 * budget_s
    assert [(cell.num_starts, cell.num_rounds) for cell in cells] == [(num_starts, num_starts * num_rounds)] * 2


def test_a_busy_machine_ends_within_twice_the_budget() -> None:
    server, cells = measured(5.0, 10.0, 0.5)
    assert server.num_starts == 1 and server.now_s < 10
    assert all(cell.models[1].verdict == "unmeasurable" and cell.num_rounds >= 1 for cell in cells)


def test_one_that_is_busy_at_times_has_three_starts() -> None:
    server, _ = measured(5.0, 5.0, 0.0)
    assert server.num_starts == 3
