"""The order of an epoch.

Shape legend: N samples.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ptpipe_torch.data.order import batched_by_length, block_order, epoch_order


@given(st.integers(0, 700), st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
def test_batches_by_length_have_every_sample_once(num: int, batch_size: int, seed: int, epoch: int) -> None:
    order_N, lengths_N = epoch_order(num, seed, epoch), np.random.default_rng(num).integers(1, 50, num)
    rearranged_N = batched_by_length(order_N, lengths_N, batch_size, seed, epoch)
    assert sorted(rearranged_N) == list(range(num))
    assert np.array_equal(rearranged_N, batched_by_length(order_N, lengths_N, batch_size, seed, epoch))
    num_full = num // batch_size * batch_size
    assert np.array_equal(rearranged_N[num_full:], order_N[num_full:])


def test_they_need_little_padding_and_come_in_random_order() -> None:
    lengths_N = np.random.default_rng(0).integers(1, 200, 4096)

    def padded(order_N: np.ndarray) -> int:
        return int((lengths_N[order_N].reshape(-1, 32).max(axis=1) * 32).sum())

    first_N, second_N = (batched_by_length(epoch_order(4096, 1, e), lengths_N, 32, 1, e) for e in (0, 1))
    assert padded(first_N) < 1.05 * lengths_N.sum() < 0.6 * padded(epoch_order(4096, 1, 0))
    batches = [{frozenset(batch) for batch in order_N.reshape(-1, 32).tolist()} for order_N in (first_N, second_N)]
    assert not batches[0] & batches[1]
    maxima = lengths_N[first_N].reshape(-1, 32).max(axis=1)
    assert abs(np.corrcoef(np.arange(len(maxima)), maxima)[0, 1]) < 0.3


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 300), st.integers(0, 3), st.integers(0, 3))
def test_block_order_has_every_sample_once(sizes: list[int], window: int, seed: int, epoch: int) -> None:
    blocks_N = np.repeat(np.arange(len(sizes)) * 3, sizes)
    order_N = block_order(blocks_N, window, seed, epoch)
    assert sorted(order_N) == list(range(len(blocks_N)))
    assert np.array_equal(order_N, block_order(blocks_N, window, seed, epoch))
    if window >= len(blocks_N):
        assert np.array_equal(order_N, epoch_order(len(blocks_N), seed, epoch))


def test_a_window_moves_over_the_blocks() -> None:
    blocks_N = np.repeat(np.arange(40), 250)
    in_blocks, shuffled = (block_order(blocks_N, window, 1, 0) for window in (1, 1000))
    read = blocks_N[in_blocks]
    assert np.count_nonzero(np.diff(read)) == 39 and not np.array_equal(np.unique(read), read[::250])
    places_N = np.argsort(in_blocks)
    moves_N = np.abs(np.argsort(shuffled) - places_N)
    assert moves_N.max() < 1000 and np.median(moves_N) > 200
    assert len(np.unique(blocks_N[shuffled][5000:5128])) > 3, "a batch has samples of several blocks"
    assert not np.array_equal(shuffled, block_order(blocks_N, 1000, 1, 1))
