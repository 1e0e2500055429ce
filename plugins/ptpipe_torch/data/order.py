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
    """Return the order of samples in one epoch, a function of (seed, epoch) alone: int64 of shape (N,)."""
    import numpy as np

    return np.random.default_rng((seed, epoch)).permutation(num_samples)


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
