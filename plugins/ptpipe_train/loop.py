"""The loop over the optimizer steps of an epoch.

Shape legend: N samples of an order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from ptpipe_torch import Batch, Data, Task, TrainingCallback
from ptpipe_torch.data.mixing import MixOptions
from ptpipe_train.distillation import DistillationLoss
from ptpipe_train.optimizer import parameters_of, set_lr
from ptpipe_train.parallel import Objective, ParallelStrategy
from ptpipe_train.parallel.batch_shard import batches_of
from ptpipe_train.parameters import norms_in_eval_mode
from ptpipe_train.schedule import LearningRate
from ptpipe_train.state import TrainingState
from ptpipe_train.steps import StepPlan


@dataclass(frozen=True)
class Loop:
    """Trains a state for one epoch, or for the rest of it."""

    data: Data
    plan: StepPlan
    lr: LearningRate
    strategy: ParallelStrategy
    task: Task
    clip_grad_norm: float | None
    mixing: MixOptions | None = None
    distillation: DistillationLoss | None = None

    def train_epoch(self, state: TrainingState, after_step: Callable[[int, torch.Tensor], None]) -> None:
        """Take the remaining steps of the present epoch, and call `after_step(num_samples, loss)` after each.

        A step's gradient is that of the mean loss over all samples of its window, whatever the sizes of its batches
        and the number of workers that share them. `loss` is this worker's contribution to the mean, a scalar.
        """
        plan, strategy, epoch = self.plan, self.strategy, state.progress.epoch
        callbacks = [layer for layer in state.module.modules() if isinstance(layer, TrainingCallback)]
        # Frozen ones. A layer that is fused with one (fake quantization) may set its mode in `on_progress`.
        in_eval_mode = norms_in_eval_mode(state.module)
        batches = self._batches(epoch, state.progress.step)
        for step in range(state.progress.step, plan.steps_per_epoch):
            self._begin_step(epoch * plan.steps_per_epoch + step, state, callbacks)
            for layer in in_eval_mode:
                layer.eval()
            num_samples = plan.window_size(step)
            objective = Objective(num_samples, self.task, self.distillation)
            loss = torch.zeros((), device=strategy.settings.device)
            num_batches = plan.num_batches(num_samples)
            for number, batch in enumerate(islice(batches, num_batches), start=1):
                loss += strategy.forward_backward(batch, objective, state.scaler, last=number == num_batches)
            with strategy.times.part("optimizer"):
                self._update(state)
                if state.average:
                    state.average.update(epoch * plan.steps_per_epoch + step + 1)
            strategy.times.step_done()
            state.progress.step += 1
            after_step(num_samples, loss)

    def _batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        plan, strategy = self.plan, self.strategy
        shard, settings = strategy.batch_shard, strategy.settings
        epoch_N = self.data.epoch_order("train", plan.seed, epoch, plan.batch_size)
        order_N = plan.remaining(epoch_N, first_step)
        seed = (plan.seed, epoch)
        mixing = self.mixing.draw(self.data.info, epoch_N, seed) if self.mixing else None
        shard_size = shard.size(plan.batch_size)

        def load(order_N: npt.NDArray[np.int64]) -> Iterator[Batch]:
            return self.data.batches(
                "train",
                order_N=order_N,
                batch_size=shard_size,
                augment_seed=seed,
                channels_last=settings.channels_last,
                device=settings.device,
                with_inputs=strategy.needs_inputs,
                mixing=mixing,
            )

        own = load(shard.of(order_N, plan.batch_size))
        batches = batches_of(own, plan.num_batches(len(order_N)), lambda: next(load(order_N[:1])))
        return strategy.times.waiting_for(batches)

    def _begin_step(self, step: int, state: TrainingState, callbacks: Sequence[TrainingCallback]) -> None:
        set_lr(state.optimizer, self.lr.at(step))
        state.zeros.prune(step, state)
        for callback in callbacks:
            callback.on_progress(step / self.plan.num_steps)

    def _update(self, state: TrainingState) -> None:
        state.zeros.clear_gradients()
        if self.clip_grad_norm is not None:
            state.scaler.unscale_(state.optimizer)  # the norm is that of the true gradients
            self.strategy.clip(parameters_of(state.optimizer), self.clip_grad_norm)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
