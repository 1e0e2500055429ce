"""When a checkpoint is written, and which one a training goes on from."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptpipe import Context
from ptpipe_train.checkpoint import Checkpoint, Damage, read_checkpoints, remove_checkpoint, write_checkpoint
from ptpipe_train.state import TrainingState

_EVERY_S = 15.0
_LEAST_SHARE = 100
"""Without an interval of the user's, the time between two checkpoints is this many times that of writing one."""


@dataclass
class Saving:
    """Checkpoints of one stage. `work` stands for all that decides its result, `environment` for its last bits."""

    ctx: Context
    every_s: float | None
    work: str
    environment: dict[str, str]
    _written_s: float = field(default_factory=time.perf_counter)
    _cost_s: float = 0.0
    _has_failed: bool = False

    @property
    def folder(self) -> Path:
        """Where the checkpoints are."""
        return self.ctx.scratch / "checkpoints"

    @property
    def is_due(self) -> bool:
        """Whether it is time for one."""
        interval_s = self.every_s if self.every_s is not None else max(_EVERY_S, _LEAST_SHARE * self._cost_s)
        return time.perf_counter() - self._written_s >= interval_s

    def write(self, state: TrainingState, step: int) -> None:
        """Write one. Where that fails the training goes on without, and says so."""
        begin_s = time.perf_counter()
        try:
            write_checkpoint(self.folder, state.checkpoint(step, {"work": self.work, "environment": self.environment}))
        except OSError as error:
            if not self._has_failed:
                self.ctx.notice(f"no checkpoint could be written ({error}); if it is killed now, training begins anew")
            self._has_failed = True
        self._written_s = time.perf_counter()
        self._cost_s = self._written_s - begin_s

    def restore_newest(self, state: TrainingState) -> bool:
        """Bring the state to the newest sound checkpoint of this work; False where there is none."""
        for found in read_checkpoints(self.folder):
            if isinstance(found, Damage):
                self.ctx.notice(f"checkpoint {found.name} is damaged ({found.reason}) and was left out")
                remove_checkpoint(self.folder, found.name)
            elif found.facts["work"] == self.work:
                self._restore(state, found)
                return True
        return False

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
