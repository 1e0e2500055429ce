"""Means and standard deviations that count as the same."""

from __future__ import annotations

import pytest

from ptpipe_torch.data.meaning import have_same_statistics


@pytest.mark.parametrize(
    ("found", "is_same"),
    [((10.0, 2.0), True), ((10.09, 2.0), True), ((10.11, 2.0), False), ((10.0, 1.91), True), ((10.0, 1.89), False)],
)
def test_statistics_of_samples_of_the_same_data_are_the_same(found: tuple[float, float], is_same: bool) -> None:
    assert have_same_statistics([(0.0, 1.0), found], [(0.0, 1.0), (10.0, 2.0)]) is is_same
