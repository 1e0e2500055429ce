"""ptpipe: one manifest from a PyTorch model to a small, fast artifact that can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptpipe.artifact import JSON, Artifact, Decision, Verdict
from ptpipe.check import Check
from ptpipe.context import Context
from ptpipe.errors import ExitCode, IntegrityError, Location, ManifestError, Problem, PtpipeError, StageError
from ptpipe.events import Outcome
from ptpipe.reporter import Reporter
from ptpipe.stage import Stage, stage

if TYPE_CHECKING:
    from ptpipe.api import RunResult, load_plan, run
    from ptpipe.config import StageConfig
    from ptpipe.hookspecs import hookimpl
    from ptpipe.plan.bind import Plan

__version__ = "0.1.0"

__all__ = [
    "Artifact",
    "Check",
    "Context",
    "Decision",
    "ExitCode",
    "IntegrityError",
    "JSON",
    "Location",
    "ManifestError",
    "Outcome",
    "Plan",
    "Problem",
    "PtpipeError",
    "Reporter",
    "RunResult",
    "Stage",
    "StageConfig",
    "StageError",
    "Verdict",
    "hookimpl",
    "load_plan",
    "run",
    "stage",
]

# What `ptpipe --help` can do without is imported on first use: pydantic and pluggy take longer than all the rest.
_LATER = {
    "Plan": "plan.bind",
    "RunResult": "api",
    "StageConfig": "config",
    "hookimpl": "hookspecs",
    "load_plan": "api",
    "run": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'ptpipe' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"ptpipe.{_LATER[name]}"), name)
    return value
