"""Telling how a training goes, a few times a second, and stopping it where the loss is no longer a number."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from ptpipe import Context, StageError
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER, WorkerGroup
from ptpipe_train.losses import PendingLosses, StepLoss
from ptpipe_train.plan import StepPlan
from ptpipe_train.progress import Progress
from ptpipe_train.schedule import LearningRate
from ptpipe_train.step_times import Utilization

LOOK_EVERY_S = 0.25
_MAX_STEPS = 64
"""Between two looks of a workers."""


@dataclass
class Watch:
    """Keeps the figures of a training up to date. Losses are read a few times a second, for each read waits.

    Workers of a team look together: after a number of steps that rank 0 chose at the look before.
    """

    ctx: Context
    plan: StepPlan
    lr: LearningRate
    precision: str
    utilization: Utilization
    workers: WorkerGroup = SINGLE_WORKER
    look_every_s: float = LOOK_EVERY_S
    _steps_to_look: int = 1
    _pending: PendingLosses = field(default_factory=PendingLosses)
    _looked_s: float = field(default_factory=time.perf_counter)

    def step_done(self, progress: Progress, num_samples: int, loss: torch.Tensor) -> None:
        """Take notice of a step's loss, or of this worker's part of it."""
        self._pending.add(self.steps_done(progress) - 1, num_samples, loss)

    def is_time(self, wish: bool) -> bool:
        """Whether to look now; the same on every rank."""
        if self.workers.size > 1:
            return len(self._pending) >= self._steps_to_look
        return wish or time.perf_counter() - self._looked_s >= self.look_every_s

    def look(self, progress: Progress, wish: bool = False) -> bool:
        """Read the losses since the last look and tell how far it is; whether rank 0 has this wish.

        Raises StageError where a loss isn't finite.
        """
        losses, wish = self._read(wish)
        duration_s = self._lap()
        self.utilization.add(duration_s)
        if not losses:
            return wish
        num_images = sum(loss.num_samples for loss in losses)
        loss_sum = 0.0
        for loss in losses:  # one after the other: the sum must not depend on where it was interrupted
            self._refuse_not_finite(loss)
            loss_sum += loss.loss * loss.num_samples
            progress.loss_sum += loss.loss * loss.num_samples
        progress.train_s += duration_s
        progress.num_images += num_images
        self._tell(progress, loss_sum / num_images, num_images / duration_s)
        return wish

    def _read(self, wish: bool) -> tuple[list[StepLoss], bool]:
        """The steps' losses, and rank 0's wish: one message in all."""
        if self.workers.size == 1:
            return self._pending.take(), wish
        step_s = (time.perf_counter() - self._looked_s) / max(1, len(self._pending))
        steps = min(_MAX_STEPS, max(1, round(self.look_every_s / step_s)))
        agreed = [0.0, 0.0]

        def total(parts: list[float]) -> list[float]:
            *losses, agreed[0], agreed[1] = self.workers.all_reduce(
                [*parts, *((wish, steps) if self.workers.rank == 0 else (0, 0))]
            )
            return losses

        losses = self._pending.take(total)
        self._steps_to_look = round(agreed[1])
        return losses, agreed[0] > 0

    def resume(self) -> None:
        """Start the clock anew after something that is no training."""
        self._lap()
        self.utilization.restart()

    def _lap(self) -> float:
        """Seconds since the clock was started, or read, the last time."""
        now_s = time.perf_counter()
        duration_s, self._looked_s = now_s - self._looked_s, now_s
        return duration_s

    def steps_done(self, progress: Progress) -> int:
        """Steps of all epochs."""
        return progress.epoch * self.plan.steps_per_epoch + progress.step

    def not_finite(self, what: str, step: int) -> StageError:
        """The error that names where it went wrong, and what to try."""
        epoch, step_in_epoch = divmod(step, self.plan.steps_per_epoch)
        narrower = "" if self.precision == "fp32" else ", or precision fp32"
        return StageError(
            f"{what} in epoch {epoch + 1}, step {step_in_epoch + 1} of {self.plan.steps_per_epoch}, at a learning rate "
            f"of {self.lr.at(step):.3g}: try a lower lr, a warmup in the schedule, clip_grad_norm{narrower}"
        )

    def _refuse_not_finite(self, loss: StepLoss) -> None:
        if not math.isfinite(loss.loss):
            raise self.not_finite(f"the loss became {loss.loss}", loss.step)

    def _tell(self, progress: Progress, loss: float, images_per_s: float) -> None:
        steps_done = self.steps_done(progress)
        images_done = progress.epoch * self.plan.num_samples + min(
            progress.step * self.plan.window, self.plan.num_samples
        )
        self.ctx.progress(
            images_done,
            self.plan.epochs * self.plan.num_samples,
            "images",
            epoch=progress.epoch + 1,
            step=steps_done,
            loss=loss,
            lr=self.lr.at(steps_done - 1),
            images_per_s=images_per_s,
        )
