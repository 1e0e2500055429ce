"""Several machines that run one manifest together, on a shared artifacts folder.

Node 0 leads: it runs the plan as a single machine would, and announces each call with several workers. The other nodes
follow: they take part in announced calls and do nothing else. Announcements are in `locks/nodes-<plan>.json`; node 0
holds a kernel lock on a file beside it for as long as it lives. An announcement names a stage of the plan, its key and
its inputs' digests; all else is in every node's own plan, so that the file can't make a node run anything else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, Field, ValidationError

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
    cache_status,
    hookimpl,
    write_atomically,
)
from ptpipe.launching import (
    Call,
    LocalLauncher,
    LockedError,
    Nodes,
    Store,
    exclusive_lock,
    make_call,
    shared_lock,
)

_POLL_S = 0.2
_LOCK_PROBE_S = 2.0
"""How long the lock may be held by nodes that only test whether node 0 is alive."""
WAIT_FOR_LEADER_S = 600.0
WAIT_WITHOUT_WORK_S = 20.0
"""How long a node waits for a node 0 that ended before, where it finds every stage with several workers cached."""
_SEEN_LATE_S = 10.0
"""How long after node 0's lock is free another node may not see yet how it ended."""
_WHOLE = (ExitCode.DONE, ExitCode.REFUSED, ExitCode.UNDECIDED)
"""Of runs that came to their end: node 0 of any other has to come again."""
_MAX_BYTES = 1 << 20

_Identity: TypeAlias = tuple[int, int, int]
"""Device, inode and time of a file: each announcement is another file."""

Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


class AnnouncedCall(BaseModel, frozen=True, extra="forbid"):
    """What another node can't know of a call: everything else is in its own plan."""

    stage_id: str
    key: Digest
    inputs: Mapping[str, tuple[Digest, ...]]
    """Digests of the stored inputs, by port."""


class Announcement(BaseModel, frozen=True, extra="forbid"):
    """The content of the file."""

    state: Literal["running", "ended"] = "running"
    run: str = ""
    """Another one for each node 0, whose calls are counted from 1."""
    calls: int = Field(ge=0)
    """How many calls were announced so far."""
    call: AnnouncedCall | None = None
    """The call that is executed now."""
    exit_code: ExitCode = ExitCode.DONE


def nodes_of_environment(variables: Mapping[str, str] = os.environ) -> Nodes | None:
    """Return the nodes that torchrun or SLURM started, one process each; None if neither started this process.

    Raises UsageError where their variables contradict each other.
    """
    if "TORCHELASTIC_RUN_ID" in variables:
        rank, num = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    elif "SLURM_STEP_ID" in variables and variables.get("SLURM_NTASKS", "1") != "1":
        rank, num = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_NTASKS")
    else:
        return None
    if rank >= num:
        raise UsageError(f"the environment says that this is process {rank} of {num}; ranks are 0 to {num - 1}")
    return Nodes(num=num, rank=rank, started=True)


def _number(variables: Mapping[str, str], name: str) -> int:
    value = variables.get(name, "")
    if not re.fullmatch("[0-9]{1,9}", value):
        launcher = "SLURM_STEP_ID" if name.startswith("SLURM") else "TORCHELASTIC_RUN_ID"
        found = repr(value[:40]) if name in variables else "missing"
        raise UsageError(f"{launcher} is set, but {name} is {found}, not a number; unset {launcher} outside a cluster")
    return int(value)


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


def follow(plan: Plan, store: Store, nodes: Nodes, fresh: tuple[str, ...], tell: Callable[[Event], None]) -> ExitCode:
    """Take part in the run that node 0 leads, as `nodes.rank`, until it ends; return its exit code.

    Raises StageError if node 0 does not start, or disappears.
    """
    store.open_for_writing()
    with store.in_use():
        return Follower(plan, store, nodes, tell, fresh).follow()


