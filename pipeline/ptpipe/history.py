"""Runs that were: their records, and what the next run will find cached."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptpipe.errors import Problem, PtpipeError, nearest
from ptpipe.events import Outcome
from ptpipe.keys import Key, differences
from ptpipe.plan import Plan
from ptpipe.store import Entry, Store

_MADE = (Outcome.DONE, Outcome.CACHED, Outcome.REFUSED)


@dataclass(frozen=True)
class Forecast:
    """What a run would do with a stage, and why."""

    stage_id: str
    key: Key
    entry: Entry | None
    """The stored result that would be used; None where the stage would work."""
    reasons: tuple[str, ...] = ()
    """Why it would work."""


def forecast(plan: Plan, keys: Mapping[str, Key], store: Store, fresh: Collection[str] = ()) -> list[Forecast]:
    """Say of each stage whether its result is there, or what differs from the last run of this manifest's name."""
    result: list[Forecast] = []
    entries: dict[str, Entry | None] = {}
    for stage in plan.stages:
        key = keys[stage.id]
        entry = None if stage.id in fresh else store.entry(key.digest)
        if entry is not None and not is_current(entry, plan, stage.id, entries):
            entry = None
        entries[stage.id] = entry
        reasons = () if entry else tuple(_reasons(plan, stage.id, key, store, fresh, entries))
        result.append(Forecast(stage.id, key, entry, reasons))
    return result


def is_current(entry: Entry, plan: Plan, stage_id: str, upstream: Mapping[str, Entry | None]) -> bool:
    """Whether a result was made from the very objects that the stages above have now.

    Keys alone don't tell after `--fresh`, or after a lost object was made again: a measured value, or a stage that
    isn't reproducible, gives another object under the same key. A stage above that will work (None) is trusted to
    give what it gave before; the run looks again once it knows.
    """
    for port, references in plan[stage_id].wiring.items():
        for reference, digest in zip(references, entry.inputs.get(port, ()), strict=False):
            made = upstream.get(reference.stage)
            if made is not None and made.outputs[reference.output].digest != digest:
                return False
    return True


def _reasons(
    plan: Plan, stage_id: str, key: Key, store: Store, fresh: Collection[str], entries: Mapping[str, Entry | None]
) -> Iterator[str]:
    if stage_id in fresh:
        yield "asked for with --fresh"
        return
    old = _last_parts(plan.manifest.name, stage_id, store)
    if old is None:
        yield "never made under this name"
        return
    lines = differences(old, key.parts)
    for line in lines:
        if not line.startswith("inputs."):
            yield line
    changed = [name for name in plan[stage_id].upstream if entries.get(name) is None]
    if changed and any(line.startswith("inputs.") for line in lines):
        yield f"changed above: {', '.join(changed)}"
    elif any(line.startswith("inputs.") for line in lines):
        yield "bound to other inputs"
    if not lines:
        yield "its result is gone, was altered, or was never finished"


def _last_parts(name: str, stage_id: str, store: Store) -> Mapping[str, Any] | None:
    for record in run_records(store):
        if record.get("name") != name:
            continue
        for stage in record["stages"]:
            if stage["stage_id"] == stage_id and stage["outcome"] in _MADE:
                parts: Mapping[str, Any] = stage["parts"]
                return parts
    return None


def run_records(store: Store) -> Iterator[dict[str, Any]]:
    """The records of all runs, newest first; a folder without a readable record is passed over."""
    folder = store.root / "runs"
    records = [_record(path) for path in folder.glob("*/record.json")]
    yield from sorted(filter(None, records), key=lambda record: str(record["started_at"]), reverse=True)


def _record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "started_at" in record else None


def find_run(store: Store, wanted: str) -> tuple[dict[str, Any], Path]:
    """The record and folder of a run by id, by the unambiguous start or end of one, or `last`."""
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
        raise PtpipeError(f"{wanted!r} fits {len(matching)} runs; give more of the id")
    raise PtpipeError(str(Problem(f"there is no run {wanted!r} under {store.root}", suggestion=nearest(wanted, ids))))
