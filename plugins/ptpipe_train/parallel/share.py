"""Which samples of each batch a worker takes.

Shape legend: N samples of an order, B of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ptpipe_torch import Batch, Split

IGNORED = -100
"""The label of a sample that only fills a batch: cross-entropy leaves it out (torch's `ignore_index`)."""


@dataclass(frozen=True)
class Share:
    """Every `num`-th sample of each batch, from the `rank`-th on: torch's DistributedSampler, batch by batch.

    All shares together are the batch, whatever its size; no sample is dropped or taken twice.
    """

    rank: int = 0
    num: int = 1

    def size(self, batch_size: int) -> int:
        """Samples of a batch of that size."""
        return len(range(self.rank, batch_size, self.num))

    def of(self, order_N: npt.NDArray[np.int64], batch_size: int) -> npt.NDArray[np.int64]:
        """Take one share of an order that is cut into batches of that size, the last one perhaps smaller."""
        if self.num == 1:
            return order_N
        position_N = np.arange(len(order_N)) % batch_size
        share_N: npt.NDArray[np.int64] = order_N[position_N % self.num == self.rank]
        return share_N


def without_images(
    split: Split, order_N: npt.NDArray[np.int64], batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """What `Data.batches` yields, but for the images: there are none in it, and none is read."""
    for start in range(0, len(order_N), batch_size):
        indices_B = order_N[start : start + batch_size]
        labels_B = torch.from_numpy(split.labels_N[indices_B]).to(device, non_blocking=True)
        no_images = torch.empty((len(indices_B), 0, 0, 0), device=device)
        yield Batch(no_images, labels_B, torch.from_numpy(indices_B))


def filled(batch: Batch, size: int) -> Batch:
    """The batch with its last sample repeated up to that size; those repeated are `IGNORED`.

    So a part of the batch has the range of what counts in it.
    """
    num = len(batch.labels_N)
    if num == size:
        return batch
    positions_B = torch.arange(size).clamp(max=num - 1)
    labels_B = batch.labels_N[positions_B.to(batch.labels_N.device)].clone()
    labels_B[num:] = IGNORED
    images = batch.images_NCHW
    layout = torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    images_NCHW = images[positions_B.to(images.device)].contiguous(memory_format=layout)
    return replace(batch, images_NCHW=images_NCHW, labels_N=labels_B, indices_N=batch.indices_N[positions_B])


def idle(batch: Batch) -> Batch:
    """Two samples of the batch, both `IGNORED`: for a worker that has no share of an epoch's last, tiny batch."""
    pair = replace(batch, images_NCHW=batch.images_NCHW[:1], labels_N=batch.labels_N[:1], indices_N=batch.indices_N[:1])
    pair = filled(pair, 2)
    return replace(pair, labels_N=torch.full_like(pair.labels_N, IGNORED))


def is_idle(batch: Batch) -> bool:
    """Whether none of the samples counts."""
    return len(batch.labels_N) == 2 and bool((batch.labels_N == IGNORED).all())


def batches_of(batches: Iterator[Batch], num_batches: int, any_batch: Callable[[], Batch]) -> Iterator[Batch]:
    """As many batches as all workers have, an idle one at the end where this one's share is empty.

    `any_batch` gives a batch of the same kind, to make the idle one of.
    """
    for _ in range(num_batches):
        batch = next(batches, None)
        yield idle(any_batch()) if batch is None else batch
