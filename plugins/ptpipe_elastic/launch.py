"""One node's part in a stage with several workers."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

from ptpipe import StageError
from ptpipe.events import Event, LogLine
from ptpipe.execution.call import Call, Nodes
from ptpipe.store.files import write_atomically
from ptpipe.store.store import Store
from ptpipe_elastic.said import followed
from ptpipe_elastic.torch_elastic import Meeting, WorkerFailure, WorkersFailed, run_workers
from ptpipe_elastic.worker import OUTPUTS, call_file

_OTHERS_WORD_S = 5.0
_LATE_FILES_S = 60.0
"""NFS may keep what it knows of a folder for so long (acdirmax)."""
_LOOK_EVERY_S = 0.1
_SHOWN_LINES = 3
"""Of what a worker printed last; all of it is in the log."""


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
    _word_of(folder, nodes.rank).unlink(missing_ok=True)
    is_leader = nodes.rank == 0
    meeting = Meeting(nodes.num, nodes.rank, nodes.endpoint, call.key[:16], nodes.max_restarts)
    call_file(folder, nodes.rank).write_text(call.to_json(), encoding="utf-8")
    if is_leader:
        shutil.rmtree(folder / OUTPUTS, ignore_errors=True)
    try:
        with followed(folder, tell) if is_leader else nullcontext():
            arguments = [str(folder), str(nodes.rank)]
            run_workers("ptpipe_elastic.worker", arguments, call.workers // nodes.num, logs, meeting)
    except WorkersFailed as error:
        raise StageError(_message(_cause(error, folder, nodes))) from error
    finally:
        _log_output(call, logs, tell)
    return _outputs(folder, nodes) if is_leader else {}


def _outputs(folder: Path, nodes: Nodes) -> Mapping[str, Path]:
    """What rank 0 made, perhaps on another node, whose files a shared folder may show a moment later."""
    deadline = time.monotonic() + (_LATE_FILES_S if nodes.num > 1 else 0)
    while True:
        if failures := list(_words_of_others(folder, nodes)):
            raise StageError(_message(failures[0]))
        if (folder / OUTPUTS).is_dir():
            return {place.name: place for place in (folder / OUTPUTS).iterdir()}
        if time.monotonic() > deadline:
            raise StageError("the workers ended without a word, and worker 0 without its results")
        time.sleep(_LOOK_EVERY_S)


def _word_of(folder: Path, node: int) -> Path:
    """Where a node says which of its workers failed first."""
    return folder / f"failed-{node}.json"


def _cause(error: WorkersFailed, folder: Path, nodes: Nodes) -> WorkerFailure:
    """Which worker failed first, on any node. Node 0 gives others a moment to say so, for it tells the user."""
    own = error.failures[0]
    with suppress(OSError):
        write_atomically(_word_of(folder, nodes.rank), json.dumps(asdict(own)).encode())
    if nodes.rank > 0 or own.came_by_itself:
        return own
    deadline = time.monotonic() + _OTHERS_WORD_S
    while True:
        others = list(_words_of_others(folder, nodes))
        if came_by_itself := [failure for failure in others if failure.came_by_itself]:
            return came_by_itself[0]
        if len(others) == nodes.num - 1 or time.monotonic() > deadline:
            return own
        time.sleep(_LOOK_EVERY_S)


def _words_of_others(folder: Path, nodes: Nodes) -> Iterator[WorkerFailure]:
    for node in range(1, nodes.num):
        with suppress(OSError, ValueError):
            yield WorkerFailure(**json.loads(_word_of(folder, node).read_text(encoding="utf-8")))


def _message(failure: WorkerFailure) -> str:
    if failure.is_stage_error and failure.exit_code > 0:
        return failure.message
    if failure.exit_code == -signal.SIGTERM:  # none came before it
        return "the workers were ended by SIGTERM, and none had failed here"
    if failure.exit_code < 0:
        how = f"was killed by {failure.signal_name}"
    elif failure.message:
        how = f"failed: {failure.message}"
    else:
        how = f"ended with exit code {failure.exit_code}"
    lines = [line.strip() for line in failure.last_lines if line.strip()][-_SHOWN_LINES:]
    last = f" (its last lines: {' | '.join(lines)})" if lines and not failure.message else ""
    return f"worker {failure.rank} {how}{last}"


def _log_output(call: Call, folder: Path, tell: Callable[[Event], None]) -> None:
    """Bring what this node's workers printed into the run's log, with their rank."""
    for file in sorted(folder.glob("rank-*.log")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            tell(LogLine(call.stage_id, f"[{file.stem.replace('-', ' ')}] {line}"))
