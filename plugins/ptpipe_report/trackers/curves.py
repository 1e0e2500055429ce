"""What trackers draw: points of curves as they happen, and the figures of a stage that has ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeGuard

from ptpipe import JSON, Progress, StageFinished
from ptpipe_report.comparison import tables

_INTERVAL_S = 1.0
_COUNTERS = ("epoch", "step")


class Point(NamedTuple):
    """One value of a curve."""

    name: str
    """`pretrain/loss`."""
    value: float
    step: int


class Curves:
    """Turns the events of a run into points; `clock` returns seconds.

    - `stage/name` over optimizer steps, while the stage runs, about one point a second;
    - `stage/epoch/name` over epochs, as each one ends, or from the stage's result where it is cached or was resumed;
    - `stage/result/name` and `stage/model/column`, one point each: the stage's metrics, and its comparison of models.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s: dict[str, float] = {}
        self._withheld: dict[str, Progress] = {}
        self._epochs: dict[str, set[int]] = {}

    def progress(self, event: Progress) -> Iterator[Point]:
        """Yield the points of an event; a second's events but the first are withheld until a later one is due."""
        if "epoch" in event.facts and "step" not in event.facts:
            yield from self._withheld_points(event.stage_id)
            yield from self._epoch(event.stage_id, event.facts)
            return
        now_s = self._clock()
        if now_s < self._due_s.get(event.stage_id, now_s):
            self._withheld[event.stage_id] = event
            return
        self._due_s[event.stage_id] = now_s + _INTERVAL_S
        self._withheld.pop(event.stage_id, None)
        yield from _points(event.stage_id, event.facts, _whole(event.facts.get("step"), event.done))

    def finished(self, stage: StageFinished) -> Iterator[Point]:
        """Yield the last points of a stage, and what it ended with."""
        yield from self._withheld_points(stage.stage_id)
        for value in stage.metrics.values():
            for row in value if isinstance(value, list) else ():
                if isinstance(row, Mapping) and "epoch" in row:
                    yield from self._epoch(stage.stage_id, row)
        yield from _points(f"{stage.stage_id}/result", stage.metrics, 0)
        yield from _compared(stage)

    def _withheld_points(self, stage_id: str) -> Iterator[Point]:
        if event := self._withheld.pop(stage_id, None):
            yield from _points(stage_id, event.facts, _whole(event.facts.get("step"), event.done))

    def _epoch(self, stage_id: str, row: Mapping[str, JSON]) -> Iterator[Point]:
        epoch, seen = _whole(row["epoch"], 0), self._epochs.setdefault(stage_id, set())
        if epoch not in seen:
            seen.add(epoch)
            yield from _points(f"{stage_id}/epoch", row, epoch)


def _points(prefix: str, values: Mapping[str, JSON], step: int) -> Iterator[Point]:
    for name, value in values.items():
        if name not in _COUNTERS and is_number(value):
            yield Point(f"{prefix}/{name}", value, step)


def is_number(value: JSON) -> TypeGuard[int | float]:
    """Return whether a value is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: JSON, default: int) -> int:
    return value if isinstance(value, int) else default


def _compared(stage: StageFinished) -> Iterator[Point]:
    for table in tables([stage]):
        names, *columns = table.columns
        for column in columns:
            for name, cell in zip(names.values, column.values, strict=True):
                value = cell[0] if isinstance(cell, list) and cell else cell  # a number and its interval
                if is_number(value):
                    yield Point(f"{table.stage_id}/{name}/{column.label}", value, 0)
