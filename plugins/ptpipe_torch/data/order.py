"""The order of samples in an epoch, a function of seed and epoch alone, whatever process asks for it.

Shape legend: N samples of a split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_POOL_BATCHES = 100
"""Batches of similar lengths are made of this many batches of random samples: each epoch has others."""


def epoch_order(num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of `num_samples` samples in an epoch, which `seed` and `epoch` decide: int64 of shape (N,)."""
    import numpy as np

    return np.random.default_rng((seed, epoch)).permutation(num_samples)


def block_order(blocks_N: npt.NDArray[np.int64], window: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return an epoch's order that reads blocks of samples (files) one after the other, as far as it can.

    The blocks come in random order, and samples are shuffled within a window that moves over them: none moves further
    than `window` positions. A window of all samples is `epoch_order`.

    `blocks_N`: the number of the block that each sample lies in.
    """
    import numpy as np

    if window >= len(blocks_N):
        return epoch_order(len(blocks_N), seed, epoch)
    rng = np.random.default_rng((seed, epoch))
    _, blocks_N = np.unique(blocks_N, return_inverse=True)
    block_ranks = rng.permutation(blocks_N.max(initial=0) + 1)
    in_blocks_N = np.argsort(block_ranks[blocks_N], kind="stable")
    # As a shuffle buffer does, which gives out any of the samples in it and takes in the next one.
    moved_N = np.arange(len(blocks_N)) + rng.uniform(0, window, len(blocks_N))
    return in_blocks_N[np.argsort(moved_N, kind="stable")]


def batched_by_length(
    order_N: npt.NDArray[np.int64], lengths_N: npt.NDArray[np.int64], batch_size: int, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Return an epoch's order rearranged so that the samples of a batch have similar lengths.

    `lengths_N`: of the samples, by position. A last batch that is not full stays as it is, and last.
    """
    import numpy as np

    num_full = len(order_N) // batch_size
    full_N, rest = order_N[: num_full * batch_size], order_N[num_full * batch_size :]
    pool_size = _POOL_BATCHES * batch_size
    pools = [full_N[start : start + pool_size] for start in range(0, len(full_N), pool_size)]
    # Stable, so that samples of one length stay in random order.
    batches = [pool[np.argsort(lengths_N[pool], kind="stable")].reshape(-1, batch_size) for pool in pools]
    shuffled = np.random.default_rng((seed, epoch, batch_size)).permutation(num_full)
    return np.concatenate([*(np.concatenate(batches)[shuffled] if batches else []), rest])
