"""Write events as JSON lines: strict JSON (RFC 8259), one object per line, written as soon as it is reported."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from io import FileIO
from typing import Any, TypeAlias

from ptpipe import (
    JSON,
    Attachment,
    Event,
    LogLine,
    Metric,
    Notice,
    Progress,
    Reporter,
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


class JsonLines(Reporter):
    """Write every event to `events.jsonl` in the run's folder as it arrives; `clock` returns seconds.

    One strict JSON object per line: `type`, `time` (UTC) and the fields of the event's class in `ptpipe.events`. NaN
    and the infinities become the strings `NaN`, `Infinity`, `-Infinity`. Progress is thinned to a stage's first event,
    about one per second and the last. Each line is one unbuffered write: a killed process leaves whole lines, at worst
    a truncated one at the end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: FileIO | None = None
        self._clock = clock
        self._due_s: dict[str, float] = {}
        self._withheld: dict[str, tuple[Progress, datetime]] = {}

    def run_started(self, event: RunStarted) -> None:
        """Create the file."""
        self._file = FileIO(event.folder / "events.jsonl", "w")
        self._write(event)

    def stage_started(self, event: StageStarted) -> None:
        """Write the event."""
        self._write(event)

    def event(self, event: Event) -> None:
        """Write the event; withhold progress if some was written within the last second."""
        if isinstance(event, Progress):
            now_s = self._clock()
            if now_s < self._due_s.get(event.stage_id, now_s):
                self._withheld[event.stage_id] = (event, datetime.now(UTC))
                return
            self._due_s[event.stage_id] = now_s + _PROGRESS_INTERVAL_S
            self._withheld.pop(event.stage_id, None)
        self._write(event)

    def stage_finished(self, event: StageFinished) -> None:
        """Write the stage's last progress, then the event."""
        self._write_withheld(event.stage_id)
        self._write(event)

    def run_finished(self, event: RunFinished) -> None:
        """Write the event without its stages, each of which has its own line, and close the file."""
        for stage_id in list(self._withheld):
            self._write_withheld(stage_id)
        self._write(event)
        if self._file:
            self._file.close()

    def _write_withheld(self, stage_id: str) -> None:
        if stage_id in self._withheld:
            self._write(*self._withheld.pop(stage_id))

    def _write(self, event: AnyEvent, at: datetime | None = None) -> None:
        if self._file is None or self._file.closed:
            return
        try:
            self._file.write(to_line(event, at or datetime.now(UTC)))
        except OSError:  # a full disk: a reporter that raised is not called again, so close the file here
            self._file.close()
            raise


def to_line(event: AnyEvent, at: datetime) -> bytes:
    """Return one line of strict JSON: `type`, `time` (ISO 8601, UTC, milliseconds), then the event's fields."""
    content = {
        "type": _TYPES[type(event)],
        "time": at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    left_out = ("stages", "sections") if isinstance(event, RunFinished) else ()
    names = [field.name for field in fields(event) if field.name not in left_out]
    content |= {name: getattr(event, name) for name in names}
    return json.dumps(to_json(content), allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def to_json(value: Any) -> JSON:
    """Return the nearest JSON value. Non-finite numbers become the strings `NaN`, `Infinity` and `-Infinity`."""
    plain: JSON = json.loads(json.dumps(value, default=_plain), parse_constant=str)
    return plain


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)
