"""The record of a sweep: a folder in the artifacts folder, with `sweep.json` and the log of each trial."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ptpipe import ExitCode, PtpipeError, Store, write_atomically
from ptpipe_sweep.outcome import Ending, best, pareto_front, seed_means


class SweepRecord:
    """`sweeps/<time>-<manifest name>-<number>/`, written again after each trial."""

    def __init__(self, store: Store, name: str, facts: dict[str, Any]) -> None:
        """Create the folder. `facts`: of the whole sweep. Raises PtpipeError where it can't be written."""
        self.facts = facts
        self.endings: dict[int, Ending] = {}
        self.is_finished = False
        now = datetime.now(UTC)
        self._started_at = now.isoformat(timespec="seconds")
        self.folder = _new_folder(store.root / "sweeps", f"{now:%Y%m%d-%H%M%S}-{name}")
        self.write()

    @property
    def ordered(self) -> list[Ending]:
        """The trials that have ended, by number."""
        return [self.endings[number] for number in sorted(self.endings)]

    def add(self, ending: Ending) -> None:
        """Add or replace a trial, and write the record."""
        self.endings[ending.number] = ending
        self.write()

    def finish(self) -> None:
        """Write the record as that of a sweep that ran to its end."""
        self.is_finished = True
        self.write()

    def to_json(self) -> dict[str, Any]:
        """Return the content of `sweep.json`."""
        front, chosen = pareto_front(self.ordered), best(self.ordered)
        return {
            "version": 1,
            "sweep_id": self.folder.name,
            "started_at": self._started_at,
            "finished": self.is_finished,
            **self.facts,
            "best": chosen.number if chosen else None,
            "seed_means": [asdict(own) for own in seed_means(self.ordered)],
            "trials": [ending.to_json() | {"pareto": ending.number in front} for ending in self.ordered],
        }

    def write(self) -> None:
        """Write `sweep.json`."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        write_atomically(self.folder / "sweep.json", text.encode() + b"\n")


def _new_folder(parent: Path, name: str) -> Path:
    try:
        if not parent.exists():
            parent.mkdir(exist_ok=True)
            parent.chmod(parent.stat().st_mode | (parent.parent.stat().st_mode & 0o022))  # a team's stays the team's
        number = 1 + max((_number(path.name) for path in parent.iterdir()), default=0)
        while True:
            folder = parent / f"{name}-{number:05}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # another sweep has just begun
                number += 1
    except OSError as error:
        raise PtpipeError(f"cannot write to {parent}: {error.strerror or error}") from error


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def exit_code(endings: Sequence[Ending]) -> ExitCode:
    """Return the exit code of a whole sweep.

    0 where all trials ran to their end and one passed. Where one failed, 1 (5 for a corrupt artifact). Where none
    passed, that of the gates: 3 where one refused, else 4.
    """
    codes = {ending.exit_code for ending in endings}
    if ExitCode.INTEGRITY in codes:
        return ExitCode.INTEGRITY
    if codes - {ExitCode.DONE, ExitCode.REFUSED, ExitCode.UNDECIDED}:
        return ExitCode.FAILED
    if ExitCode.DONE in codes:
        return ExitCode.DONE
    return ExitCode.REFUSED if ExitCode.REFUSED in codes else ExitCode.UNDECIDED
