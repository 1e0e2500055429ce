"""Read the comparison of a run that has ended. Needs numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ptpipe import StageError, UsageError, nearest
from ptpipe.commands import find_run
from ptpipe_eval.comparison import Comparison, Row
from ptpipe_eval.quality.paired import PairedSamples

if TYPE_CHECKING:
    from ptpipe import Store


@dataclass(frozen=True)
class PastComparison:
    """A comparison, and the run that it is from."""

    record: Mapping[str, Any]
    stage: Mapping[str, Any]
    """Its stage, in the record."""
    table: Comparison
    samples: PairedSamples
    inputs: Mapping[str, tuple[str, ...]]
    """Digests of models and data; empty where they are not known, because a later run has replaced the result."""

    def row(self, name: str) -> Row:
        """Return a model's row. Raises UsageError where there is none."""
        try:
            return self.table.row(name)
        except StageError as error:
            raise UsageError(f"stage {self.stage['stage_id']} of run {self.record['run_id']}: {error}") from error


def read_comparison(store: Store, run: str, wanted: str | None, preferred: str | None = None) -> PastComparison:
    """Read a run's comparison of quality.

    `wanted`: its stage; None: the stage `preferred` if it is one, else the only one. Raises UsageError where there is
    no such run or stage, or several; IntegrityError where what is stored was altered.
    """
    record, _ = find_run(store, run)
    found = {
        str(stage["stage_id"]): (stage, output)
        for stage in record["stages"]
        for output in stage["outputs"].values()
        if output.get("type") == "Comparison" and (output.get("summary") or {}).get("metrics")
    }
    name = wanted or (preferred if preferred in found else None) or next(iter(found), "")
    if not found:
        raise UsageError(f"run {record['run_id']} has no comparison of quality: eval.compare makes one")
    if name not in found:
        guess = nearest(name, found)
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise UsageError(f"{name!r} is no comparison in run {record['run_id']}, which has {', '.join(found)}{hint}")
    if wanted is None and name != preferred and len(found) > 1:
        raise UsageError(f"run {record['run_id']} has several comparisons: choose one by --stage, {' or '.join(found)}")
    stage, output = found[name]
    table = store.get(str(output["digest"]), Comparison)
    if table.samples is None:
        raise UsageError(f"{name} of run {record['run_id']} has no facts of single samples: run it again (--fresh)")
    entry = store.read_entry(str(stage["key"]))
    is_same = entry is not None and output["digest"] in (stored.digest for stored in entry.outputs.values())
    inputs = entry.inputs if entry is not None and is_same and {"models", "data"} <= entry.inputs.keys() else {}
    return PastComparison(record, stage, table, table.samples, inputs)
