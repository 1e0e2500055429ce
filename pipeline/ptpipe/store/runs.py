"""Records of past runs: listing and finding them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from ptpipe.errors import Problem, UsageError, nearest
from ptpipe.store.store import Store

_LENGTH_OF_TIME = len("20260102-030405")
_NEEDED = {"name", "started_at", "seconds", "exit_code", "finished", "keys", "stages"}


def run_records(store: Store, name: str = "") -> Iterator[dict[str, Any]]:
    """The records of all runs (or of those with this in their id), newest first, read one by one.

    A folder without a readable record is passed over. `run_id` is the folder's name, whatever the record says.
    """
    folders = sorted((store.root / "runs").glob(f"*-{name}*"), reverse=True)
    for _, of_one_second in groupby(folders, key=lambda folder: folder.name[:_LENGTH_OF_TIME]):
        records = filter(None, map(_record, of_one_second))
        yield from sorted(records, key=lambda record: str(record["started_at"]), reverse=True)


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record | {"run_id": folder.name} if isinstance(record, dict) and record.keys() >= _NEEDED else None


def find_run(store: Store, wanted: str) -> tuple[dict[str, Any], Path]:
    """The record and folder of a run by id, by the unambiguous start or end of one, or `last`. Raises UsageError."""
    records = list(run_records(store))
    ids = [record["run_id"] for record in records]
    matching = [r for r in records if wanted == r["run_id"]] or [
        record for record in records if record["run_id"].startswith(wanted) or record["run_id"].endswith(wanted)
    ]
    if wanted == "last" and records:
        matching = records[:1]
    if len(matching) == 1:
        return matching[0], store.root / "runs" / matching[0]["run_id"]
    if matching:
        raise UsageError(f"{wanted!r} fits {len(matching)} runs; give more of the id")
    raise UsageError(str(Problem(f"there is no run {wanted!r} under {store.root}", suggestion=nearest(wanted, ids))))
