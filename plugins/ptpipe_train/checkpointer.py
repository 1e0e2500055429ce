"""When checkpoints are written, and which one a training resumes from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptpipe import Context
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER, WorkerGroup
from ptpipe_train.checkpoint import (
    NUM_KEPT,
    Checkpoint,
    Damage,
    checkpoint_name,
    read_checkpoint,
    read_checkpoints,
    remove_checkpoint,
    write_checkpoint,
)
from ptpipe_train.state import TrainingState

_EVERY_S = 15.0
_MIN_COST_RATIO = 100
"""By default, the time between two checkpoints is at least this many times that of writing one."""


@dataclass
class Checkpointer:
    """Writes and restores the checkpoints of one stage.

    `work` identifies everything that decides the stage's result except its inputs, whose digests `ctx` has;
    `environment` what decides its last bits. Several workers write at the same step, each what only it has, and resume
    from the newest step that all of them have.
    """

    ctx: Context
    every_s: float | None
    """Seconds between checkpoints; None: chosen by cost."""
    work: str
    environment: dict[str, str]
    workers: WorkerGroup = SINGLE_WORKER
    state_is_replicated: bool = True
    """Whether parameters and optimizer state are the same on every rank."""
    _written_s: float = field(default_factory=time.perf_counter)
    _cost_s: float = 0.0
    _has_failed: bool = False
    _has_ignored: bool = False

    @property
    def folder(self) -> Path:
        """Folder of this worker's checkpoints."""
        return self._folder_of(self.workers.rank)

    def _folder_of(self, rank: int) -> Path:
        folder = self.ctx.scratch / "checkpoints"
        return folder if self.workers.size == 1 else folder / f"rank-{rank}"

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint, by this worker's clock."""
        interval_s = self.every_s if self.every_s is not None else max(_EVERY_S, _MIN_COST_RATIO * self._cost_s)
        return time.perf_counter() - self._written_s >= interval_s

    def write(self, state: TrainingState, step: int) -> None:
        """Write a checkpoint. Where that fails, the training continues without and a notice is given, once."""
        begin_s = time.perf_counter()
        try:
            metadata = {"work": self.work, "inputs": self._inputs, "environment": self.environment}
            checkpoint = state.checkpoint(step, metadata)
            if self.workers.rank != 0:
                checkpoint = state.without_shared(checkpoint, state_is_replicated=self.state_is_replicated)
            write_checkpoint(self.folder, checkpoint)
        except OSError as error:
            if not self._has_failed:
                self.ctx.notice(f"no checkpoint could be written ({error}); a killed run would start from scratch")
            self._has_failed = True
        self._written_s = time.perf_counter()
        self._cost_s = self._written_s - begin_s

    def restore_newest(self, state: TrainingState) -> bool:
        """Restore the newest valid checkpoint of this work; return False where there is none."""
        newest = next(self._valid(), None) if self.workers.size == 1 else self._newest_of_all(state)
        if newest is None:
            return False
        self._restore(state, newest)
        return True

    @property
    def _inputs(self) -> dict[str, list[str]]:
        return {port: list(digests) for port, digests in self.ctx.input_digests.items()}

    def _valid(self) -> Iterator[Checkpoint]:
        """Yield this worker's checkpoints of this work on these inputs, newest first; remove the others it meets.

        Those are removed because one of a later step would be kept in place of what is written next.
        """
        for found in read_checkpoints(self.folder):
            if isinstance(found, Damage):
                self.ctx.notice(f"checkpoint {found.name} is damaged ({found.reason}) and was skipped")
                remove_checkpoint(self.folder, found.name)
            elif found.metadata["work"] == self.work and found.metadata.get("inputs") == self._inputs:
                yield found
            else:
                self._discard(found)

    def _discard(self, checkpoint: Checkpoint) -> None:
        remove_checkpoint(self.folder, checkpoint_name(checkpoint.step))
        before, now = checkpoint.metadata.get("inputs") or {}, self._inputs
        others = [port for port in now if before.get(port) != now[port]]
        if others and not self._has_ignored:
            self._has_ignored = True
            self.ctx.notice(
                f"the checkpoint of step {checkpoint.step} was ignored: it is of another {' and '.join(others)}, which "
                "a stage above made before it was rerun"
            )

    def _newest_of_all(self, state: TrainingState) -> Checkpoint | None:
        own = {checkpoint.step: checkpoint for checkpoint in self._valid()}
        steps = sorted(own, reverse=True)[:NUM_KEPT]
        gathered = self.workers.all_gather([*steps, *([-1] * (NUM_KEPT - len(steps)))])
        common = set.intersection(*(set(steps) for steps in gathered)) - {-1}
        for step in own:
            # A later step that not all ranks have would be preferred to, or mixed with, the checkpoints written next.
            if step > max(common, default=-1):
                remove_checkpoint(self.folder, checkpoint_name(step))
        if not common:
            return None
        checkpoint = own[round(max(common))]
        if self.workers.rank != 0:
            first = read_checkpoint(self._folder_of(0), checkpoint.step)
            checkpoint = state.with_shared(checkpoint, first, state_is_replicated=self.state_is_replicated)
        return checkpoint

    def _restore(self, state: TrainingState, checkpoint: Checkpoint) -> None:
        state.restore(checkpoint)
        is_first = self.workers.rank == 0
        self.ctx.log(f"training resumes from the checkpoint of step {checkpoint.step}", shown=is_first)
        before: dict[str, Any] = checkpoint.metadata["environment"]
        changes = [
            f"{name} was {before.get(name)}, is {now}"
            for name, now in self.environment.items()
            if before.get(name) != now
        ]
        if changes:
            self.ctx.notice(
                f"training resumes from a checkpoint of another environment ({'; '.join(changes)}): "
                "the result may differ in its last bits from that of an uninterrupted training"
            )
