"""Learning-rate schedules as functions of the step alone, so that resuming needs no scheduler state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from ptpipe_torch import Freezing
from ptpipe_train.config import Schedule

# torch's OneCycleLR: div_factor and final_div_factor.
_ONE_CYCLE_START, _ONE_CYCLE_END = 1 / 25, 1 / 25 / 1e4
_ONE_CYCLE_RISE = 0.3


def resolve_schedule(schedule: Schedule, network: nn.Module) -> Schedule:
    """Return the schedule that `auto` stands for in a training of this network.

    After ranges and batch norm statistics are frozen, weights that still move by a constant learning rate leave them.
    """
    if schedule.name != "auto":
        return schedule
    freezes = any(isinstance(layer, Freezing) and layer.freeze_at < 1 for layer in network.modules())
    return schedule.model_copy(update={"name": "cosine" if freezes else "constant"})


@dataclass(frozen=True)
class LearningRate:
    """Learning rates of all steps of a training."""

    peak: float
    schedule: Schedule
    num_steps: int
    steps_per_epoch: int

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if self.schedule.name == "one_cycle":
            return self.peak * self._one_cycle(step)
        return self.peak * self._warmup(step) * self._decay(step)

    def maximum(self) -> float:
        """Return the maximum learning rate of any step."""
        top = int(self._warmup_steps)
        # Reached where the rise ends or, as the schedule `step` decays after an epoch, at an epoch's last step before.
        epoch_ends = range(self.steps_per_epoch - 1, top, self.steps_per_epoch)
        steps = {0, top - 1, top, top + 1, self.num_steps - 1, *epoch_ends}
        return max(self.at(step) for step in steps if 0 <= step < self.num_steps)

    def never_rises(self) -> str | None:
        """Return in words why no step comes near the peak; None where one does."""
        if self.maximum() >= 0.9 * self.peak:
            return None
        name = self.schedule.name
        what = "the warmup is too long for" if self.schedule.warmup else f"the schedule {name} needs more than"
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        return f"the learning rate never rises to {self.peak:g}: {what} {steps}"

    @property
    def _warmup_steps(self) -> float:
        warmup = self.schedule.warmup
        if warmup is None:
            warmup = _ONE_CYCLE_RISE if self.schedule.name == "one_cycle" else 0
        return warmup if isinstance(warmup, int) else warmup * self.num_steps

    def _warmup(self, step: int) -> float:
        """Linear: P. Goyal et al., Accurate, Large Minibatch SGD, arXiv 1706.02677, section 2.2."""
        steps = self._warmup_steps
        return min(1.0, (step + 1) / steps) if steps else 1.0

    def _decay(self, step: int) -> float:
        schedule = self.schedule
        if schedule.name == "step":
            gamma = 0.1 if schedule.gamma is None else schedule.gamma
            return float(gamma ** (step // self.steps_per_epoch // (schedule.every_epochs or 1)))
        if schedule.name == "cosine":
            # I. Loshchilov and F. Hutter, SGDR, arXiv 1608.03983, equation 5; it begins after the warm-up.
            begin = self._warmup_steps
            fraction = max(0.0, step - begin) / max(1.0, self.num_steps - begin)
            return _along_cosine(1.0, schedule.final or 0.0, fraction)
        return 1.0

    def _one_cycle(self, step: int) -> float:
        """L. Smith and N. Topin, Super-Convergence, arXiv 1708.07120; in the form of torch's OneCycleLR."""
        top, end = self._warmup_steps - 1, self.num_steps - 1
        if step <= top:
            return _along_cosine(_ONE_CYCLE_START, 1.0, step / max(top, 1.0))
        return _along_cosine(1.0, _ONE_CYCLE_END, (step - top) / max(end - top, 1.0))


def _along_cosine(begin: float, end: float, fraction: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * min(fraction, 1.0))) / 2
