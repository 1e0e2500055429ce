"""The parent's side of a stage with several workers."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from ptpipe import StageError
from ptpipe.events import Event, LogLine
from ptpipe.store import Store
from ptpipe.worker import Call
from ptpipe_elastic.said import followed
from ptpipe_elastic.started import log_file
from ptpipe_elastic.torch_elastic import WorkerFailure, WorkersFailed, run_workers


def launch(call: Call, tell: Callable[[Event], None]) -> Mapping[str, Path]:
    """Do the call in `call.workers` processes of this machine; the folders of what rank 0 made.

    Raises StageError that names the worker which failed first, how it ended, and what it said last.
    """
    folder = Store(Path(call.artifacts)).scratch(call.key) / "workers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "call.json").write_text(call.to_json(), encoding="utf-8")
    try:
        with followed(folder / "said.jsonl", tell):
            run_workers("ptpipe_elastic.worker", [str(folder.absolute())], call.workers, folder / "logs")
    except WorkersFailed as error:
        raise StageError(_message(error.failures[0])) from error
    finally:
        _log_output(call, folder / "logs", tell)
    return {place.name: place for place in (folder / "outputs").iterdir()}


def _message(failure: WorkerFailure) -> str:
    if failure.is_stage_error and failure.exit_code > 0:
        return failure.message
    if failure.exit_code < 0:
        how = f"was killed by {signal.Signals(-failure.exit_code).name}"
    elif failure.message:
        how = f"failed: {failure.message}"
    else:
        how = f"ended with exit code {failure.exit_code}"
    last = f" (its last line: {failure.last_lines[-1]})" if failure.last_lines and not failure.message else ""
    return f"worker {failure.rank} {how}{last}"


def _log_output(call: Call, folder: Path, tell: Callable[[Event], None]) -> None:
    """Bring what the workers printed into the run's log, with their rank."""
    for rank in range(call.workers):
        file = log_file(folder, rank)
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
            tell(LogLine(call.stage_id, f"[rank {rank}] {line}"))
