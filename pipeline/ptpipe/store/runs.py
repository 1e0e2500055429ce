"""Records of past runs: list them, find one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from ptpipe.errors import IntegrityError, Problem, UsageError, nearest
from ptpipe.store.documents import read_document
from ptpipe.store.store import Store

_TIME_LENGTH = len("20260102-030405")
_REQUIRED = {"name", "started_at", "seconds", "exit_code", "finished", "keys", "stages"}


def run_records(store: Store, name: str = "") -> Iterator[dict[str, Any]]:
    """Yield the records of all runs (or of those with `name` in their id), newest first, read lazily.

    Folders without a readable record are skipped. `run_id` is the folder's name, whatever the record has.
    """
    folders = sorted((store.root / "runs").glob(f"*-{name}*"), reverse=True)
    for _, same_second in groupby(folders, key=lambda folder: folder.name[:_TIME_LENGTH]):
        records = filter(None, map(_record, same_second))
        yield from sorted(records, key=lambda record: str(record["started_at"]), reverse=True)


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        record = read_document(folder / "record.json")
    except (IntegrityError, OSError):
        return None
    return record | {"run_id": folder.name} if record.keys() >= _REQUIRED else None


def find_run(store: Store, wanted: str) -> tuple[dict[str, Any], Path]:
    """Return the record and folder of a run by its id, the unambiguous start or end of one, or `last`.

    Raises UsageError where no run or several runs match.
    """
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
        raise UsageError(f"{wanted!r} matches {len(matching)} runs; give more of the id")
    raise UsageError(str(Problem(f"there is no run {wanted!r} under {store.root}", suggestion=nearest(wanted, ids))))
