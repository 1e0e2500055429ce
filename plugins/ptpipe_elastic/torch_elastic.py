"""Run worker processes on torch elastic. The only file that uses `torch.distributed.launcher`."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import tempfile
import threading
import traceback
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
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry as registry
from torch.distributed.launcher import api as launcher_api
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ptpipe import ExitCode, StageError, Terminated
from ptpipe.launching import python_command
from ptpipe_elastic.bootstrap import log_file
from ptpipe_elastic.rendezvous import BACKEND, Rendezvous, WorkerRendezvous, create_handler
from ptpipe_torch.runtime import loggers_limited

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""By torch's agent."""
_SHUTDOWN_S = 3
"""Between SIGTERM and SIGKILL, for workers that the agent ends."""
_EXIT_BARRIER_S = 20
"""How long a node that is done waits for the others, which must be able to reach its store until they are done."""
_LAST_LINES = 20
_BOOTSTRAP = "ptpipe_elastic.bootstrap"


@dataclass(frozen=True)
class WorkerFailure:
    """How a worker failed."""

    rank: int
    exit_code: int
    """Negative: minus the number of the signal that killed it."""
    message: str
    """The worker's own error message; empty if it left none."""
    is_stage_error: bool
    is_consequence: bool
    """Whether it failed because it lost its connection to another worker."""
    last_lines: tuple[str, ...]
    """Of its output."""
    frames: tuple[str, ...] = ()
    """Lines of plugins' code that its error came through."""

    @property
    def is_root_cause(self) -> bool:
        """Whether it neither failed because of another worker nor was ended by its agent."""
        return not self.is_consequence and self.exit_code != -signal.SIGTERM

    @property
    def signal_name(self) -> str:
        """The signal that killed it (meaningful if `exit_code` is negative)."""
        number = -self.exit_code
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"

    @property
    def last_words(self) -> str:
        """Its error message, or else the last line of its output."""
        return self.message or next((line.strip() for line in reversed(self.last_lines) if line.strip()), "")


class WorkersFailed(Exception):  # noqa: N818  # says what happened
    """Some workers failed; `failures` has the root cause first."""

    def __init__(self, failures: Sequence[WorkerFailure]) -> None:
        self.failures = tuple(failures)
        super().__init__(f"{len(failures)} workers failed")


def run_workers(
    module: str, arguments: Sequence[str], num_workers: int, log_folder: Path, rendezvous: Rendezvous | None = None
) -> None:
    """Run `python -m module arguments` in worker processes of this machine until all, on all nodes, are done.

    `num_workers`: on this machine. `log_folder`: takes the workers' output, one file per rank. `rendezvous`: None if
    this is the only machine. Each worker has RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in its environment, and
    finds the others by `worker_store`. When one fails the others are ended.

    Raises WorkersFailed; StageError if the rendezvous fails; KeyboardInterrupt or Terminated on a signal. In each case
    no worker is left.
    """
    rendezvous = rendezvous or Rendezvous()
    log_folder.mkdir(parents=True, exist_ok=True)
    registry.register(BACKEND, create_handler)
    with (
        tempfile.TemporaryDirectory(prefix="store-", dir=log_folder, ignore_cleanup_errors=True) as folder,  # mode 0700
        _restored_process_state(),
        _quiet(),
        _short_exit_barrier(),
    ):
        config = LaunchConfig(
            min_nodes=rendezvous.nodes.num,
            max_nodes=rendezvous.nodes.num,
            nproc_per_node=num_workers,
            run_id=BACKEND,  # the handler's is used
            rdzv_backend=BACKEND,
            rdzv_configs={"handler": WorkerRendezvous(rendezvous)},
            local_addr="localhost",
            max_restarts=rendezvous.nodes.max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(log_folder)),
            **_supported({"shutdown_timeout": _SHUTDOWN_S, "signals_to_handle": _signals_to_handle()}),
        )
        store_url = rendezvous.worker_url(Path(folder))
        python, *command = python_command(_BOOTSTRAP, str(os.getpid()), store_url, str(log_folder.absolute()))
        try:
            elastic_launch(config, python)(*command, module, *arguments)
        except SignalException as error:
            if error.sigval == signal.SIGHUP:
                raise Terminated(ExitCode.HUNG_UP) from None
            raise (Terminated if error.sigval == signal.SIGTERM else KeyboardInterrupt) from None
        except (RendezvousError, DistError) as error:
            traceback.clear_frames(error.__traceback__)  # which refer to the agent, and it to the nodes' store
            raise _rendezvous_error(error, rendezvous.nodes.endpoint, log_folder) from error
        except ChildFailedError as error:
            traceback.clear_frames(error.__traceback__)
            raise WorkersFailed(_failures(error, log_folder)) from None


