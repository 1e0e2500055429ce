"""How a trial ended, and the figures that trials are compared by, from what its stages reported."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ptpipe import JSON, Decision, ExitCode, Outcome, Plan, PlannedStage, UsageError, nearest
from ptpipe_sweep.space import SEED

_ENDED = {
    ExitCode.DONE: "passed",
    ExitCode.REFUSED: "refused",
    ExitCode.UNDECIDED: "undecided",
    ExitCode.INTEGRITY: "corrupt",
    ExitCode.HUNG_UP: "interrupted",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.TERMINATED: "interrupted",
}
_WITH_RESULT = (Outcome.DONE, Outcome.CACHED, Outcome.REFUSED, Outcome.UNDECIDED)


@dataclass(frozen=True)
class Objective:
    """What `--maximize` or `--minimize` names: a metric of a stage."""

    stage: str
    metric: str
    higher_is_better: bool

    @property
    def name(self) -> str:
        """`finetune.val_accuracy`."""
        return f"{self.stage}.{self.metric}"


@dataclass(frozen=True)
class Quality:
    """The figure that says how good a trial is."""

    name: str
    value: float
    higher_is_better: bool

    def is_better_than(self, other: Quality) -> bool:
        """Whether it is better than another trial's."""
        return self.value > other.value if self.higher_is_better else self.value < other.value


@dataclass(frozen=True)
class Latency:
    """The latency of a trial's model, with its 95 % confidence interval where that is known."""

    median_ms: float
    low_ms: float | None
    high_ms: float | None
    label: str
    """`batch 1, one thread`."""

    def is_below(self, other: Latency) -> bool:
        """Whether it is shorter, by more than the intervals: two sessions differ by more than their rounds do."""
        if self.high_ms is None or other.low_ms is None:
            return False
        return self.high_ms < other.low_ms


@dataclass(frozen=True)
class Ending:
    """How one trial ended."""

    number: int
    settings: Mapping[str, JSON]
    overrides: Mapping[str, JSON]
    """All, those of `-s` too."""
    exit_code: int
    run_id: str = ""
    seconds: float = 0.0
    message: str = ""
    """Why it failed, or was refused."""
    model: str = ""
    """The model of a comparison that the figures are of."""
    quality: Quality | None = None
    size_bytes: int | None = None
    latency: Latency | None = None
    num_cached: int = 0
    num_stages: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that its stages with a result reported, by `stage.metric`."""
    is_undecided: bool = False
    """Whether a gate could not decide."""
    comparison: str = ""
    """The stage that compared the model; empty where none did."""
    split: str = ""
    """The split of a comparison that the quality is of; empty where an objective is named."""

    @property
    def verdict(self) -> str:
        """`passed`, `refused`, `undecided`, `failed`, `corrupt` or `interrupted`."""
        if self.is_accepted and self.is_undecided:
            return "undecided"
        return _ENDED.get(ExitCode(self.exit_code), "failed")

    @property
    def is_accepted(self) -> bool:
        """Whether it ran to its end and no gate ended it: each passed, or may pass while it can't decide."""
        return self.exit_code == ExitCode.DONE

    def to_json(self) -> dict[str, Any]:
        """Return it for the sweep's record."""
        return asdict(self) | {"verdict": self.verdict}


def parse_objective(text: str, higher_is_better: bool, plan: Plan) -> Objective:
    """Return the objective that `STAGE.METRIC` names. Raises UsageError where there is no such stage."""
    flag = "--maximize" if higher_is_better else "--minimize"
    stage, _, metric = text.partition(".")
    ids = [planned.id for planned in plan.stages]
    if stage not in ids:
        close = nearest(stage, ids)
        hint = f" (did you mean {close!r}?)" if close else f": it has {', '.join(ids)}"
        raise UsageError(f"{flag} {text}: the manifest has no stage {stage!r}{hint}")
    if not metric:
        raise UsageError(f"{flag} {text}: name a metric of it: {stage}.METRIC, such as {stage}.val_accuracy")
    return Objective(stage, metric, higher_is_better)


def judged_model(plan: Plan) -> str:
    """Return the model of a comparison that the last gate judges, of several the last; "" where there is none."""
    return next((judged[-1] for stage in reversed(plan.stages) if (judged := _candidates(stage))), "")


def judged_comparisons(plan: Plan) -> tuple[str, ...]:
    """Return the stages of the comparisons that figures are taken from: those that gates judge, the last gate's first.

    Then the others, in the manifest's order.
    """
    comparing = [stage.id for stage in plan.stages if _compares(stage)]
    judged = [
        reference.stage
        for stage in reversed(plan.stages)
        if _candidates(stage)
        for references in stage.wiring.values()
        for reference in references
        if reference.stage in comparing
    ]
    return tuple(dict.fromkeys([*judged, *comparing]))


