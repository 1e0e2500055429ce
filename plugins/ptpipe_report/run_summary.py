"""What the events of a run add up to, for every report to format in its own way."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ptpipe import (
    JSON,
    Decision,
    ExitCode,
    Location,
    Notice,
    Outcome,
    RunFinished,
    RunStarted,
    StageFinished,
    one_line,
)
from ptpipe_report.comparison import tables, type_name
from ptpipe_report.formatting import Figure, counted, key_figures

_ENDINGS: dict[int, str] = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed",
    ExitCode.REFUSED: "refused by a gate",
    ExitCode.UNDECIDED: "undecided: a gate could not decide",
    ExitCode.INTEGRITY: "stopped: a stored artifact is corrupt",
    ExitCode.PLUGIN: "stopped: a plugin is missing or broken",
    ExitCode.BUG: "stopped by a bug in ptpipe",
    ExitCode.TERMINATED: "terminated",
    ExitCode.HUNG_UP: "terminated: the terminal was closed",
}


UNTIMED = frozenset({Outcome.CACHED, Outcome.SKIPPED})
"""Outcomes of stages that did no work: their seconds are of no interest."""
_JUDGEMENT = frozenset({"decision", "reason", "fail_undecided"})


@dataclass(frozen=True)
class Gate:
    """The verdict of one gate."""

    stage: StageFinished
    output: str
    """The name of the output that is the verdict."""
    decision: str
    reason: str
    facts: Mapping[str, JSON]
    """What the decision is based on."""
    fail_undecided: bool

    @property
    def stage_id(self) -> str:
        """The gate's stage."""
        return self.stage.stage_id

    @property
    def is_passed(self) -> bool:
        """Whether the gate passed."""
        return self.decision == Decision.PASSED

    @property
    def fails_run(self) -> bool:
        """Whether it ends the run with an exit code of its own: refused, or undecided and configured to fail then."""
        return self.decision == Decision.REFUSED or (self.decision == Decision.UNDECIDED and self.fail_undecided)


@dataclass
class Notices:
    """Every notice of a run, once, in order of arrival. What several stages say is one notice, of all of them."""

    _stages: dict[str, dict[str, None]] = field(default_factory=dict)
    """Of each text, in order."""

    def add(self, notice: Notice) -> bool:
        """Add it; return False if its text was there already (a finished stage repeats all of its notices)."""
        is_new = notice.text not in self._stages
        self._stages.setdefault(notice.text, {})[notice.stage_id] = None
        return is_new

    def add_all(self, stage: StageFinished) -> list[Notice]:
        """Add the notices of a finished stage; return the new ones."""
        return [notice for text in stage.notices if self.add(notice := Notice(stage.stage_id, text))]

    def __iter__(self) -> Iterator[Notice]:
        return (Notice(", ".join(filter(None, stages)), text) for text, stages in self._stages.items())


def ending(finished: RunFinished) -> str:
    """Return how the run ended, in a few words."""
    if finished.interrupted and finished.exit_code not in (ExitCode.TERMINATED, ExitCode.HUNG_UP):
        return "interrupted"
    return _ENDINGS.get(finished.exit_code, f"ended with exit code {finished.exit_code}")


def tally(stages: Iterable[StageFinished]) -> str:
    """Return the number of stages by outcome: `9 done, 3 cached`."""
    counts = Counter(stage.outcome for stage in stages)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])


def command(started: RunStarted) -> str:
    """Return the command line that repeats or resumes the run: finished stages are cached."""
    words = ["ptpipe", "run", started.manifest_path]
    for override in started.overrides:
        words += ["-s", override]
    artifacts = started.folder.parent.parent
    is_default = artifacts.absolute() == Path("artifacts").absolute() and not os.environ.get("PTPIPE_ARTIFACTS")
    if started.folder.parent.name == "runs" and not is_default:
        words += ["--artifacts", str(artifacts)]
    words += started.arguments
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """Quote a word for a shell; one that is not printable as bytes in `$'...'`, which stays the same word."""
    if word == one_line(word):
        return shlex.quote(word)
    # Python carries the bytes of undecodable file names as the surrogates U+DC80 to U+DCFF; others stand for nothing.
    content = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\N{REPLACEMENT CHARACTER}", word).encode(
        "utf-8", "surrogateescape"
    )
    shown = (chr(byte) if 32 <= byte < 127 and chr(byte) not in "\\'" else f"\\x{byte:02x}" for byte in content)
    return f"$'{''.join(shown)}'"


