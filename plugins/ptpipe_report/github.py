"""What GitHub Actions shows of a run: annotations at the manifest's lines, and the job's summary.

See https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ptpipe import Location, RunFinished, RunStarted, one_line
from ptpipe_report import run_summary
from ptpipe_report.repository import path_in_repository

MAX_SUMMARY_BYTES = 1024 * 1024
"""Of all that a step adds; GitHub shows nothing of a longer one."""
_TRUNCATED = "**Truncated:** the whole report is `report.md` in the run's folder."


def workflow_commands(started: RunStarted, finished: RunFinished) -> Iterator[str]:
    """Yield an annotation for each stage that failed and each gate that did not pass, those that fail the run first.

    GitHub shows the first ten errors and the first ten warnings of a step.
    """
    locations = run_summary.locations(started)
    for stage in run_summary.failed_stages(finished.stages):
        yield _command("error", locations[stage.stage_id], f"{stage.stage_id} failed", stage.message)
    gates = [gate for gate in run_summary.gates(finished.stages) if not gate.is_passed]
    for gate in sorted(gates, key=lambda gate: not gate.fails_run):
        level = "error" if gate.fails_run else "warning"
        yield _command(level, locations[gate.stage_id], f"{gate.stage_id} {gate.decision}", gate.reason)


def append_summary(path: Path, sections: Sequence[str]) -> None:
    """Append a report to a step's summary: as many whole sections as GitHub shows. Raises OSError."""
    with path.open("ab") as file:
        room = MAX_SUMMARY_BYTES - file.tell()
        file.write(fitting(sections, room))


def fitting(sections: Sequence[str], room: int) -> bytes:
    """Return the first sections that fit into so many bytes, followed by a line that says so if there are more."""
    whole = _encoded(sections)
    if len(whole) <= room:
        return whole
    return next(
        (
            content
            for n in range(len(sections) - 1, -1, -1)
            if len(content := _encoded([*sections[:n], _TRUNCATED])) <= room
        ),
        b"",
    )


def _encoded(sections: Sequence[str]) -> bytes:
    return ("\n\n".join(sections) + "\n\n").encode("utf-8", "backslashreplace")


def _command(level: str, location: Location, title: str, message: str) -> str:
    properties = {
        "file": path_in_repository(location.path),
        "line": str(location.line),
        "col": str(location.column),
        "title": title,
    }
    listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{level} {listed}::{_data(message)}"


def _data(text: str) -> str:
    return one_line(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
