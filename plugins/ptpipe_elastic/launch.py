"""Launch the workers of one call on this node, and collect their outputs or the cause of their failure."""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

from ptpipe import Event, LogLine, StageError, write_atomically
from ptpipe.launching import Call, Nodes, Store
from ptpipe_elastic.event_log import tailed
from ptpipe_elastic.rendezvous import Rendezvous
from ptpipe_elastic.torch_elastic import WorkerFailure, WorkersFailed, run_workers
from ptpipe_elastic.worker import OUTPUTS, call_file

_FAILURE_FILES_S = 5.0
"""How long node 0 waits for the failure files of other nodes."""
_POLL_S = 0.1
_ATTEMPT = "attempt-"
_SHOWN_LINES = 3
"""Of a failed worker's output; all of it is in the run's log."""


def launch(call: Call, tell: Callable[[Event], None]) -> Mapping[str, Path]:
    """Execute this node's part of the call; return the folders of rank 0's outputs on node 0, nothing on others.

    `tell`: receives the events of the workers, on node 0 of all nodes.
    Raises StageError with the worker that failed first, how it ended and its last words; also if the workers can't be
    divided evenly among the nodes.
    """
    nodes = call.nodes
    if call.workers % nodes.num:
        raise StageError(f"{call.workers} workers can't be divided evenly among {nodes.num} nodes")
    rendezvous = Rendezvous.of(nodes)
    try:
        folder = _attempt_folder(call, rendezvous)
        return _launch(call, tell, folder, rendezvous)
    finally:
        rendezvous.close()


def _launch(call: Call, tell: Callable[[Event], None], folder: Path, rendezvous: Rendezvous) -> Mapping[str, Path]:
    nodes = call.nodes
    logs = folder / f"logs-{nodes.rank}"
    logs.mkdir(exist_ok=True)  # a node that was killed and restarted continues in it
    _failure_file(folder, nodes.rank).unlink(missing_ok=True)
    is_leader = nodes.rank == 0
    write_atomically(call_file(folder, nodes.rank), call.to_json().encode())
    try:
        with tailed(folder, tell) if is_leader else nullcontext():
            arguments = [str(folder), str(nodes.rank)]
            run_workers("ptpipe_elastic.worker", arguments, call.workers // nodes.num, logs, rendezvous)
    except WorkersFailed as error:
        raise _stage_error(_cause(error, folder, nodes)) from error
    finally:
        _log_output(call, logs, tell)
    return _outputs(folder, nodes) if is_leader else {}


def _attempt_folder(call: Call, rendezvous: Rendezvous) -> Path:
    """Make a folder for this attempt, the same on all nodes, that no other user can open and no one can guess.

    The worker processes of an earlier run that was killed may still be ending: they must not write to the same folder.
    """
    parent, name = Store(Path(call.artifacts)).scratch(call.key) / "workers", ""
    if rendezvous.nodes.rank == 0:
        shutil.rmtree(parent, ignore_errors=True)
        parent.mkdir(exist_ok=True)
        if parent.is_symlink():
            raise StageError(f"{parent} is a link, and not ptpipe's: delete it")
        name = Path(tempfile.mkdtemp(prefix=_ATTEMPT, dir=parent)).name  # mode 0700
    name = rendezvous.agree(f"attempt/{call.key}", name)
    if not re.fullmatch(rf"{_ATTEMPT}\w+", name, re.ASCII):
        raise StageError(f"{rendezvous.nodes.endpoint} is not node 0 of this run: it named the folder {name!r}")
    return parent / name


def _outputs(folder: Path, nodes: Nodes) -> Mapping[str, Path]:
    """The outputs of rank 0, which is on this node."""
    if failures := list(_failures_of_others(folder, nodes)):
        raise _stage_error(failures[0])
    if not (folder / OUTPUTS).is_dir():
        raise StageError("the workers ended without an error, but worker 0 left no outputs")
    return {place.name: place for place in (folder / OUTPUTS).iterdir()}


def _failure_file(folder: Path, node: int) -> Path:
    """Where a node writes which of its workers failed first."""
    return folder / f"failed-{node}.json"


def _cause(error: WorkersFailed, folder: Path, nodes: Nodes) -> WorkerFailure:
    """The worker that failed first, on any node. Node 0, which reports to the user, waits for the others' files."""
    own = error.failures[0]
    with suppress(OSError):
        write_atomically(_failure_file(folder, nodes.rank), json.dumps(asdict(own)).encode())
    if nodes.rank > 0 or own.is_root_cause:
        return own
    deadline = time.monotonic() + _FAILURE_FILES_S
    while True:
        others = list(_failures_of_others(folder, nodes))
        if causes := [failure for failure in others if failure.is_root_cause]:
            return causes[0]
        if len(others) == nodes.num - 1 or time.monotonic() > deadline:
            return own
        time.sleep(_POLL_S)


def _failures_of_others(folder: Path, nodes: Nodes) -> Iterator[WorkerFailure]:
    for node in range(1, nodes.num):
        with suppress(OSError, ValueError, TypeError):
            yield WorkerFailure(**json.loads(_failure_file(folder, node).read_text(encoding="utf-8")))


def _stage_error(failure: WorkerFailure) -> StageError:
    error = StageError(_message(failure))
    error.frames = tuple(failure.frames)
    return error


def _message(failure: WorkerFailure) -> str:
    if failure.is_stage_error and failure.exit_code > 0:
        return failure.message
    if failure.exit_code == -signal.SIGTERM:  # no failure came before it
        return "the workers were ended by SIGTERM; none had failed on this node"
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
    """Copy the output of this node's workers to the run's log, each line with its rank."""
    for file in sorted(folder.glob("rank-*.log")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            tell(LogLine(call.stage_id, f"[{file.stem.replace('-', ' ')}] {line}"))
