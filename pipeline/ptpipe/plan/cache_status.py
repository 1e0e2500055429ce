"""What a run would find cached, and why it would run the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ptpipe.errors import ManifestError, Problem, nearest
from ptpipe.events import Outcome
from ptpipe.plan.bind import Plan
from ptpipe.plan.keys import Key, differences
from ptpipe.store.runs import run_records
from ptpipe.store.store import Entry, Store

_MADE = (Outcome.DONE, Outcome.CACHED, Outcome.REFUSED)


@dataclass(frozen=True)
class CacheStatus:
    """What a run would do with a stage, and why."""

    stage_id: str
    key: Key
    entry: Entry | None
    """The stored result that would be used; None where the stage would work."""
    reasons: tuple[str, ...] = ()
    """Why it would work."""


def cache_statuses(plan: Plan, keys: Mapping[str, Key], store: Store, fresh: Collection[str] = ()) -> list[CacheStatus]:
    """Say of each stage whether its result is there, or what differs from the last run of this manifest's name.

    Raises ManifestError where a name in `fresh` is no stage's.
    """
    ids = [stage.id for stage in plan.stages]
    if unknown := [name for name in fresh if name not in ids]:
        raise ManifestError(
            Problem(f"--fresh {name}: there is no stage {name!r}", suggestion=nearest(name, ids)) for name in unknown
        )
    past = _PastParts(plan.manifest.name, store)
    result: list[CacheStatus] = []
    entries: dict[str, Entry | None] = {}
    for stage in plan.stages:
        key = keys[stage.id]
        entry = None if stage.id in fresh else store.entry(key.digest)
        if entry is not None and not is_current(entry, plan, stage.id, entries):
            entry = None
        entries[stage.id] = entry
        reasons = () if entry else tuple(_reasons(plan, stage.id, key, past, fresh, entries))
        result.append(CacheStatus(stage.id, key, entry, reasons))
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
    plan: Plan, stage_id: str, key: Key, past: _PastParts, fresh: Collection[str], entries: Mapping[str, Entry | None]
) -> Iterator[str]:
    if stage_id in fresh:
        yield "asked for with --fresh"
        return
    old = past.parts(stage_id)
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


class _PastParts:
    """What each stage was last made of in runs of one name; records are read as far back as need be."""

    def __init__(self, name: str, store: Store) -> None:
        self._records = (record for record in run_records(store, name) if record["name"] == name)
        self._parts: dict[str, Mapping[str, Any]] = {}

    def parts(self, stage_id: str) -> Mapping[str, Any] | None:
        while stage_id not in self._parts:
            record = next(self._records, None)
            if record is None:
                return None
            for stage in record["stages"]:
                if stage["outcome"] in _MADE:
                    self._parts.setdefault(stage["stage_id"], stage["parts"])
        return self._parts[stage_id]