def _candidates(stage: PlannedStage) -> list[str]:
    several = stage.options.get("candidates")
    named = [stage.options.get("candidate"), *(several if isinstance(several, list) else ())]
    return [name for name in named if isinstance(name, str)]


def _compares(stage: PlannedStage) -> bool:
    return any(_is_comparison(port.type.__name__) for port in stage.stage.outputs)


def check_model(name: str, plan: Plan) -> None:
    """Raise UsageError where no comparison of the manifest has a model of that name."""
    references = (
        str(reference)
        for stage in plan.stages
        if _compares(stage)
        for port in stage.stage.inputs
        if port.several
        for reference in stage.wiring.get(port.name, ())
    )
    compared = list(dict.fromkeys(references))
    if name not in compared:
        close = nearest(name, compared)
        hint = f"did you mean {close!r}?" if close else f"it compares {', '.join(compared) or 'nothing'}"
        raise UsageError(f"--model {name}: the manifest compares no such model ({hint})")


def _is_comparison(type_name: str) -> bool:
    return type_name.rpartition(".")[2] == "Comparison"


def read_ending(
    ending: Ending,
    result: Mapping[str, Any],
    objective: Objective | None,
    model: str,
    comparisons: Sequence[str] = (),
) -> Ending:
    """Return a trial's ending with what its process reported.

    `model`: of which row of a comparison the figures are; "": of the last one. `comparisons`: the stages to take them
    from, as `judged_comparisons` orders them; others come last.
    """
    stages: Sequence[Mapping[str, Any]] = result.get("stages", ())
    facts: dict[str, Any] = {
        "exit_code": result["exit_code"],
        "run_id": result.get("run_id", ""),
        "seconds": result.get("seconds", 0.0),
        "message": result.get("message") or _reason(stages),
        "metrics": dict(_numbers(stages)),
        "num_stages": len(stages),
        "is_undecided": any(summary.get("decision") == Decision.UNDECIDED for summary in _summaries(stages)),
        "num_cached": sum(stage["outcome"] == "cached" for stage in stages),
    }
    facts |= _figures(stages, model, comparisons)
    if objective:
        value = facts["metrics"].get(objective.name)
        facts["quality"] = None if value is None else Quality(objective.name, value, objective.higher_is_better)
        facts["split"] = ""
    return replace(ending, **facts)


def _reason(stages: Sequence[Mapping[str, Any]]) -> str:
    """Return why the first stage that failed did, else why the first gate refused or could not decide."""
    for stage in stages:
        if stage["outcome"] == "failed":
            return f"{stage['stage_id']}: {stage['message']}"
    for decision in (Decision.REFUSED, Decision.UNDECIDED):
        for stage in stages:
            for summary in _summaries([stage]):
                if summary.get("decision") == decision:
                    return f"{stage['stage_id']}: {summary.get('reason', '')}"
    return ""


