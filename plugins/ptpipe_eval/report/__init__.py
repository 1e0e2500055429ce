"""What comparisons add to a run's report: what got worse, for which samples, and how latency was measured.

Read from stored results: no model runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ptpipe import JSON, Artifact, Decision, Outcome, Plan, RunFinished, Section, StageFinished
from ptpipe_eval.comparison import Comparison

Load = Callable[[str, str], Artifact]
_ENDED = (Outcome.DONE, Outcome.CACHED)
_ORDER = (Decision.REFUSED, Decision.UNDECIDED, Decision.PASSED)


@dataclass(frozen=True)
class Compared:
    """A comparison of the run, and the model that its gates judge."""

    stage_id: str
    comparison: Comparison
    summary: Mapping[str, Any]
    candidate: str
    data_stage: str
    data_output: str


def report_sections(plan: Plan, run: RunFinished, load: Load) -> Iterator[Section]:
    """Yield the sections of every comparison that the run has; without any, those of the models that it evaluated."""
    found = [compared for stage in run.stages for compared in _comparisons(plan, run, stage, load)]
    for compared in found:
        yield from _sections(compared, run, load)
    if not found:
        from ptpipe_eval.report.predictions import prediction_sections

        yield from prediction_sections(plan, run, load)


def _sections(compared: Compared, run: RunFinished, load: Load) -> Iterator[Section]:
    from ptpipe_eval.report.latency import latency_section
    from ptpipe_eval.report.quality import quality_section  # imports numpy, which most cached runs do without
    from ptpipe_eval.report.samples import samples_section

    sections = quality_section(compared), samples_section(compared, run, load), latency_section(compared)
    yield from (section for section in sections if section is not None)


def _comparisons(plan: Plan, run: RunFinished, stage: StageFinished, load: Load) -> Iterator[Compared]:
    if stage.outcome not in _ENDED:
        return
    planned = plan[stage.stage_id]
    for port in planned.stage.outputs:
        if issubclass(port.type, Comparison):
            comparison = load(stage.stage_id, port.name)
            assert isinstance(comparison, Comparison), type(comparison)
            candidate = _candidate(plan, run, stage.stage_id, comparison)
            if candidate is not None:
                data = next(iter(planned.wiring.get("data", ())), None)
                summary: Any = stage.outputs[port.name]["summary"]
                place = ("", "") if data is None else (data.stage, data.output)
                yield Compared(stage.stage_id, comparison, summary, candidate, *place)


def _candidate(plan: Plan, run: RunFinished, stage_id: str, comparison: Comparison) -> str | None:
    """Return the model that a gate on the comparison judges, else the last one; None: there is but the baseline.

    Of several that gates judge: the first that was refused, else the first that did not pass, else the first.
    """
    others = [row.name for row in comparison.rows if row.name != comparison.baseline]
    gates = (stage for stage in run.stages if stage_id in plan[stage.stage_id].upstream)
    facts = (output.get("summary") for stage in gates for output in stage.outputs.values())
    judged = [(name, rank) for of in facts for name, rank in _judged_by(of) if name in others]
    names = [name for name, _ in sorted(judged, key=lambda pair: pair[1])]
    return next(iter(names or others[-1:]), None)


def _judged_by(facts: JSON) -> list[tuple[str, int]]:
    """Return what a verdict with these facts is about, and the place of what was decided in `_ORDER`."""
    if not isinstance(facts, Mapping):
        return []
    one, several = facts.get("selected") or facts.get("candidate"), facts.get("candidates")
    if isinstance(one, str):
        return [(one, _place(facts.get("decision")))]
    rows = [row for row in several if isinstance(row, Mapping)] if isinstance(several, list) else []
    return [(str(row["candidate"]), _place(row["decision"])) for row in rows]


def _place(decision: object) -> int:
    return next((place for place, own in enumerate(_ORDER) if own == decision), 0)
