"""Several machines that run one manifest together, on a shared artifacts folder.

Node 0 leads: it walks the plan as if it were alone, and announces each stage that several workers do. The others
follow: they take part in what is announced and do nothing else. What is announced stands in `locks/nodes-<plan>.json`;
node 0 holds a kernel lock beside it for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ptpipe.errors import ExitCode, StageError, UsageError
from ptpipe.events import Event, LogLine, Notice
from ptpipe.execution.call import Call, Nodes
from ptpipe.execution.local_launcher import LocalLauncher
from ptpipe.plan.bind import Plan
from ptpipe.store.files import write_atomically
from ptpipe.store.store import Store

_LOOK_EVERY_S = 0.2
_OTHER_LOOKS_S = 2.0
WAIT_FOR_LEADER_S = 600.0


def nodes_of_environment(variables: Mapping[str, str] = os.environ) -> Nodes | None:
    """The nodes that torchrun or SLURM says there are, each one process; None where neither started this one."""
    if "TORCHELASTIC_RUN_ID" in variables:
        rank, num = variables["RANK"], variables["WORLD_SIZE"]
    elif "SLURM_STEP_ID" in variables and variables.get("SLURM_NTASKS", "1") != "1":
        rank, num = variables["SLURM_PROCID"], variables["SLURM_NTASKS"]
    else:
        return None
    return Nodes(num=int(num), rank=int(rank), started=True)


class Leader:
    """Node 0's word to the others."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._file = _file(plan, store)
        self._calls = 0

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Lead until the end of the block. Raises UsageError where another process already does."""
        with self._file.with_suffix(".lock").open("a") as lock:
            deadline = time.monotonic() + _OTHER_LOOKS_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # or others look just now whether there is a node 0
                    if time.monotonic() > deadline:
                        raise UsageError(
                            "another node 0 is running this manifest in the same artifacts folder"
                        ) from None
                    time.sleep(_LOOK_EVERY_S / 10)
            self._write(state="running")
            yield

    @contextlib.contextmanager
    def announced(self, call: Call) -> Iterator[None]:
        """Ask the others to take part, until the end of the block."""
        self._calls += 1
        self._write(state="running", call=asdict(call))
        try:
            yield
        finally:
            self._write(state="running")

    def end(self, exit_code: ExitCode) -> None:
        """Let the others go."""
        self._write(state="ended", exit_code=int(exit_code))

    def _write(self, **said: Any) -> None:
        write_atomically(self._file, json.dumps({"calls": self._calls, **said}).encode())


@dataclass
class Follower:
    """One of the other nodes."""

    plan: Plan
    store: Store
    nodes: Nodes
    tell: Callable[[Event], None]

    def follow(self) -> ExitCode:
        """Take part until node 0 ends; its exit code.

        Raises StageError where node 0 doesn't come, or goes without a word.
        """
        self.plan.vocabulary.manager.register(LocalLauncher(self.plan.vocabulary, self.store))
        file = _file(self.plan, self.store)
        begun_ns = self._now_ns(file)
        deadline = time.monotonic() + WAIT_FOR_LEADER_S
        done, is_known = 0, False
        self._say("waits for node 0")
        while True:
            is_led, said = _is_locked(file.with_suffix(".lock")), _read(file)
            if said.get("state") == "ended" and (is_known or file.stat().st_mtime_ns > begun_ns):
                self._say(f"ends: node 0 ended with exit code {said['exit_code']}")
                return ExitCode(said["exit_code"])
            if is_led and not is_known:
                is_known = True  # what is written there may still be of a run before: look again
            elif is_led:
                if said.get("call") and said["calls"] > done:
                    done = said["calls"]
                    self._take_part(Call.from_json(json.dumps(said["call"])))
                    continue
            elif is_known:
                raise StageError(
                    "node 0 has gone without a word; start all nodes again to go on from the last checkpoint"
                )
            elif time.monotonic() > deadline:
                raise StageError(
                    f"node 0 did not begin within {WAIT_FOR_LEADER_S:g} s; do both have the same manifest, options and "
                    "artifacts folder?"
                )
            time.sleep(_LOOK_EVERY_S)

    def _take_part(self, call: Call) -> None:
        self._say(f"takes part in {call.stage_id}")
        call = replace(call, nodes=self.nodes, artifacts=str(self.store.root), folder=str(self._folder()))
        try:
            self.plan.vocabulary.manager.hook.ptpipe_launch(call=call, tell=self.tell)
        except StageError as error:  # node 0 learns of it by itself, and decides
            self.tell(Notice(call.stage_id, str(error)))

    def _folder(self) -> Path:
        return self.plan.manifest.path.parent.absolute()

    def _say(self, text: str) -> None:
        self.tell(LogLine("", f"node {self.nodes.rank} {text}"))

    def _now_ns(self, file: Path) -> int:
        """The shared folder's own time, whatever this machine's clock says."""
        stamp = file.with_suffix(f".node-{self.nodes.rank}")
        stamp.write_text("")
        now_ns = stamp.stat().st_mtime_ns
        stamp.unlink()
        return now_ns


def _file(plan: Plan, store: Store) -> Path:
    """Where word of this plan is left: the same for the same manifest and options, wherever the manifest lies."""
    content = [plan.manifest.name, plan.manifest.seed, [[stage.id, stage.kind, stage.options] for stage in plan.stages]]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return store.root / "locks" / f"nodes-{digest[:16]}.json"


def _read(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return said
    return {}


def _is_locked(file: Path) -> bool:
    if not file.exists():
        return False
    with file.open("a+") as lock:  # NFS gives a shared lock only on what is open for reading
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
