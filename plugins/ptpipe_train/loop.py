"""The loop over the optimizer steps of an epoch.

Shape legend: N images of a batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from ptpipe_torch import Batch, Data, TrainingCallback
from ptpipe_train.optimizer import parameters_of
from ptpipe_train.parallel import Objective, Way
from ptpipe_train.parallel.share import batches_of, without_images
from ptpipe_train.plan import StepPlan
from ptpipe_train.schedule import LearningRate
from ptpipe_train.state import TrainingState


@dataclass(frozen=True)
class Loop:
    """Trains a state by one epoch, or by what is left of it."""

    data: Data
    plan: StepPlan
    lr: LearningRate
    way: Way
    label_smoothing: float
    clip_grad_norm: float | None

    def train_epoch(self, state: TrainingState, after_step: Callable[[int, torch.Tensor], None]) -> None:
        """Do the remaining steps of the present epoch; `after_step(num_samples, loss)` is told of each.

        A step's gradient is that of the mean loss over all samples of its window, whatever the sizes of the batches
        and the number of workers that share them. The loss that is told is this worker's part of it.
        """
        plan, epoch = self.plan, state.progress.epoch
        listeners = [layer for layer in state.module.modules() if isinstance(layer, TrainingCallback)]
        batches = self._batches(epoch, state.progress.step)
        for step in range(state.progress.step, plan.steps_per_epoch):
            self._begin_step(epoch * plan.steps_per_epoch + step, state.optimizer, listeners)
            num_samples = plan.window_size(step)
            objective = Objective(num_samples, self.label_smoothing)
            loss = torch.zeros((), device=self.way.settings.device)
            num_batches = plan.num_batches(num_samples)
            for number, batch in enumerate(islice(batches, num_batches), start=1):
                loss += self.way.forward_backward(batch, objective, state.scaler, last=number == num_batches)
            with self.way.times.part("optimizer"):
                self._update(state)
            self.way.times.step_done()
            state.progress.step += 1
            after_step(num_samples, loss)

    def _batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        order_N, batch_size, share = self.plan.order(epoch, first_step), self.plan.batch_size, self.way.share
        device = self.way.settings.device

        def load(order_N: npt.NDArray[np.int64]) -> Iterator[Batch]:
            if not self.way.needs_images:
                return without_images(self.data.splits["train"], order_N, share.size(batch_size), device)
            return self.data.batches(
                "train",
                order_N=order_N,
                batch_size=share.size(batch_size),
                augment_seed=(self.plan.seed, epoch),
                channels_last=self.way.settings.channels_last,
                device=device,
            )

        num_batches = self.plan.num_batches(len(order_N))
        batches = batches_of(load(share.of(order_N, batch_size)), num_batches, lambda: next(load(order_N[:1])))
        return self.way.times.waiting_for(batches)

    def _begin_step(self, step: int, optimizer: torch.optim.Optimizer, listeners: list[TrainingCallback]) -> None:
        lr = self.lr.at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        for listener in listeners:
            listener.on_progress(step / self.plan.num_steps)

    def _update(self, state: TrainingState) -> None:
        if self.clip_grad_norm is not None:
            state.scaler.unscale_(state.optimizer)
            self.way.clip(parameters_of(state.optimizer), self.clip_grad_norm)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
