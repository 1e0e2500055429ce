"""Stored results of a plan's stages, verified as far as a run depends on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ptpipe.artifact import Verdict
from ptpipe.errors import IntegrityError
from ptpipe.execution.deliverables import may_deliver
from ptpipe.plan.bind import Plan, PlannedStage
from ptpipe.plan.cache_status import is_current, stored_entry
from ptpipe.plan.keys import Key
from ptpipe.plan.source_digest import SourceDigests
from ptpipe.stages import Port
from ptpipe.store.store import Entry, Store


@dataclass(frozen=True)
class Fault:
    """Something altered or missing in a stored result."""

    error: IntegrityError
    quarantine: Callable[[], Path | None]
    """Moves it aside; the stage's key must be locked, or another run may just have rebuilt it."""


@dataclass
class StoredResults:
    """Looks up results in a store."""

    plan: Plan
    keys: Mapping[str, Key]
    store: Store
    sources: SourceDigests

    def __post_init__(self) -> None:
        wirings = [references for stage in self.plan.stages for references in stage.wiring.values()]
        self._read = {(reference.stage, reference.output) for references in wirings for reference in references}

    def find(
        self, stage: PlannedStage, upstream: Mapping[str, Entry | None], suspects: Collection[str] = ()
    ) -> tuple[Entry | None, list[Fault]]:
        """Return a stage's entry, None where it has no result that fits; and what of it was altered.

        `upstream`: the entries of the stages above. `suspects`: outputs to verify in any case. Verified are verdicts,
        what may have deliverables, and what no stage reads: the rest is verified when it is read.
        Raises OSError where something can't be read.
        """
        key = self.keys[stage.id]
        try:
            entry = stored_entry(self.plan, stage.id, key, self.store)
        except IntegrityError as error:
            return None, [Fault(error, partial(self.store.quarantine_entry, key.digest))]
        if entry is None or not is_current(entry, self.plan, stage.id, upstream, self.sources):
            return None, []
        faults = []
        for port in stage.stage.outputs:
            digest = entry.outputs[port.name].digest
            is_verified = port.name in suspects or self._is_final(stage, port)
            try:
                (self.store.verify if is_verified else self.store.require)(digest)
            except IntegrityError as error:
                faults.append(Fault(error, partial(self.store.quarantine, digest)))
        return entry, faults

    def _is_final(self, stage: PlannedStage, port: Port) -> bool:
        is_read = (stage.id, port.name) in self._read
        return not is_read or issubclass(port.type, Verdict) or may_deliver(port.type)
