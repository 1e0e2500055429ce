"""The one file that knows torch elastic, `torch.distributed.launcher`."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ptpipe.errors import StageError, Terminated
from ptpipe_elastic.started import log_file

_SHUTDOWN_S = 3
"""Between SIGTERM and SIGKILL, for workers that were told to end."""
_FAREWELL_S = 20
"""How long a node that is done waits for others, so that they find it there to the end."""
_MEETING_S = 600
"""How long nodes wait for each other."""
_LAST_LINES = 20
_STARTED = "ptpipe_elastic.started"
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class WorkerFailure:
    """How a worker ended."""

    rank: int
    exit_code: int
    """Negative: minus the signal's number."""
    message: str
    """What it said of it; empty where it couldn't."""
    is_stage_error: bool
    is_consequence: bool
    """Whether it failed because another one did."""
    last_lines: tuple[str, ...]
    """Of what it printed."""

    @property
    def came_by_itself(self) -> bool:
        """Whether it wasn't for another worker, on this node or elsewhere, that it failed or was ended."""
        return not self.is_consequence and self.exit_code != -signal.SIGTERM

    @property
    def signal_name(self) -> str:
        """What killed it, where something did."""
        number = -self.exit_code
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


@dataclass(frozen=True)
class Meeting:
    """How the nodes of a stage find each other."""

    num_nodes: int = 1
    node_rank: int = 0
    endpoint: str = ""
    """`host:port` of node 0; empty for a single node, which takes a free port of its own."""
    name: str = ""
    """The same on all nodes, and no other's at the same endpoint."""
    max_restarts: int = 0


class WorkersFailed(Exception):  # noqa: N818  # says what happened
    """Some workers failed; carries the failures, the first cause first."""

    def __init__(self, failures: Sequence[WorkerFailure]) -> None:
        self.failures = tuple(failures)
        super().__init__(f"{len(failures)} workers failed")


def run_workers(
    module: str, arguments: Sequence[str], num_workers: int, log_folder: Path, meeting: Meeting = Meeting()
) -> None:
    """Run `python -m module arguments` in that many processes of this machine until all, on all nodes, are done.

    Each has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment; the port
    is a free one. What they print is in `log_folder`, a file a rank. When one fails the others are ended.

    Raises WorkersFailed; StageError where the nodes don't meet; KeyboardInterrupt and Terminated as the signals say,
    with all workers ended.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=meeting.num_nodes,
        max_nodes=meeting.num_nodes,
        nproc_per_node=num_workers,
        run_id=meeting.name or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=meeting.endpoint or "localhost:0",
        rdzv_configs={"is_host": meeting.node_rank == 0, "timeout": _MEETING_S},
        local_addr=_own_address(meeting.endpoint),
        max_restarts=meeting.max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_folder)),
        **_known({"shutdown_timeout": _SHUTDOWN_S}),
    )
    with _put_back(), _quiet(), _short_farewell():
        try:
            elastic_launch(config, sys.executable)("-m", _STARTED, str(log_folder.absolute()), module, *arguments)
        except SignalException as error:
            raise (Terminated if error.sigval == signal.SIGTERM else KeyboardInterrupt) from None
        except (RendezvousError, DistError) as error:
            if any(log_folder.glob("rank-*.log")):
                raise StageError(f"node 0 has left, or can't be reached any more at {meeting.endpoint}") from error
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reason = reason.removesuffix(" See inner exception for details.")
            raise StageError(f"the nodes don't meet at {meeting.endpoint or 'localhost'}: {reason}") from error
        except ChildFailedError as error:
            raise WorkersFailed(_failures(error, log_folder)) from None


def _own_address(endpoint: str) -> str:
    """What the other nodes call this machine: the address that it talks to node 0 from."""
    host = endpoint.rpartition(":")[0].strip("[]")
    if not host:
        return "localhost"
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise StageError(f"--rdzv-endpoint {endpoint}: {error.strerror or error}") from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a datagram's connect sends nothing
        probe.connect(place)
        return str(probe.getsockname()[0])


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Those that this release of torch has."""
    names = {field.name for field in fields(LaunchConfig)}
    return {name: value for name, value in options.items() if name in names}


def _failures(error: ChildFailedError, log_folder: Path) -> list[WorkerFailure]:
    failures = [_failure(rank, failure, log_folder) for rank, failure in error.failures.items()]
    return sorted(failures, key=lambda failure: (_distance_from_cause(failure), failure.rank))


def _distance_from_cause(failure: WorkerFailure) -> int:
    if failure.exit_code > 0:
        # One that lost another gives way for a while: that it ended by itself means that none had died, but one hung.
        return 1 if failure.is_consequence else 0
    return 3 if failure.exit_code == -signal.SIGTERM else 2  # the agent's own way to end the others


def _failure(rank: int, failure: Any, log_folder: Path) -> WorkerFailure:
    # Without a file of the worker's, torch puts words of its own there.
    said = failure.error_file_data if Path(failure.error_file).is_file() else {}
    return WorkerFailure(
        rank=rank,
        exit_code=failure.exitcode,
        message=str(said.get("message", "")),
        is_stage_error=bool(said.get("is_stage_error")),
        is_consequence=bool(said.get("is_consequence")),
        last_lines=_last_lines(log_file(log_folder, rank)),
    )


def _last_lines(file: Path) -> tuple[str, ...]:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    return tuple(lines[-_LAST_LINES:])


@contextmanager
def _put_back() -> Iterator[None]:
    """Signal handlers, and variables of the environment: the agent puts its own in place, and leaves them there."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    variables = {name: os.environ.get(name) for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE", _OWN_STORE)}
    # Workers that are started again must not find what those before them left in the agents' store.
    os.environ[_OWN_STORE] = "1"
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _short_farewell() -> Iterator[None]:
    """An agent that is done waits for other nodes': 5 minutes, deaf to signals, where one has failed and left."""
    agent = launcher.LocalElasticAgent
    if "exit_barrier_timeout" in inspect.signature(agent.__init__).parameters:
        launcher.LocalElasticAgent = partial(agent, exit_barrier_timeout=_FAREWELL_S)
    try:
        yield
    finally:
        launcher.LocalElasticAgent = agent


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent logs what is said better by the error, through loggers that each have a level of their own."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