def _summaries(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [output["summary"] for stage in stages for output in stage["outputs"].values()]


def _numbers(stages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the numbers among metrics, and among what the outputs' summaries say; none of a stage that failed."""
    for stage in (stage for stage in stages if stage["outcome"] in _WITH_RESULT):
        for values in (*_summaries([stage]), stage["metrics"]):
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                    yield f"{stage['stage_id']}.{name}", value


def _figures(stages: Sequence[Mapping[str, Any]], model: str, preferred: Sequence[str]) -> dict[str, Any]:
    """Return quality, size and latency of one model, of the first comparison that has it.

    What that one did not measure is of the others. Latencies are of the first stage that measures nothing else, where
    one does.
    """
    order = {stage_id: position for position, stage_id in enumerate(preferred)}
    compared = [
        (stage["stage_id"], output["summary"])
        for stage in sorted(stages, key=lambda stage: order.get(stage["stage_id"], len(order)))
        for output in stage["outputs"].values()
        if _is_comparison(str(output["type"]))
    ]
    facts: dict[str, Any] = {}
    latencies: dict[str, Any] = {}
    for stage_id, comparison in sorted(compared, key=lambda found: not found[1]["metrics"]):
        found = _figures_of(comparison, facts.get("model", model))
        if not comparison["metrics"] and "latency" in found:
            latencies.setdefault("latency", found["latency"])
        facts = {"comparison": stage_id, **found, **facts} if found else facts
    return facts | latencies


def _figures_of(comparison: Mapping[str, Any], model: str) -> dict[str, Any]:
    rows = [row for row in comparison["rows"] if model in ("", row["name"])]
    if not rows:
        return {}
    row, facts = rows[-1], {}
    facts["model"], facts["size_bytes"] = row["name"], row["size_bytes"]
    if comparison["metrics"]:
        primary = comparison["metrics"][0]
        value = row["metrics"].get(primary["name"])
        if isinstance(value, int | float) and math.isfinite(value):
            facts["quality"] = Quality(primary["name"], value, primary["higher_is_better"])
            facts["split"] = str(comparison.get("split", ""))
    for cell in row["latency"][:1]:
        length = f", length {cell['length']}" if cell.get("length") else ""
        threads = f"{cell['threads']} thread{'' if cell['threads'] == 'one' else 's'}"
        label = f"batch {cell['batch_size']}{length}, {threads}"
        facts["latency"] = Latency(cell["median_ms"], cell["low_ms"], cell["high_ms"], label)
    return facts


@dataclass(frozen=True)
class SeedMean:
    """The quality of one setting over several seeds."""

    settings: Mapping[str, JSON]
    """Without the seed."""
    trials: tuple[int, ...]
    """The numbers of those that are accepted and have a quality."""
    num_others: int
    """How many trials of the setting are not, or have none."""
    mean: float
    low: float
    high: float


def seed_means(endings: Sequence[Ending]) -> list[SeedMean]:
    """Return the means of settings over their seeds; none where the seed alone varies, or doesn't."""
    groups: dict[str, list[Ending]] = {}
    for ending in endings:
        if SEED in ending.settings and len(ending.settings) > 1:
            groups.setdefault(_without_seed(ending), []).append(ending)
    found = []
    for group in groups.values():
        values = {one.number: one.quality.value for one in group if one.is_accepted and one.quality}
        if values:
            settings = {name: value for name, value in group[0].settings.items() if name != SEED}
            bounds = min(values.values()), max(values.values())
            mean = math.fsum(values.values()) / len(values)
            found.append(SeedMean(settings, tuple(values), len(group) - len(values), mean, *bounds))
    return found


def _without_seed(ending: Ending) -> str:
    return json.dumps({name: value for name, value in ending.settings.items() if name != SEED}, sort_keys=True)


def _averaged(endings: Sequence[Ending]) -> list[Ending]:
    """Return the trials that are accepted and have a quality: that of their setting, which no lucky seed decides."""
    means = {number: own.mean for own in seed_means(endings) for number in own.trials}
    return [
        replace(one, quality=replace(one.quality, value=means.get(one.number, one.quality.value)))
        for one in endings
        if one.is_accepted and one.quality
    ]


def pareto_front(endings: Sequence[Ending]) -> set[int]:
    """Return the numbers of the trials that no other is better than in one respect and as good as in all others.

    Of those that are accepted and have a quality; by quality (the mean over seeds), size and latency, as far as all of
    them have these.
    """
    accepted = _averaged(endings)
    have_sizes = all(ending.size_bytes is not None for ending in accepted)
    have_latencies = all(ending.latency for ending in accepted)

    def is_better(one: Ending, other: Ending) -> tuple[bool, ...]:
        assert one.quality and other.quality
        better = [one.quality.is_better_than(other.quality)]
        if have_sizes and one.size_bytes is not None and other.size_bytes is not None:
            better.append(one.size_bytes < other.size_bytes)
        if have_latencies and one.latency and other.latency:
            better.append(one.latency.is_below(other.latency))
        return tuple(better)

    def dominates(one: Ending, other: Ending) -> bool:
        return any(is_better(one, other)) and not any(is_better(other, one))

    return {it.number for it in accepted if not any(dominates(other, it) for other in accepted)}


def best(endings: Sequence[Ending]) -> Ending | None:
    """Return the trial with the best quality of those that are accepted; of equals, the smallest, then the first.

    Of several seeds the first one of the setting whose mean is best, of those that most seeds are accepted of.
    """
    num_others = {number: own.num_others for own in seed_means(endings) for number in own.trials}

    def rank(ending: Ending) -> tuple[float, ...]:
        assert ending.quality
        sign = -1 if ending.quality.higher_is_better else 1
        size = math.inf if ending.size_bytes is None else ending.size_bytes
        return num_others.get(ending.number, 0), sign * ending.quality.value, size

    chosen = min(_averaged(endings), key=rank, default=None)
    return None if chosen is None else next(ending for ending in endings if ending.number == chosen.number)
