"""Histograms updated from counts against torch's own update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.observers import HistogramObserver, has_range, histogram_counts, merge_histogram, min_max_of

TENSORS = st.lists(
    st.tuples(
        st.integers(0, 2**31),
        st.integers(0, 300),
        st.floats(-5, 5),
        st.sampled_from([0.0, 0.1, 1.0, 30.0]),
        st.sampled_from([None, torch.inf, -torch.inf]),
    ),
    min_size=1,
    max_size=6,
)


@given(TENSORS)
@settings(deadline=None)
@pytest.mark.filterwarnings("ignore:torch.inf detected in input tensor")
def test_a_histogram_updated_from_counts_equals_torchs(described: list[tuple[Any, ...]]) -> None:
    """Fails when torch changes one of the steps that these functions replace."""
    tensors = []
    for seed, size, centre, width, first in described:
        x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * width + centre
        x[:1] = x[:1] if first is None else first
        tensors.append(x)
    with deprecations_silenced():
        torchs, ours = HistogramObserver(bins=64), HistogramObserver(bins=64)
        for x in tensors:
            torchs(x)
            found = min_max_of(x, ours)
            limits = torch.stack([torch.minimum(found[0], ours.min_val), torch.maximum(found[1], ours.max_val)])
            counts = histogram_counts(x, ours, limits)
            if has_range(found):
                merge_histogram(ours, limits, counts)
            for name, expected in torchs.state_dict().items():
                assert torch.equal(expected, ours.state_dict()[name]), name
