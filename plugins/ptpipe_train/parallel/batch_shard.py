"""Shards of batches: which samples of each batch a worker takes, and padding where they don't come out even.

Shape legend: N samples of an order, B of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ptpipe_torch import Batch


@dataclass(frozen=True)
class BatchShard:
    """Every `num`-th sample of each batch, starting at sample `rank`: torch's DistributedSampler, batch by batch.

    The shards of all ranks together are the batch, whatever its size; no sample is dropped or duplicated.
    """

    rank: int = 0
    num: int = 1

    def size(self, batch_size: int) -> int:
        """Return the number of this shard's samples in a batch of that size."""
        return len(range(self.rank, batch_size, self.num))

    def of(self, order_N: npt.NDArray[np.int64], batch_size: int) -> npt.NDArray[np.int64]:
        """Select this shard of an order of samples that is divided into batches of that size (the last may be smaller).

        Returns int64 positions, batch after batch.
        """
        if self.num == 1:
            return order_N
        position_N = np.arange(len(order_N)) % batch_size
        shard_N: npt.NDArray[np.int64] = order_N[position_N % self.num == self.rank]
        return shard_N


def padded(batch: Batch, size: int) -> Batch:
    """Return the batch with tensors of that many rows: its last sample is repeated, which no loss counts.

    Repeating a sample, rather than adding zeros, keeps the range of values that observers see.
    """
    num = len(batch)
    return batch if num == size else batch.take(torch.arange(size).clamp(max=num - 1), num)


def padding_batch(batch: Batch) -> Batch:
    """Return a batch of no sample, whose tensors have two rows: for a worker whose shard of a batch is empty.

    Two, because batch norm can't normalize a single value per channel.
    """
    return batch.take(torch.zeros(2, dtype=torch.int64), 0)


def batches_of(batches: Iterator[Batch], num_batches: int, any_batch: Callable[[], Batch]) -> Iterator[Batch]:
    """Yield exactly `num_batches` batches, as all workers must; padding batches where this worker's have ended.

    `any_batch` loads a batch of the same kind, from which a padding batch is made.
    """
    for _ in range(num_batches):
        batch = next(batches, None)
        yield padding_batch(any_batch()) if batch is None else batch
