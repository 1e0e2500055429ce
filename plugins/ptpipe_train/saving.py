"""When a checkpoint is written, and which one a training goes on from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptpipe import Context
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER, WorkerGroup
from ptpipe_train.checkpoint import (
    KEPT,
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
_LEAST_SHARE = 100
"""Without an interval of the user's, the time between two checkpoints is this many times that of writing one."""


@dataclass
class Saving:
    """Checkpoints of one stage. `work` stands for all that decides its result, `environment` for its last bits.

    Workers of a team write at the same step, each what only it has, and go on from the newest step that all have.
    """

    ctx: Context
    every_s: float | None
    work: str
    environment: dict[str, str]
    workers: WorkerGroup = SINGLE_WORKER
    state_is_shared: bool = True
    """Whether parameters and optimizer are the same on every rank."""
    _written_s: float = field(default_factory=time.perf_counter)
    _cost_s: float = 0.0
    _has_failed: bool = False

    @property
    def folder(self) -> Path:
        """Where this worker's checkpoints are."""
        return self._folder_of(self.workers.rank)

    def _folder_of(self, rank: int) -> Path:
        folder = self.ctx.scratch / "checkpoints"
        return folder if self.workers.size == 1 else folder / f"rank-{rank}"

    @property
    def is_due(self) -> bool:
        """Whether it is time for one."""
        interval_s = self.every_s if self.every_s is not None else max(_EVERY_S, _LEAST_SHARE * self._cost_s)
        return time.perf_counter() - self._written_s >= interval_s

    def write(self, state: TrainingState, step: int) -> None:
        """Write one. Where that fails the training goes on without, and says so."""
        begin_s = time.perf_counter()
        try:
            checkpoint = state.checkpoint(step, {"work": self.work, "environment": self.environment})
            if self.workers.rank != 0:
                checkpoint = state.without_shared(checkpoint, state_is_shared=self.state_is_shared)
            write_checkpoint(self.folder, checkpoint)
        except OSError as error:
            if not self._has_failed:
                self.ctx.notice(f"no checkpoint could be written ({error}); if it is killed now, training begins anew")
            self._has_failed = True
        self._written_s = time.perf_counter()
        self._cost_s = self._written_s - begin_s

    def restore_newest(self, state: TrainingState) -> bool:
        """Bring the state to the newest sound checkpoint of this work; False where there is none."""
        newest = next(self._sound(), None) if self.workers.size == 1 else self._newest_of_all(state)
        if newest is None:
            return False
        self._restore(state, newest)
        return True

    def _sound(self) -> Iterator[Checkpoint]:
        """Yield what this worker has of this work, newest first; say and remove what is damaged."""
        for found in read_checkpoints(self.folder):
            if isinstance(found, Damage):
                self.ctx.notice(f"checkpoint {found.name} is damaged ({found.reason}) and was left out")
                remove_checkpoint(self.folder, found.name)
            elif found.facts["work"] == self.work:
                yield found

    def _newest_of_all(self, state: TrainingState) -> Checkpoint | None:
        own = {checkpoint.step: checkpoint for checkpoint in self._sound()}
        steps = sorted(own, reverse=True)[:KEPT]
        had = self.workers.all_gather([*steps, *([-1] * (KEPT - len(steps)))])
        common = set.intersection(*(set(steps) for steps in had)) - {-1}
        for step in own:
            # Those that not all have would stand before what is written from here on, or be taken for part of it.
            if step > max(common, default=-1):
                remove_checkpoint(self.folder, checkpoint_name(step))
        if not common:
            return None
        checkpoint = own[round(max(common))]
        if self.workers.rank != 0:
            first = read_checkpoint(self._folder_of(0), checkpoint.step)
            checkpoint = state.with_shared(checkpoint, first, state_is_shared=self.state_is_shared)
        return checkpoint

    def _restore(self, state: TrainingState, checkpoint: Checkpoint) -> None:
        state.restore(checkpoint)
        self.ctx.log(f"training goes on from the checkpoint of step {checkpoint.step}")
        before: dict[str, Any] = checkpoint.facts["environment"]
        changes = [
            f"{name} was {before.get(name)}, is {now}"
            for name, now in self.environment.items()
            if before.get(name) != now
        ]
        if changes:
            self.ctx.notice(
                f"training goes on from a checkpoint made elsewhere ({'; '.join(changes)}): "
                "the result may differ in its last bits from one without interruption"
            )
