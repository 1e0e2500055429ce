"""One node's part in a stage with several workers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

from ptpipe import StageError
from ptpipe.events import Event, LogLine
from ptpipe.store import Store
from ptpipe.worker import Call
from ptpipe_elastic.said import followed
from ptpipe_elastic.torch_elastic import Meeting, WorkerFailure, WorkersFailed, run_workers


def launch(call: Call, tell: Callable[[Event], None]) -> Mapping[str, Path]:
    """Do this node's part of the call; on node 0 the folders of what rank 0 made, on others nothing.

    Raises StageError that names the worker which failed first, how it ended, and what it said last; also where the
    workers can't be spread evenly over the nodes.
    """
    nodes = call.nodes
    if call.workers % nodes.num:
        raise StageError(f"{call.workers} workers can't be spread evenly over {nodes.num} nodes")
    folder = Store(Path(call.artifacts)).scratch(call.key) / "workers"
    logs = folder / f"logs-{nodes.rank}"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    is_leader = nodes.rank == 0
    meeting = Meeting(nodes.num, nodes.rank, nodes.endpoint, f"{call.key[:16]}", nodes.max_restarts)
    if is_leader:
        (folder / "call.json").write_text(call.to_json(), encoding="utf-8")
    try:
        with followed(folder / "said.jsonl", tell) if is_leader else nullcontext():
            run_workers("ptpipe_elastic.worker", [str(folder)], call.workers // nodes.num, logs, meeting)
    except WorkersFailed as error:
        raise StageError(_message(error.failures[0])) from error
    finally:
        _log_output(call, logs, tell)
    return {place.name: place for place in (folder / "outputs").iterdir()} if is_leader else {}


def _message(failure: WorkerFailure) -> str:
    if failure.is_stage_error and failure.exit_code > 0:
        return failure.message
    if failure.exit_code < 0:
        how = f"was killed by {failure.signal_name}"
    elif failure.message:
        how = f"failed: {failure.message}"
    else:
        how = f"ended with exit code {failure.exit_code}"
    last = f" (its last line: {failure.last_lines[-1]})" if failure.last_lines and not failure.message else ""
    return f"worker {failure.rank} {how}{last}"


def _log_output(call: Call, folder: Path, tell: Callable[[Event], None]) -> None:
    """Bring what this node's workers printed into the run's log, with their rank."""
    for file in sorted(folder.glob("rank-*.log")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            tell(LogLine(call.stage_id, f"[{file.stem.replace('-', ' ')}] {line}"))
