"""The optimizer steps of a training: which samples each one takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptpipe_train.config_parallel import PIPELINED, Parallel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class StepPlan:
    """Assignment of samples to optimizer steps, known before the training begins.

    An epoch's order is divided into windows of `accumulate` batches, one window a step; the last window of an epoch
    and, without `drop_last`, its last batch may be smaller.
    """

    epochs: int
    num_samples: int
    """Samples of the train split."""
    batch_size: int
    """Summed over all workers."""
    accumulate: int
    seed: int
    drop_last: bool = False
    """Leave out the last samples of an epoch's order that don't fill a batch."""

    @property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch takes."""
        return self.num_samples - (self.num_samples % self.batch_size if self.drop_last else 0)

    @property
    def window(self) -> int:
        """Samples of a full step."""
        return self.batch_size * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, including a smaller last one."""
        return -(-self.samples_per_epoch // self.window)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return self.epochs * self.steps_per_epoch

    def window_size(self, step: int) -> int:
        """Return the number of samples of that step of an epoch."""
        return min(self.window, self.samples_per_epoch - step * self.window)

    def num_batches(self, num_samples: int) -> int:
        """Return the number of batches of that many samples, including a smaller last one."""
        return -(-num_samples // self.batch_size)

    def remaining(self, order_N: npt.NDArray[np.int64], first_step: int) -> npt.NDArray[np.int64]:
        """Return the samples that are left of an epoch's order, from that step of the epoch on."""
        return order_N[first_step * self.window : self.samples_per_epoch]

    def pass_sizes(self, parallel: Parallel) -> set[int]:
        """Return the numbers of samples that the forward passes of an epoch have, on all workers."""
        shards, microbatch = parallel.degrees.batch_shards, max(1, self.batch_size // parallel.passes_per_batch)
        last = self.samples_per_epoch % self.batch_size
        batches = {last, self.batch_size} if self.samples_per_epoch >= self.batch_size else {last}
        sizes = {len(range(rank, batch, shards)) for batch in batches for rank in range(min(shards, batch))}
        if parallel.mode not in PIPELINED:
            return sizes
        return {min(size, microbatch) for size in sizes} | {size % microbatch for size in sizes} - {0}
