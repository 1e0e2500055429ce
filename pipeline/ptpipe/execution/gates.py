"""Gates: how a verdict ends the run."""

from __future__ import annotations

from ptpipe.artifact import Decision, Verdict
from ptpipe.errors import ExitCode, IntegrityError
from ptpipe.plan.bind import PlannedStage
from ptpipe.store.store import Entry


def judge(stage: PlannedStage, entry: Entry) -> tuple[ExitCode, str]:
    """Return the exit code that the verdicts among a stage's outputs ask for, and the reason where it is not DONE.

    Raises IntegrityError for anything but a decision: a gate passes only where its verdict is `passed`, or undecided
    without consequence.
    """
    for port in stage.stage.outputs:
        if not issubclass(port.type, Verdict):
            continue
        verdict = entry.outputs[port.name].summary
        decision, fails, reason = verdict.get("decision"), verdict.get("fail_undecided"), str(verdict.get("reason"))
        if decision == Decision.PASSED or (decision == Decision.UNDECIDED and fails is False):
            continue
        if decision == Decision.REFUSED:
            return ExitCode.REFUSED, reason
        if decision == Decision.UNDECIDED and fails is True:
            return ExitCode.UNDECIDED, reason
        raise IntegrityError(
            f"the verdict {port.name} of {stage.id} is {decision!r}, which is no decision; "
            f"`ptpipe run --fresh {stage.id}` judges again"
        )
    return ExitCode.DONE, ""
