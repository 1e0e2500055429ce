"""The steps of a training, all known before it begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptpipe_torch import epoch_order

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class StepPlan:
    """Which samples each optimizer step takes.

    An epoch's order is cut into windows of `accumulate` batches, one window a step; the last window of an epoch, and
    its last batch, hold what is left.
    """

    epochs: int
    num_samples: int
    batch_size: int
    accumulate: int
    seed: int

    @property
    def window(self) -> int:
        """Samples of a full step."""
        return self.batch_size * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps, the last one perhaps with fewer samples."""
        return -(-self.num_samples // self.window)

    @property
    def num_steps(self) -> int:
        """Optimizer steps in all epochs."""
        return self.epochs * self.steps_per_epoch

    def window_size(self, step: int) -> int:
        """Samples of that step of an epoch."""
        return min(self.window, self.num_samples - step * self.window)

    def num_batches(self, num_samples: int) -> int:
        """Batches of that many samples, the last one perhaps smaller."""
        return -(-num_samples // self.batch_size)

    def order(self, epoch: int, first_step: int) -> npt.NDArray[np.int64]:
        """Positions of the samples of an epoch, from that step of it on."""
        return epoch_order(self.num_samples, self.seed, epoch)[first_step * self.window :]
