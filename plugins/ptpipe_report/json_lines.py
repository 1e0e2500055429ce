"""News as JSON lines: strict JSON (RFC 8259), one object a line, in the file as soon as it is told."""

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

News: TypeAlias = RunStarted | StageStarted | Event | StageFinished | RunFinished

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
    """One run's event in one file.

    Each line is one unbuffered write: a killed process leaves whole lines, at worst a cut one at the end. Of
    progress, the first event of a stage, about one a second and the last are kept.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = path.open("wb", buffering=0), clock
        self._due_s: dict[str, float] = {}
        self._held_back: dict[str, tuple[Progress, datetime]] = {}

    def write(self, event: News) -> None:
        """Write it, after what was held back of its stage (or, at the end of the run, of any)."""
        ended = [event.stage_id] if isinstance(event, StageFinished) else []
        for stage_id in list(self._held_back) if isinstance(event, RunFinished) else ended:
            if stage_id in self._held_back:
                self._write_line(*self._held_back.pop(stage_id))
        self._write_line(event, datetime.now(UTC))

    def write_event(self, event: Event) -> None:
        """Write it; hold progress back where some was written within the last second."""
        if not isinstance(event, Progress):
            self.write(event)
            return
        now_s = self._clock()
        if now_s < self._due_s.get(event.stage_id, now_s):
            self._held_back[event.stage_id] = (event, datetime.now(UTC))
            return
        self._due_s[event.stage_id] = now_s + _PROGRESS_INTERVAL_S
        self._held_back.pop(event.stage_id, None)
        self.write(event)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _write_line(self, event: News, at: datetime) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(to_line(event, at))
        except OSError:  # a full disk: whoever tells us won't do so again, so nobody else would close it
            self._file.close()
            raise


def to_line(event: News, at: datetime) -> bytes:
    """One line of strict JSON: `type`, `time` (ISO 8601, UTC, milliseconds), then the event' own fields."""
    content: dict[str, JSON] = {
        "type": _TYPES[type(event)],
        "time": at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    for field in fields(event):
        if not (isinstance(event, RunFinished) and field.name == "stages"):
            content[field.name] = to_json(getattr(event, field.name))
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def to_json(value: Any) -> JSON:
    """The nearest JSON value. Numbers that JSON lacks become the strings `NaN`, `Infinity` and `-Infinity`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _named(value)
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value.as_posix() if isinstance(value, PurePath) else str(value)


def _named(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
