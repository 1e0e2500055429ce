"""Every hook that a plugin can implement. This file is the manual; `pipeline/README.md` has its table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from ptpipe.artifact import Artifact
    from ptpipe.check import Check
    from ptpipe.errors import Problem
    from ptpipe.events import Event
    from ptpipe.execution.call import Call
    from ptpipe.plan.bind import Plan
    from ptpipe.reporter import Reporter
    from ptpipe.stage import Stage

hookspec = pluggy.HookspecMarker("ptpipe")
hookimpl = pluggy.HookimplMarker("ptpipe")


@hookspec
def ptpipe_stages() -> Iterable[Stage[..., object]]:  # type: ignore[empty-body]  # a specification has none
    """Offer stage kinds. All answers are collected, in the parent and in each worker."""


@hookspec
def ptpipe_reporters() -> Iterable[Reporter]:  # type: ignore[empty-body]
    """Offer reporters, new instances at each call: one call per run. All answers are collected, in the parent only."""


@hookspec
def ptpipe_check(plan: Plan) -> Iterable[Problem]:  # type: ignore[empty-body]
    """Look at a bound plan before any work: cross-stage rules and house policies. All answers are collected."""


@hookspec
def ptpipe_doctor(workers: int) -> Iterable[Check]:  # type: ignore[empty-body]
    """Look at what this plugin needs of the installation and the machine, for `ptpipe doctor`.

    All answers are collected; parent only; may import torch. `workers`: how many processes to try to work together,
    0: none. Say what you tried, not what should work; leave nothing behind.
    """


@hookspec(firstresult=True)
def ptpipe_launch(call: Call, tell: Callable[[Event], None]) -> Mapping[str, Artifact | Path] | None:
    """Do one stage and return its outputs by name, or None to leave it to the next. The first answer counts.

    An output may be the folder that the artifact was saved to, by another process. `tell` takes what the stage says
    while it works. Raise StageError for a failure that the user can act on.
    """


@hookspec(firstresult=True)
def ptpipe_time_all_reduce(workers: int, sizes_bytes: Sequence[int]) -> Sequence[float] | None:
    """Time an all-reduce of each size among so many processes of this machine, for `ptpipe scaling`: seconds, medians.

    None leaves it to the next; the first answer counts. Parent only; may import torch; leave nothing behind. Raise
    StageError where they can't work together.
    """
