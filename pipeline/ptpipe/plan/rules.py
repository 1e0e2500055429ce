"""Rules of plugins across the stages of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ptpipe.errors import ExitCode, ManifestError, Problem
from ptpipe.plan.source_functions import missing_files
from ptpipe.plan.vocabulary import call_each

if TYPE_CHECKING:
    from ptpipe.plan.bind import Plan, PlannedStage


def hook_warnings(plan: Plan, hook: str, **arguments: object) -> tuple[Problem, ...]:
    """Return the warnings of plugins that check a plan by this hook. Raises ManifestError where any finds an error."""
    found = tuple(_hook_problems(plan, hook, **arguments))
    if errors := [problem for problem in found if problem.severity == "error"]:
        raise ManifestError(errors)
    return found


def _hook_problems(plan: Plan, hook: str, **arguments: object) -> Iterator[Problem]:
    for result in call_each(plan.vocabulary.manager, hook, plan=plan, **arguments):
        strange = [item for item in result.items if not isinstance(item, Problem)]
        reason = result.error or (f"it returned {strange[0]!r}, which is not a Problem" if strange else "")
        if reason:
            yield Problem(f"plugin {result.plugin} failed in {hook}: {reason}", code=ExitCode.PLUGIN)
        else:
            yield from result.items


def problems_of_sound_stages(plan: Plan, faulty: Collection[str]) -> Iterator[Problem]:
    """Yield what is wrong with stages that are bound, as are all above them, in spite of mistakes in others.

    `faulty`: stages with a problem already. Of plugins' rules only what they say of one of the sound stages: the rest
    may follow from what is missing.
    """
    sound: dict[str, PlannedStage] = {}
    for stage in plan.stages:
        required = {port.name for port in stage.stage.inputs if not port.optional}
        is_bound = stage.id not in faulty and required <= stage.wiring.keys()
        if is_bound and all(name in sound for name in stage.upstream):
            sound[stage.id] = stage
    part = replace(plan, stages=tuple(sound.values()))
    if missing := [*missing_files(part)]:
        yield from missing
        return
    for problem in _hook_problems(part, "ptpipe_check"):
        is_of_stage = problem.message.partition(":")[0] in sound and problem.code is not ExitCode.PLUGIN
        if is_of_stage and problem.severity == "error":
            yield problem