def deliverables(finished: RunFinished) -> list[Path]:
    """Return the files to ship that the run's folder holds, relative to that folder."""
    return [relative_to_run(path, finished) for stage in finished.stages for path in stage.deliverables]


def relative_to_run(path: Path, finished: RunFinished) -> Path:
    """Return a path relative to the run's folder, if it is in it."""
    folder = finished.folder.absolute()
    path = folder / path
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def grouped_by_folder(files: Iterable[Path]) -> list[str]:
    """Return a name per folder: `onnx/model.onnx` where it has one of the files, else `qat/ (2 files)`."""
    groups: dict[str, list[Path]] = {}
    for file in files:
        groups.setdefault(file.parts[0], []).append(file)
    return [
        f"{folder}/ ({len(group)} files)" if len(group) > 1 else group[0].as_posix() for folder, group in groups.items()
    ]


def stage_figures(stage: StageFinished) -> tuple[Figure, ...]:
    """Return the figures of a stage's metrics and outputs, best known names first."""
    verdicts = [Figure("", gate.decision) for gate in gates([stage])]
    compared = tuple(Figure("", counted(len(table.is_baseline), "model")) for table in tables([stage]))
    if compared:
        return compared  # the table is shown elsewhere; its figures are among the metrics too
    values = dict(stage.metrics)
    for output in stage.outputs.values():
        summary = output.get("summary")
        if isinstance(summary, Mapping) and type_name(output) != "Comparison" and not _is_verdict(output):
            values |= {name: value for name, value in summary.items() if name not in values}
    return (*verdicts, *key_figures(values))


def _is_verdict(output: Mapping[str, JSON]) -> bool:
    """Return whether an output is a Verdict or of a subclass: known by its summary, as names may be a stranger's."""
    summary = output.get("summary")
    return isinstance(summary, Mapping) and summary.keys() >= _JUDGEMENT


def gates(stages: Iterable[StageFinished]) -> list[Gate]:
    """Return the verdicts among the stages' outputs."""
    found = []
    for stage in stages:
        for name, output in stage.outputs.items():
            summary = output.get("summary")
            if not isinstance(summary, Mapping) or not _is_verdict(output):
                continue
            decision, reason = str(summary.get("decision", "")), str(summary.get("reason", ""))
            facts = {name: value for name, value in summary.items() if name not in _JUDGEMENT}
            found.append(Gate(stage, name, decision, reason, facts, summary.get("fail_undecided") is True))
    return found


def candidates_of(gates: Sequence[Gate], decision: str | None = None) -> list[str]:
    """Return what the gates judge, each once: the selected one where a gate selects.

    `decision`: only what a gate decided so.
    """
    judged = (pair for gate in gates for pair in _judged_by(gate))
    return list(dict.fromkeys(name for name, own in judged if decision in (None, own)))


def _judged_by(gate: Gate) -> list[tuple[str, str]]:
    """Return names of models and what is decided of each."""
    one, several = gate.facts.get("selected") or gate.facts.get("candidate"), gate.facts.get("candidates")
    if isinstance(one, str):
        return [(one, gate.decision)]
    rows = several if isinstance(several, list) else []
    named = (row for row in rows if isinstance(row, Mapping) and "candidate" in row)
    return [(str(row["candidate"]), str(row.get("decision", gate.decision))) for row in named]


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def caveat(finished: RunFinished) -> str:
    """Return why the models that gates judge are of no use: none is better than a trivial answer; else nothing."""
    judged, found = candidates_of(gates(finished.stages)), dict[str, str]()
    for stage in finished.stages:
        for output in stage.outputs.values():
            summary = output.get("summary")
            trivial = summary.get("trivial_answer") if isinstance(summary, Mapping) else None
            names = trivial.get("no_better") if isinstance(trivial, Mapping) else None
            if isinstance(trivial, Mapping) and isinstance(names, list):
                found |= {str(name): str(trivial.get("answer")) for name in names}
    if not judged or not found.keys() >= {*judged}:
        return ""
    are = "is" if len(judged) == 1 else "are"
    return f"{listed(judged)} {are} no better than always answering {found[judged[0]]}"


def failed_stages(stages: Iterable[StageFinished]) -> list[StageFinished]:
    """Return the stages that failed."""
    return [stage for stage in stages if stage.outcome is Outcome.FAILED]


def locations(started: RunStarted) -> dict[str, Location]:
    """Return where each stage is in the manifest, by its id; at its first line where that is not known."""
    found = dict(zip(started.stage_ids, started.locations, strict=False))
    return {stage_id: found.get(stage_id) or Location(started.manifest_path, 1, 1) for stage_id in started.stage_ids}