class Leader:
    """Node 0's announcements. Registered as a plugin, it announces each call that a launcher is asked to execute."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._file = _file(plan, store)
        self._calls = 0
        self._run = secrets.token_hex(8)

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Hold the lead until the end of the block. Raises UsageError if another process holds it."""
        deadline = time.monotonic() + _LOCK_PROBE_S
        with contextlib.ExitStack() as lock:
            while True:
                try:
                    lock.enter_context(exclusive_lock(self._file.with_suffix(".lock")))
                    break
                except LockedError:  # another leader, or a follower that tests at this moment whether there is one
                    if time.monotonic() > deadline:
                        raise UsageError(
                            "another node 0 is running this manifest in the same artifacts folder"
                        ) from None
                    time.sleep(_POLL_S / 10)
            self._write()
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
        inputs = {port: tuple(stored.digest for stored in items) for port, items in call.inputs.items()}
        self._write(AnnouncedCall(stage_id=call.stage_id, key=call.key, inputs=inputs))
        try:
            yield
        finally:
            self._write()

    def end(self, exit_code: ExitCode) -> None:
        """Let the other nodes end."""
        self._replace(Announcement(state="ended", run=self._run, calls=self._calls, exit_code=exit_code))

    def _write(self, call: AnnouncedCall | None = None) -> None:
        self._replace(Announcement(run=self._run, calls=self._calls, call=call))

    def _replace(self, announcement: Announcement) -> None:
        write_atomically(self._file, announcement.model_dump_json().encode())


@dataclass
class Follower:
    """A node other than node 0."""

    plan: Plan
    store: Store
    nodes: Nodes
    tell: Callable[[Event], None]
    fresh: tuple[str, ...] = ()

    def follow(self) -> ExitCode:
        """Take part until node 0 ends, or where it ended before and would not need this node; return its exit code.

        Raises StageError if node 0 does not start, or disappears.
        """
        self.plan.vocabulary.manager.register(LocalLauncher(self.plan.vocabulary, self.store))
        file = _file(self.plan, self.store)
        left = _left_by_earlier_run(file)
        begin_ns = _now_ns(file)
        begin = time.monotonic()
        done, has_met, may_be_late = ("", 0), False, True
        self._log("is waiting for node 0")
        while True:
            is_led = _is_locked(file.with_suffix(".lock"))
            announcement = _read(file, but=left)
            if announcement and announcement.state == "ended":
                return self._end(announcement)
            if is_led and not has_met:
                has_met = True
            elif is_led:
                is_new = announcement and (announcement.run != done[0] or announcement.calls > done[1])
                if announcement and announcement.call and is_new:
                    done = announcement.run, announcement.calls
                    self._take_part(self._call(announcement.call))
                    continue
            elif has_met:
                return self._last_announced(file, left)
            elif may_be_late and time.monotonic() > begin + WAIT_WITHOUT_WORK_S:
                may_be_late = False  # node 0 may have come and gone, having found everything cached
                earlier = _read(file, newer_than_ns=begin_ns - int(WAIT_FOR_LEADER_S * 1e9))
                is_whole = earlier and earlier.state == "ended" and earlier.exit_code in _WHOLE
                if earlier and is_whole and not self._has_work():
                    self._log(f"is not needed and ends: node 0 ended before with exit code {earlier.exit_code}")
                    return earlier.exit_code
            elif time.monotonic() > begin + WAIT_FOR_LEADER_S:
                raise StageError(
                    f"node 0 did not start within {WAIT_FOR_LEADER_S:g} s; do both nodes have the same manifest, "
                    "options and artifacts folder?"
                )
            time.sleep(_POLL_S)

    def _end(self, announcement: Announcement) -> ExitCode:
        self._log(f"ends: node 0 ended with exit code {announcement.exit_code}")
        return announcement.exit_code

    def _last_announced(self, file: Path, left: _Identity | None) -> ExitCode:
        """Return the exit code of a node 0 that holds its lock no more.

        A file system of several machines may show the free lock before the announcement. Raises StageError where none
        comes.
        """
        deadline = time.monotonic() + _SEEN_LATE_S
        while time.monotonic() < deadline:
            _now_ns(file)  # a client of NFS that creates a file reads its folder again
            announcement = _read(file, but=left)
            if announcement and announcement.state == "ended":
                return self._end(announcement)
            time.sleep(_POLL_S)
        raise StageError("node 0 disappeared; start all nodes again to resume from the last checkpoint")

    def _has_work(self) -> bool:
        """Return whether node 0 would run a stage with several workers, by this node's own plan and the store."""
        shared = {stage.id for stage in self.plan.stages if stage.stage.workers}
        statuses = cache_status(self.plan, artifacts=self.store.root, fresh=self.fresh)
        return any(status.stage_id in shared and not status.is_cached for status in statuses)

    def _call(self, announced: AnnouncedCall) -> Call:
        """Return this node's own call of the announced stage. Raises StageError if its plan has no such call."""
        stages = {stage.id: stage for stage in self.plan.stages if stage.stage.workers}
        stage = stages.get(announced.stage_id)
        ports = {port: len(references) for port, references in stage.wiring.items()} if stage else {}
        if not stage or ports != {port: len(digests) for port, digests in announced.inputs.items()}:
            raise StageError(
                f"node 0 announced a stage {announced.stage_id!r} that this node's manifest does not have: do both "
                "nodes have the same manifest?"
            )
        return make_call(self.plan, stage, announced.key, announced.inputs, self.store, self.nodes)

    def _take_part(self, call: Call) -> None:
        self._log(f"takes part in {call.stage_id}")
        try:
            self.plan.vocabulary.manager.hook.ptpipe_launch(call=call, tell=self.tell)
        except StageError as error:  # node 0 sees the failure too, and decides what follows
            self.tell(Notice(call.stage_id, str(error)))

    def _log(self, text: str) -> None:
        self.tell(LogLine("", f"node {self.nodes.rank} {text}"))


