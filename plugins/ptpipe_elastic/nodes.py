"""Several machines that run one manifest together, on a shared artifacts folder.

Node 0 leads: it runs the plan as a single machine would, and announces each call with several workers. The other nodes
follow: they take part in announced calls and do nothing else. Announcements are in `locks/nodes-<plan>.json`; node 0
holds a kernel lock on a file beside it for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ptpipe import (
    Event,
    ExitCode,
    LogLine,
    Notice,
    Plan,
    PtpipeError,
    RunFinished,
    StageError,
    UsageError,
    hookimpl,
    write_atomically,
)
from ptpipe.launching import Call, LocalLauncher, Nodes, Store

_POLL_S = 0.2
_LOCK_PROBE_S = 2.0
"""How long the lock may be held by nodes that only test whether node 0 is alive."""
WAIT_FOR_LEADER_S = 600.0


def nodes_of_environment(variables: Mapping[str, str] = os.environ) -> Nodes | None:
    """Return the nodes that torchrun or SLURM started, one process each; None if neither started this process."""
    if "TORCHELASTIC_RUN_ID" in variables:
        rank, num = variables["RANK"], variables["WORLD_SIZE"]
    elif "SLURM_STEP_ID" in variables and variables.get("SLURM_NTASKS", "1") != "1":
        rank, num = variables["SLURM_PROCID"], variables["SLURM_NTASKS"]
    else:
        return None
    return Nodes(num=int(num), rank=int(rank), started=True)


def lead(plan: Plan, store: Store, run: Callable[[], RunFinished]) -> RunFinished:
    """Run the plan as node 0, and let the other nodes take part in calls with several workers.

    Raises UsageError if another process already leads this plan in the same artifacts folder.
    """
    store.open_for_writing()
    leader, manager = Leader(plan, store), plan.vocabulary.manager
    with store.in_use(), leader.leading():
        manager.register(leader)
        try:
            finished = run()
        except PtpipeError as error:  # a failed preflight: the others need not wait for what will not come
            leader.end(ExitCode(error.exit_code))
            raise
        finally:
            manager.unregister(leader)
        leader.end(ExitCode(finished.exit_code))
        return finished


def follow(plan: Plan, store: Store, nodes: Nodes, tell: Callable[[Event], None]) -> ExitCode:
    """Take part in the run that node 0 leads, as `nodes.rank`, until it ends; return its exit code.

    Raises StageError if node 0 does not start, or disappears.
    """
    store.open_for_writing()
    with store.in_use():
        return Follower(plan, store, nodes, tell).follow()


class Leader:
    """Node 0's announcements. Registered as a plugin, it announces each call that a launcher is asked to execute."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._file = _file(plan, store)
        self._calls = 0

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Hold the lead until the end of the block. Raises UsageError if another process holds it."""
        with self._file.with_suffix(".lock").open("a") as lock:
            deadline = time.monotonic() + _LOCK_PROBE_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # another leader, or a follower that tests at this moment whether there is one
                    if time.monotonic() > deadline:
                        raise UsageError(
                            "another node 0 is running this manifest in the same artifacts folder"
                        ) from None
                    time.sleep(_POLL_S / 10)
            self._write(state="running")
            yield

    @hookimpl(wrapper=True)
    def ptpipe_launch(self, call: Call) -> Generator[None, object, object]:
        """Announce a call with several workers for as long as it is executed, by whichever launcher."""
        with self.announced(call) if call.workers > 1 else contextlib.nullcontext():
            return (yield)

    @contextlib.contextmanager
    def announced(self, call: Call) -> Iterator[None]:
        """Make the other nodes take part in the call until the end of the block."""
        self._calls += 1
        self._write(state="running", call=asdict(call))
        try:
            yield
        finally:
            self._write(state="running")

    def end(self, exit_code: ExitCode) -> None:
        """Let the other nodes end."""
        self._write(state="ended", exit_code=int(exit_code))

    def _write(self, **state: Any) -> None:
        write_atomically(self._file, json.dumps({"calls": self._calls, **state}).encode())


@dataclass
class Follower:
    """A node other than node 0."""

    plan: Plan
    store: Store
    nodes: Nodes
    tell: Callable[[Event], None]

    def follow(self) -> ExitCode:
        """Take part until node 0 ends; return its exit code.

        Raises StageError if node 0 does not start, or disappears.
        """
        self.plan.vocabulary.manager.register(LocalLauncher(self.plan.vocabulary, self.store))
        file = _file(self.plan, self.store)
        begin_ns = self._now_ns(file)
        deadline = time.monotonic() + WAIT_FOR_LEADER_S
        done, has_met = 0, False
        self._log("is waiting for node 0")
        while True:
            is_led, state = _is_locked(file.with_suffix(".lock")), _read(file)
            if state.get("state") == "ended" and (has_met or file.stat().st_mtime_ns > begin_ns):
                self._log(f"ends: node 0 ended with exit code {state['exit_code']}")
                return ExitCode(state["exit_code"])
            if is_led and not has_met:
                has_met = True  # the file may still be that of an earlier run: read it again
            elif is_led:
                if state.get("call") and state["calls"] > done:
                    done = state["calls"]
                    self._take_part(Call.from_json(json.dumps(state["call"])))
                    continue
            elif has_met:
                raise StageError("node 0 disappeared; start all nodes again to resume from the last checkpoint")
            elif time.monotonic() > deadline:
                raise StageError(
                    f"node 0 did not start within {WAIT_FOR_LEADER_S:g} s; do both nodes have the same manifest, "
                    "options and artifacts folder?"
                )
            time.sleep(_POLL_S)

    def _take_part(self, call: Call) -> None:
        self._log(f"takes part in {call.stage_id}")
        folder = self.plan.manifest.path.parent.absolute()
        call = replace(call, nodes=self.nodes, artifacts=str(self.store.root), folder=str(folder))
        try:
            self.plan.vocabulary.manager.hook.ptpipe_launch(call=call, tell=self.tell)
        except StageError as error:  # node 0 sees the failure too, and decides what follows
            self.tell(Notice(call.stage_id, str(error)))

    def _log(self, text: str) -> None:
        self.tell(LogLine("", f"node {self.nodes.rank} {text}"))

    def _now_ns(self, file: Path) -> int:
        """The time on the shared folder's server: the clocks of the nodes may differ."""
        stamp = file.with_suffix(f".node-{self.nodes.rank}")
        stamp.write_text("")
        now_ns = stamp.stat().st_mtime_ns
        stamp.unlink()
        return now_ns


def _file(plan: Plan, store: Store) -> Path:
    """Where this plan is announced: the same for the same manifest and options, wherever the manifest's file is."""
    content = [plan.manifest.name, plan.manifest.seed, [[stage.id, stage.kind, stage.options] for stage in plan.stages]]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return store.root / "locks" / f"nodes-{digest[:16]}.json"


def _read(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return state
    return {}


def _is_locked(file: Path) -> bool:
    if not file.exists():
        return False
    with file.open("a+") as lock:  # NFS grants a shared lock only on a file that is open for reading
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
