"""Monitoring of a training: progress a few times a second, and an error where the loss is no longer finite."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ptpipe import Context, StageError
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER, WorkerGroup
from ptpipe_train.losses import PendingLosses, StepLoss
from ptpipe_train.progress import TrainingProgress
from ptpipe_train.schedule import LearningRate
from ptpipe_train.step_times import Utilization
from ptpipe_train.steps import StepPlan

POLL_EVERY_S = 0.25
_MAX_STEPS = 64
"""Between two polls of several workers."""


@dataclass
class TrainingMonitor:
    """Reads the losses a few times a second, as reading waits for the device, and reports the progress.

    Several workers poll together, after a number of steps that rank 0 chose at the previous poll: no rank acts on its
    own clock, and a step costs no message.
    """

    ctx: Context
    plan: StepPlan
    lr: LearningRate
    precision: str
    utilization: Utilization
    workers: WorkerGroup = SINGLE_WORKER
    poll_every_s: float = POLL_EVERY_S
    _steps_to_poll: int = 1
    _pending: PendingLosses = field(default_factory=PendingLosses)
    _polled_s: float = field(default_factory=time.perf_counter)

    def step_done(self, progress: TrainingProgress, num_samples: int, loss: torch.Tensor) -> None:
        """Add a step's loss, or this worker's contribution to it."""
        self._pending.add(self.steps_done(progress) - 1, num_samples, loss)

    def is_time(self, checkpoint_due: bool) -> bool:
        """Return whether to poll now; the same on every rank."""
        if self.workers.size > 1:
            return len(self._pending) >= self._steps_to_poll
        return checkpoint_due or time.perf_counter() - self._polled_s >= self.poll_every_s

    def poll(self, progress: TrainingProgress, checkpoint_due: bool = False) -> bool:
        """Read the losses since the last poll and report the progress. Return whether rank 0's checkpoint is due.

        Raise StageError where a loss isn't finite.
        """
        losses, checkpoint_due = self._read(checkpoint_due)
        duration_s = self._lap()
        self.utilization.add(duration_s)
        if not losses:
            return checkpoint_due
        num_samples = sum(loss.num_samples for loss in losses)
        loss_sum = 0.0
        for loss in losses:  # in order: the sum's last bits must not depend on when it was interrupted
            if not math.isfinite(loss.loss):
                raise self.not_finite(f"the loss became {loss.loss}", loss.step)
            loss_sum += loss.loss * loss.num_samples
            progress.loss_sum += loss.loss * loss.num_samples
        progress.train_s += duration_s
        progress.num_samples += num_samples
        self._report(progress, loss_sum / num_samples, num_samples / duration_s)
        return checkpoint_due

    def _read(self, checkpoint_due: bool) -> tuple[list[StepLoss], bool]:
        """Return the steps' losses, and rank 0's `checkpoint_due`; with several workers, in one all-reduce."""
        if self.workers.size == 1:
            return self._pending.take(), checkpoint_due
        step_s = (time.perf_counter() - self._polled_s) / max(1, len(self._pending))
        steps = min(_MAX_STEPS, max(1, round(self.poll_every_s / step_s)))
        of_rank_0 = [0.0, 0.0]

        def reduce(contributions: list[float]) -> list[float]:
            own = (checkpoint_due, steps) if self.workers.rank == 0 else (0, 0)
            *losses, of_rank_0[0], of_rank_0[1] = self.workers.all_reduce([*contributions, *own])
            return losses

        losses = self._pending.take(reduce)
        self._steps_to_poll = round(of_rank_0[1])
        return losses, of_rank_0[0] > 0

    def resume(self) -> None:
        """Restart the clock after work that is not training."""
        self._lap()
        self.utilization.restart()

    def _lap(self) -> float:
        """Return the seconds since the last call, and restart the clock."""
        now_s = time.perf_counter()
        duration_s, self._polled_s = now_s - self._polled_s, now_s
        return duration_s

    def steps_done(self, progress: TrainingProgress) -> int:
        """Return the number of completed steps of all epochs."""
        return progress.epoch * self.plan.steps_per_epoch + progress.step

    def check_figures(self, figures: Mapping[str, float], step: int) -> None:
        """Raise StageError where a figure of val isn't finite after a step: if the loss is, the metric is to blame."""
        for name, value in figures.items():
            if math.isfinite(value):
                continue
            if not math.isfinite(figures.get("loss", math.nan)):
                raise self.not_finite(f"the {name} on val became {value}", step)
            raise StageError(
                f"the metric {name} became {value} on val, where the loss is {figures['loss']:.3g}: its function is "
                "not finite for some samples, as where it divides by a target of 0"
            )

    def not_finite(self, what: str, step: int) -> StageError:
        """Return the error that names the step and possible remedies."""
        epoch, step_in_epoch = divmod(step, self.plan.steps_per_epoch)
        narrower = "" if self.precision == "fp32" else ", or precision fp32"
        return StageError(
            f"{what} in epoch {epoch + 1}, step {step_in_epoch + 1} of {self.plan.steps_per_epoch}, at a learning rate "
            f"of {self.lr.at(step):.3g}: try a lower lr, a warmup in the schedule, clip_grad_norm{narrower}"
        )

    def epoch_done(self, progress: TrainingProgress) -> None:
        """Report the metrics of the epoch that has just been finished: facts with an `epoch` and no `step`."""
        facts = {name: value for name, value in progress.history[-1].items() if isinstance(value, int | float)}
        samples_per_epoch = self.plan.samples_per_epoch
        total = self.plan.epochs * samples_per_epoch
        self.ctx.progress(progress.epoch * samples_per_epoch, total, "samples", **facts)

    def _report(self, progress: TrainingProgress, loss: float, samples_per_s: float) -> None:
        steps_done = self.steps_done(progress)
        samples_per_epoch = self.plan.samples_per_epoch
        samples_done = progress.epoch * samples_per_epoch + min(progress.step * self.plan.window, samples_per_epoch)
        self.ctx.progress(
            samples_done,
            self.plan.epochs * samples_per_epoch,
            "samples",
            epoch=progress.epoch + 1,
            step=steps_done,
            loss=loss,
            lr=self.lr.at(steps_done - 1),
            samples_per_s=samples_per_s,
        )