def _now_ns(file: Path) -> int:
    """The time on the shared folder's server: the clocks of the nodes may differ."""
    with tempfile.NamedTemporaryFile(prefix=f"{file.stem}-", dir=file.parent) as stamp:
        return os.fstat(stamp.fileno()).st_mtime_ns


def _file(plan: Plan, store: Store) -> Path:
    """Where this plan is announced: the same for the same manifest and options, wherever the manifest's file is."""
    content = [plan.manifest.name, plan.manifest.seed, [[stage.id, stage.kind, stage.options] for stage in plan.stages]]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return store.root / "locks" / f"nodes-{digest[:16]}.json"


def _left_by_earlier_run(file: Path) -> _Identity | None:
    """Return which announcement an earlier run has left; None where there is none, or a node 0 leads that runs.

    Not by its time: clocks are set back, and a slow disk or NFS shows what node 0 writes well after its lock.
    """
    is_led = _is_locked(file.with_suffix(".lock"))
    if is_led:
        time.sleep(_POLL_S)  # it may be about to write its first one
    announcement = _read(file)
    deadline = time.monotonic() + _LOCK_PROBE_S
    while is_led and announcement is None and file.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)  # it was just replaced
        announcement = _read(file)
    if is_led and announcement and announcement.state == "running":
        return None
    return _identity(file.lstat()) if file.exists() else None


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _read(file: Path, but: _Identity | None = None, newer_than_ns: int = 0) -> Announcement | None:
    """Return the announcement; None where there is none but that one, no newer one, or it can't be read now.

    Raises StageError where the file is not what node 0 writes: a link, a huge file, any other content.
    """
    try:
        # A pipe must not block; a link is not followed.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if file.is_symlink():
            raise StageError(f"{file} is a link, which node 0 never makes: delete it") from error
        return None
    with os.fdopen(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        if found.st_mtime_ns <= newer_than_ns or _identity(found) == but:
            return None
        try:
            content = stream.read(_MAX_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
        except OSError:  # as over NFS, where it was just replaced
            return None
    try:
        return Announcement.model_validate_json(content[:_MAX_BYTES], strict=True)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]
        place = ".".join(map(str, reason["loc"]))
        raise StageError(
            f"{file} is no announcement of node 0 ({place or 'content'}: {reason['msg']}); do all nodes have the same "
            "version of ptpipe?"
        ) from None


def _is_locked(file: Path) -> bool:
    if not file.exists():
        return False
    try:
        with shared_lock(file):  # shared: two followers that look at the same time must not see each other
            return False
    except LockedError:
        return True
