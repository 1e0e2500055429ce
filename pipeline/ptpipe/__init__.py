"""ptpipe: one manifest from a PyTorch model to a small, fast artifact that can be trusted."""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than all that is here
if TYPE_CHECKING:
    from ptpipe.api import RunResult, cache_status, load_plan, run
    from ptpipe.artifact import JSON, Artifact, Decision, Verdict
    from ptpipe.check import Check, CheckState, installed
    from ptpipe.config import StageConfig
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
    from ptpipe.execution.call import Call, Nodes
    from ptpipe.execution.engine import RunOptions
    from ptpipe.hookspecs import hookimpl
    from ptpipe.plan.bind import Plan, PlannedStage, Reference
    from ptpipe.plan.cache_status import CacheStatus
    from ptpipe.plan.module_files import record_import
    from ptpipe.plan.source_functions import source_code
    from ptpipe.printable import one_line
    from ptpipe.reads import ReadLog
    from ptpipe.reporter import Reporter
    from ptpipe.sections import Section
    from ptpipe.stages import Port, Stage, stage
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

# Imported on first use: a command is to start fast, and pydantic and pluggy take longer than all the rest. No module
# here has the name of one of these, which an import of that module would replace.
_LATER = {
    "Artifact": "artifact",
    "Attachment": "events",
    "CacheStatus": "plan.cache_status",
    "Call": "execution.call",
    "Check": "check",
    "CheckState": "check",
    "Context": "context",
    "Decision": "artifact",
    "Event": "events",
    "ExitCode": "errors",
    "IntegrityError": "errors",
    "JSON": "artifact",
    "Location": "errors",
    "LogLine": "events",
    "ManifestError": "errors",
    "Metric": "events",
    "NamedCode": "context",
    "Nodes": "execution.call",
    "Notice": "events",
    "Outcome": "events",
    "Plan": "plan.bind",
    "PlannedStage": "plan.bind",
    "Port": "stages",
    "Problem": "errors",
    "Progress": "events",
    "PtpipeError": "errors",
    "ReadLog": "reads",
    "Reference": "plan.bind",
    "Reporter": "reporter",
    "RunFinished": "events",
    "RunOptions": "execution.engine",
    "RunResult": "api",
    "RunStarted": "events",
    "Section": "sections",
    "Stage": "stages",
    "StageConfig": "config",
    "StageError": "errors",
    "StageFinished": "events",
    "StageStarted": "events",
    "Store": "store.store",
    "Terminated": "errors",
    "UsageError": "errors",
    "Verdict": "artifact",
    "atomic_path": "store.files",
    "cache_status": "api",
    "hookimpl": "hookspecs",
    "installed": "check",
    "load_plan": "api",
    "nearest": "errors",
    "one_line": "printable",
    "record_import": "plan.module_files",
    "run": "api",
    "source_code": "plan.source_functions",
    "stage": "stages",
    "write_atomically": "store.files",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'ptpipe' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"ptpipe.{_LATER[name]}"), name)
    return value
