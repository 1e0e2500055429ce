"""Cache status of a plan's stages: what a run would find cached, and why it would run the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ptpipe.errors import IntegrityError, ManifestError, Problem, nearest
from ptpipe.events import Outcome
from ptpipe.plan.bind import Plan
from ptpipe.plan.keys import Key, differences
from ptpipe.plan.read_files import changed_files
from ptpipe.plan.rules import hook_warnings
from ptpipe.plan.source_digest import SourceDigests
from ptpipe.store.runs import run_records
from ptpipe.store.store import Entry, Store

_WITH_RESULT = (Outcome.DONE, Outcome.CACHED, Outcome.REFUSED, Outcome.UNDECIDED)
_MAX_RECORDS = 20  # a stage that is new in a manifest with thousands of runs must not cost reading them all


@dataclass(frozen=True)
class CacheStatus:
    """Whether a run would find a stage cached, and why it would run it."""

    stage_id: str
    key: Key
    entry: Entry | None
    """The stored result that a run would use; None where it would run the stage."""
    reasons: tuple[str, ...] = ()
    """Why it would run the stage."""

    @property
    def is_cached(self) -> bool:
        """Whether a run would use a stored result."""
        return self.entry is not None


def cache_statuses(
    plan: Plan, keys: Mapping[str, Key], store: Store, sources: SourceDigests, fresh: Collection[str] = ()
) -> list[CacheStatus]:
    """Return for each stage its stored result, or what differs from the last run of this manifest's name.

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
        entry: Entry | None = None
        faults: list[Exception] = []
        if stage.id not in fresh:
            try:
                entry = stored_entry(plan, stage.id, key, store)
                for stored in entry.outputs.values() if entry else ():
                    store.require(stored.digest)
            except (IntegrityError, OSError) as error:
                entry, faults = None, [error]
        changed = _changed_files(entry, sources) if entry else ()
        if entry is not None and (changed or not _is_of_inputs(entry, plan, stage.id, entries)):
            entry = None
        entries[stage.id] = entry
        found = faults or changed or _reasons(plan, stage.id, key, past, fresh, entries)
        reasons = () if entry else tuple(map(str, found))
        result.append(CacheStatus(stage.id, key, entry, reasons))
    return result


def check_results(plan: Plan, statuses: Iterable[CacheStatus]) -> tuple[Problem, ...]:
    """Return the plan's warnings, with those that plugins have in view of the results that a run would find cached.

    Raises ManifestError where a plugin finds an error.
    """
    summaries = {
        status.stage_id: {name: dict(stored.summary) for name, stored in status.entry.outputs.items()}
        for status in statuses
        if status.entry is not None
    }
    return plan.warnings + hook_warnings(plan, "ptpipe_check_results", summaries=summaries)


def stored_entry(plan: Plan, stage_id: str, key: Key, store: Store) -> Entry | None:
    """Return the index entry of a stage's key; None where there is none.

    Raises IntegrityError where it was altered or is no result of such a stage, OSError where it can't be read. Its
    objects are not looked at.
    """
    entry, stage = store.read_entry(key.digest), plan[stage_id]
    if entry is None:
        return None
    num_inputs = {port: len(references) for port, references in stage.wiring.items()}
    outputs = {port.name for port in stage.stage.outputs}
    if entry.outputs.keys() != outputs or num_inputs != {port: len(made) for port, made in entry.inputs.items()}:
        raise IntegrityError(f"the index entry {key.short} is no result of {stage.kind}")
    return entry


def is_current(
    entry: Entry, plan: Plan, stage_id: str, upstream: Mapping[str, Entry | None], sources: SourceDigests
) -> bool:
    """Return whether a result was computed by code, and from the very files and objects, that are there now.

    Keys don't know modules that a stage imports by names that it computes, nor files that it finds out about: the entry
    has them.
    """
    return _is_of_inputs(entry, plan, stage_id, upstream) and not _changed_files(entry, sources)


def _is_of_inputs(entry: Entry, plan: Plan, stage_id: str, upstream: Mapping[str, Entry | None]) -> bool:
    """Return whether a result was computed from the very objects that are there now.

    Keys alone don't tell after `--fresh`, or after a lost object was rebuilt: a measured value, or a stage that is not
    reproducible, gives another object under the same key. A stage above that will run (None) is assumed to give what it
    gave before; the run checks again afterwards.
    """
    for port, references in plan[stage_id].wiring.items():
        for reference, digest in zip(references, entry.inputs.get(port, ()), strict=False):
            made = upstream.get(reference.stage)
            if made is not None and made.outputs[reference.output].digest != digest:
                return False
    return True


def _changed_files(entry: Entry, sources: SourceDigests) -> tuple[str, ...]:
    """Return a line for each module and file that the stage read beyond its key, and that has changed since."""
    changed = []
    for name, digest in entry.dependencies.items():
        now = sources.digest(name)
        if now is None or now.digest != digest:
            shown = name.removeprefix("./") if "/" in name else f"{name.replace('.', '/')}.py"
            changed.append(f"a module it imported {'changed' if now else 'is missing'}: {shown}")
    return (*changed, *changed_files(entry.files))


def _reasons(
    plan: Plan, stage_id: str, key: Key, past: _PastParts, fresh: Collection[str], entries: Mapping[str, Entry | None]
) -> Iterator[str]:
    if stage_id in fresh:
        yield "requested with --fresh"
        return
    old = past.parts(stage_id)
    if old is None:
        yield past.describe_absence()
        return
    lines = differences(old, key.parts)
    for line in lines:
        if not line.startswith("inputs."):
            yield line
    changed = [name for name in plan[stage_id].upstream if entries.get(name) is None]
    if changed and any(line.startswith("inputs.") for line in lines):
        yield f"upstream changed: {', '.join(changed)}"
    elif any(line.startswith("inputs.") for line in lines):
        yield "connected to other inputs"
    if not lines:
        yield "result missing, altered or unfinished"


class _PastParts:
    """The key parts of each stage's last result in recent runs of one name; records are read back as far as needed."""

    def __init__(self, name: str, store: Store) -> None:
        self._records = run_records(store, name)
        self._num_read = 0
        self._parts: dict[str, Mapping[str, Any]] = {}

    def parts(self, stage_id: str) -> Mapping[str, Any] | None:
        while stage_id not in self._parts:
            record = next(self._records, None) if self._num_read < _MAX_RECORDS else None
            if record is None:
                return None
            self._num_read += 1
            for stage in record["stages"]:
                if stage["outcome"] in _WITH_RESULT:
                    self._parts.setdefault(stage["stage_id"], stage["parts"])
        return self._parts[stage_id]

    def describe_absence(self) -> str:
        return "no earlier result" if self._num_read < _MAX_RECORDS else f"no result in the last {_MAX_RECORDS} runs"
