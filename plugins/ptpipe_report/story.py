"""What a run's event add up to: what each report tells in its own way."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ptpipe import Decision, ExitCode, Notice, Outcome, RunFinished, RunStarted, StageFinished
from ptpipe_report.comparison import tables, type_name
from ptpipe_report.figures import Figure, telling_figures

_ENDINGS: dict[int, str] = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed",
    ExitCode.REFUSED: "refused by a gate",
    ExitCode.UNDECIDED: "undecided: a gate could not tell",
    ExitCode.INTEGRITY: "stopped: stored bytes are damaged",
    ExitCode.PLUGIN: "stopped: a plugin is missing or broken",
    ExitCode.BUG: "stopped by a bug in ptpipe",
    ExitCode.TERMINATED: "terminated",
}


@dataclass(frozen=True)
class Gate:
    """What one gate said."""

    stage_id: str
    decision: str
    reason: str


@dataclass
class Notices:
    """Every notice of a run, once, in the order of arrival."""

    _seen: dict[Notice, None] = field(default_factory=dict)

    def add(self, notice: Notice) -> bool:
        """Keep it; False where it was there already (a finished stage says all of its own again)."""
        is_new = notice not in self._seen
        self._seen[notice] = None
        return is_new

    def add_all(self, stage: StageFinished) -> list[Notice]:
        """Keep what a finished stage says; return what is new."""
        return [notice for text in stage.notices if self.add(notice := Notice(stage.stage_id, text))]

    def __iter__(self) -> Iterator[Notice]:
        return iter(self._seen)


def ending(finished: RunFinished) -> str:
    """How the run ended, in a word or a few."""
    if finished.interrupted and finished.exit_code != ExitCode.TERMINATED:
        return "interrupted"
    return _ENDINGS.get(finished.exit_code, f"ended with exit code {finished.exit_code}")


def tally(stages: Iterable[StageFinished]) -> str:
    """How many stages ended how: `9 done, 3 cached`."""
    counts = Counter(stage.outcome for stage in stages)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])


def command(started: RunStarted) -> str:
    """The command line that does this run again, or goes on with it: what is done is cached."""
    words = ["ptpipe", "run", started.manifest_path]
    for override in started.overrides:
        words += ["-s", override]
    artifacts = started.folder.parent.parent
    if started.folder.parent.name == "runs" and artifacts.absolute() != Path("artifacts").absolute():
        words += ["--artifacts", str(artifacts)]
    return shlex.join(words)


def stage_figures(stage: StageFinished) -> tuple[Figure, ...]:
    """What a stage's metrics and outputs say, the most telling first."""
    verdicts = [Figure("", gate.decision) for gate in gates([stage])]
    compared = tuple(Figure("", f"{len(table.is_baseline)} models") for table in tables([stage]))
    if compared:
        return compared  # the table itself stands elsewhere, its figures among the metrics too
    values = dict(stage.metrics)
    for output in stage.outputs.values():
        summary = output.get("summary")
        if isinstance(summary, Mapping) and type_name(output) not in {"Verdict", "Comparison"}:
            values |= {name: value for name, value in summary.items() if name not in values}
    return (*verdicts, *telling_figures(values))


def gates(stages: Iterable[StageFinished]) -> list[Gate]:
    """The verdict of every gate that gave one."""
    found = []
    for stage in stages:
        for output in stage.outputs.values():
            summary = output.get("summary")
            if type_name(output) == "Verdict" and isinstance(summary, Mapping):
                decision, reason = str(summary.get("decision", "")), str(summary.get("reason", ""))
                found.append(Gate(stage.stage_id, decision, reason))
    return found


def is_good(gate: Gate) -> bool:
    """Whether the gate lets the run pass."""
    return gate.decision == Decision.PASSED
