"""Exact counts of values: against NumPy's, for any order, batches, layout and split among workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ptpipe_torch.int8 import value_counts
from ptpipe_torch.int8.value_counts import MAX_INDEX, CountingObserver, has_range, min_max_of


def state_after(*batches: torch.Tensor) -> dict[str, torch.Tensor]:
    observer = CountingObserver()
    for batch in batches:
        assert observer(batch) is batch
    return observer.state_dict()


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    different = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not different


def expected_counts(x: torch.Tensor, exponent: int) -> np.ndarray:
    indices = np.trunc(x.double().numpy().ravel() * 2.0**-exponent).astype(np.int64)
    return np.bincount(indices + MAX_INDEX, minlength=2 * MAX_INDEX + 1)


VALUES = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)
    | st.sampled_from([0.0, -0.0, 1.0, -1.0, 6.0, 2.0**-149, -(2.0**-126), 2.0**127]),
    min_size=1,
    max_size=40,
)


@given(VALUES, st.randoms(use_true_random=False), st.integers(1, 7))
@example([0.0], None, 1)
@example([2.0**-149, 2.0**127, -(2.0**127)], None, 1)
@settings(deadline=None)
def test_counts_are_exact_in_any_order_and_any_batches(values: list[float], random, size: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    expected = state_after(x)
    exponent = int(expected["exponent"])
    assert np.array_equal(expected["counts_C"].numpy(), expected_counts(x, exponent))
    assert expected["num_zeros"] == (x == 0).sum()
    assert (expected["min_val"], expected["max_val"]) == (x.min(), x.max())
    if random is not None:
        random.shuffle(values)
    assert_equal(expected, state_after(*torch.tensor(values, dtype=torch.float32).split(size)))


def test_a_range_that_grows_and_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(30_000, generator=generator) * torch.rand(30_000, generator=generator).reciprocal()
    expected = state_after(x)
    assert np.array_equal(expected["counts_C"].numpy(), expected_counts(x, int(expected["exponent"])))
    assert expected["counts_C"].sum() == len(x)
    widest = expected["counts_C"].nonzero().squeeze() - MAX_INDEX
    assert MAX_INDEX // 2 <= widest.abs().max() <= MAX_INDEX  # no resolution is lost
    ascending = x[x.abs().argsort()]
    assert_equal(expected, state_after(*ascending.split(1_000)))
    assert_equal(expected, state_after(*ascending.flip(0).split(777)))
    monkeypatch.setattr(value_counts, "_PART_SIZE", 999)
    assert_equal(expected, state_after(x))


def test_the_order_in_memory_does_not_matter() -> None:
    images_NCHW = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(7)).relu()
    expected = state_after(images_NCHW)
    assert expected["counts_C"].sum() == images_NCHW.numel()
    for images in (
        images_NCHW.contiguous(memory_format=torch.channels_last),
        images_NCHW.mT.mT.clone(),
        images_NCHW.double(),
    ):
        assert_equal(expected, state_after(images))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_at_one_of_three_positions_all_channels_count_three_times(memory_format: torch.memory_format) -> None:
    x = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(7)).relu()
    x[0, 0, 0, 0], x[1, 2, 4, 2] = -9, 9  # neither is counted
    observer, expected = CountingObserver(), CountingObserver()
    limits = observer.observe(x.to(memory_format=memory_format), 3)
    assert limits.tolist() == [-9, 9]
    expected.extend(limits)
    expected.observe(x.reshape(2, 3, 20)[:, :, [1, 4, 7, 10, 13, 16, 19]])
    assert observer.counts_C.equal(3 * expected.counts_C)
    assert observer.num_zeros == 3 * expected.num_zeros > 0


def test_workers_add_their_counts() -> None:
    generator = torch.Generator().manual_seed(7)
    parts = [torch.randn(500, generator=generator) * width for width in (1.0, 90.0, 0.01)]
    total = CountingObserver()
    observers = [CountingObserver() for _ in parts]
    for observer, part in zip(observers, parts, strict=True):
        observer(part)
    for observer in (*observers, total):
        observer.extend(min_max_of(torch.cat(parts)))
    for observer in observers:
        total.add(observer.num_zeros, observer.counts_C)
    assert_equal(state_after(*parts), total.state_dict())


@pytest.mark.parametrize("values", [[], [float("nan"), 1.0], [float("inf"), 1.0], [-float("inf"), 1.0]])
def test_without_finite_values_nothing_is_counted(values: list[float]) -> None:
    observer = CountingObserver(quant_min=0, quant_max=255)
    limits = observer.observe(torch.tensor(values))
    observer(torch.tensor([1.0, 2.0]))
    assert has_range(limits) == bool(values)
    found = torch.stack([observer.min_val, observer.max_val])
    assert bool(found.isfinite().all()) == (not values)  # what is not finite stays in the range
    assert observer.counts_C.sum() == (0 if values else 2)


def test_the_histogram_ends_at_the_range_and_has_no_zeros() -> None:
    observer = CountingObserver()
    observer(torch.tensor([0.0, 0.0, 1e-6, -0.3, 6.0, 6.0]))
    histogram = observer.histogram()
    assert histogram.counts_C.sum() == 4
    assert (histogram.edges_E[0], histogram.edges_E[-1]) == (pytest.approx(-0.3), 6.0)
    last = int(histogram.counts_C.nonzero().max())
    assert histogram.counts_C[last] == 2
    assert histogram.edges_E[last] == histogram.edges_E[last + 1] == 6.0  # equal values at the end have no width
