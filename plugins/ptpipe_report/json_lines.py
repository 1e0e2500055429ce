"""Write events as JSON lines: strict JSON (RFC 8259), one object per line, written as soon as it is reported."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from ptpipe import (
    JSON,
    Attachment,
    Event,
    LogLine,
    Metric,
    Notice,
    Progress,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
)

AnyEvent: TypeAlias = RunStarted | StageStarted | Event | StageFinished | RunFinished

_TYPES: Mapping[type, str] = {
    RunStarted: "run_started",
    StageStarted: "stage_started",
    Progress: "progress",
    Metric: "metric",
    Notice: "notice",
    LogLine: "log",
    Attachment: "attachment",
    StageFinished: "stage_finished",
    RunFinished: "run_finished",
}
_PROGRESS_INTERVAL_S = 1.0


class JsonLinesFile:
    """The events of one run in one file.

    Each line is one unbuffered write: a killed process leaves whole lines, at worst a truncated one at the end.
    Progress is thinned to a stage's first event, about one per second and the last; `clock` returns seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = path.open("wb", buffering=0), clock
        self._due_s: dict[str, float] = {}
        self._withheld: dict[str, tuple[Progress, datetime]] = {}

    def write(self, event: AnyEvent) -> None:
        """Write it, after the progress withheld of its stage (of all stages at the end of the run)."""
        ended = [event.stage_id] if isinstance(event, StageFinished) else []
        for stage_id in list(self._withheld) if isinstance(event, RunFinished) else ended:
            if stage_id in self._withheld:
                self._write_line(*self._withheld.pop(stage_id))
        self._write_line(event, datetime.now(UTC))

    def write_event(self, event: Event) -> None:
        """Write it; withhold progress if some was written within the last second."""
        if not isinstance(event, Progress):
            self.write(event)
            return
        now_s = self._clock()
        if now_s < self._due_s.get(event.stage_id, now_s):
            self._withheld[event.stage_id] = (event, datetime.now(UTC))
            return
        self._due_s[event.stage_id] = now_s + _PROGRESS_INTERVAL_S
        self._withheld.pop(event.stage_id, None)
        self.write(event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_line(self, event: AnyEvent, at: datetime) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(to_line(event, at))
        except OSError:  # a full disk: a reporter that raised is not called again, so close the file here
            self._file.close()
            raise


def to_line(event: AnyEvent, at: datetime) -> bytes:
    """Return one line of strict JSON: `type`, `time` (ISO 8601, UTC, milliseconds), then the event's fields."""
    content: dict[str, JSON] = {
        "type": _TYPES[type(event)],
        "time": at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    for field in fields(event):
        if not (isinstance(event, RunFinished) and field.name == "stages"):
            content[field.name] = to_json(getattr(event, field.name))
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def to_json(value: Any) -> JSON:
    """Return the nearest JSON value. Non-finite numbers become the strings `NaN`, `Infinity` and `-Infinity`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _non_finite(value)
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value.as_posix() if isinstance(value, PurePath) else str(value)


def _non_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