def _rendezvous_error(error: Exception, endpoint: str, log_folder: Path) -> StageError:
    if isinstance(error, DistError) and any(log_folder.glob("rank-*.log")):  # workers had started
        return StageError(f"node 0 has left, or can no longer be reached at {endpoint}")
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    reason = reason.removesuffix(" See inner exception for details.")
    return StageError(f"the rendezvous of the nodes at {endpoint or 'localhost'} failed: {reason}")


def _supported(options: dict[str, Any]) -> dict[str, Any]:
    """The options that this release of torch knows."""
    names = {field.name for field in fields(LaunchConfig)}
    return {name: value for name, value in options.items() if name in names}


def _signals_to_handle() -> str:
    """The signals for torch's agent to handle: none that this process was started to ignore (`nohup`)."""
    return ",".join(number.name for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN)


def _failures(error: ChildFailedError, log_folder: Path) -> list[WorkerFailure]:
    failures = [_failure(rank, failure, log_folder) for rank, failure in error.failures.items()]
    return sorted(failures, key=lambda failure: (_distance_from_cause(failure), failure.rank))


def _distance_from_cause(failure: WorkerFailure) -> int:
    if failure.exit_code > 0:
        # A worker that lost another waits before it exits. That it could exit means that none had died, but one hung.
        return 1 if failure.is_consequence else 0
    return 3 if failure.exit_code == -signal.SIGTERM else 2  # SIGTERM: the agent ended it after another had failed


def _failure(rank: int, failure: Any, log_folder: Path) -> WorkerFailure:
    # Without the worker's error file, torch makes up a message.
    content = failure.error_file_data if Path(failure.error_file).is_file() else {}
    return WorkerFailure(
        rank=rank,
        exit_code=failure.exitcode,
        message=str(content.get("message", "")),
        is_stage_error=bool(content.get("is_stage_error")),
        is_consequence=bool(content.get("is_consequence")),
        last_lines=_last_lines(log_file(log_folder, rank)),
        frames=tuple(content.get("frames", ())),
    )


def _last_lines(file: Path) -> tuple[str, ...]:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    return tuple(lines[-_LAST_LINES:])


@contextmanager
def _restored_process_state() -> Iterator[None]:
    """Restore the signal handlers and environment variable that the agent replaces and leaves behind.

    Handlers in the main thread alone: in others, which can set none, the agent sets none.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (_HANDLED if is_main else ())}
    variable = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    value = os.environ.get(variable)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.pop(variable, None)
        if value is not None:
            os.environ[variable] = value


@contextmanager
def _short_exit_barrier() -> Iterator[None]:
    """Shorten the agent's wait for other nodes at the end: 5 minutes, deaf to signals, even if one failed and left."""
    launcher: Any = launcher_api  # it does not export the class, and has no option for the timeout
    agent = launcher.LocalElasticAgent
    if "exit_barrier_timeout" in inspect.signature(agent.__init__).parameters:
        launcher.LocalElasticAgent = partial(agent, exit_barrier_timeout=_EXIT_BARRIER_S)
    try:
        yield
    finally:
        launcher.LocalElasticAgent = agent


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the agent's log: its errors are reported by our exceptions. Its loggers have a level each."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    with loggers_limited(names, logging.CRITICAL + 1):
        yield
