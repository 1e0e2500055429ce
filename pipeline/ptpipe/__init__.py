"""ptpipe: one manifest from a PyTorch model to a small, fast artifact that can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptpipe.artifact import JSON, Artifact, Decision, Verdict
from ptpipe.check import Check, CheckState, installed
from ptpipe.context import Context, NamedCode
from ptpipe.errors import (
    ExitCode,
    IntegrityError,
    Location,
    ManifestError,
    Problem,
    PtpipeError,
    StageError,
    Terminated,
    UsageError,
    nearest,
)
from ptpipe.events import (
    Attachment,
    Event,
    LogLine,
    Metric,
    Notice,
    Outcome,
    Progress,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
)
from ptpipe.printable import one_line
from ptpipe.reads import ReadLog
from ptpipe.reporter import Reporter
from ptpipe.stage import Port, Stage, stage

if TYPE_CHECKING:
    from ptpipe.api import RunResult, cache_status, load_plan, run
    from ptpipe.config import StageConfig
    from ptpipe.execution.call import Call, Nodes
    from ptpipe.execution.engine import RunOptions
    from ptpipe.hookspecs import hookimpl
    from ptpipe.plan.bind import Plan, PlannedStage, Reference
    from ptpipe.plan.cache_status import CacheStatus
    from ptpipe.plan.module_files import record_import
    from ptpipe.plan.source_functions import source_code
    from ptpipe.sections import Section
    from ptpipe.store.files import atomic_path, write_atomically
    from ptpipe.store.store import Store

__version__ = "0.1.0"

__all__ = [
    "Artifact",
    "Attachment",
    "CacheStatus",
    "Call",
    "Check",
    "CheckState",
    "Context",
    "Decision",
    "Event",
    "ExitCode",
    "IntegrityError",
    "JSON",
    "Location",
    "LogLine",
    "ManifestError",
    "Metric",
    "NamedCode",
    "Nodes",
    "Notice",
    "Outcome",
    "Plan",
    "PlannedStage",
    "Port",
    "Problem",
    "Progress",
    "PtpipeError",
    "ReadLog",
    "Reference",
    "Reporter",
    "RunFinished",
    "RunOptions",
    "RunResult",
    "RunStarted",
    "Section",
    "Stage",
    "StageConfig",
    "StageError",
    "StageFinished",
    "StageStarted",
    "Store",
    "Terminated",
    "UsageError",
    "Verdict",
    "atomic_path",
    "cache_status",
    "hookimpl",
    "installed",
    "load_plan",
    "nearest",
    "one_line",
    "record_import",
    "run",
    "source_code",
    "stage",
    "write_atomically",
]

# Imported on first use, because `ptpipe --help` needs none of them: pydantic and pluggy take longer than all the rest.
_LATER = {
    "CacheStatus": "plan.cache_status",
    "Call": "execution.call",
    "Nodes": "execution.call",
    "Plan": "plan.bind",
    "PlannedStage": "plan.bind",
    "Reference": "plan.bind",
    "RunOptions": "execution.engine",
    "RunResult": "api",
    "Section": "sections",
    "StageConfig": "config",
    "Store": "store.store",
    "atomic_path": "store.files",
    "cache_status": "api",
    "hookimpl": "hookspecs",
    "load_plan": "api",
    "record_import": "plan.module_files",
    "run": "api",
    "source_code": "plan.source_functions",
    "write_atomically": "store.files",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'ptpipe' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"ptpipe.{_LATER[name]}"), name)
    return value
