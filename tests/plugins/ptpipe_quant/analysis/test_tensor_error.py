"""Noise, clipped values and the bound of rounding, against values that are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptpipe_quant.analysis.tensor_error import ErrorSums, Grid, decibels, weight_error
from ptpipe_torch.int8.layers import QuantizedWeight

GRID = Grid(torch.tensor(0.5, dtype=torch.float64), torch.tensor(10), 0, 255)
"""From -5 to 122.5."""


def result_of(values: list[float], integers: list[int]):
    sums = ErrorSums()
    sums.add(torch.tensor(values), torch.tensor(integers, dtype=torch.uint8), GRID)
    return sums.result()


def test_the_ratio_of_signal_and_noise() -> None:
    error = result_of([3.0, 4.2], [16, 18])  # 3 and 4
    assert error.sqnr_db == pytest.approx(10 * np.log10((9 + 4.2**2) / 0.2**2), abs=0.01)
    assert error.max_error_ratio == pytest.approx(0.8, abs=1e-5)
    assert (error.minimum, error.maximum) == (3.0, pytest.approx(4.2))
    assert error.clipped_fraction == 0


def test_values_beyond_the_ends_are_clipped_and_break_no_bound() -> None:
    error = result_of([-7.0, -5.2, 122.6, 130.0], [0, 0, 255, 255])
    assert error.clipped_fraction == 0.5
    assert error.max_error_ratio == pytest.approx(0.8, abs=1e-5)


def test_a_value_inside_that_is_rounded_to_another_integer_breaks_the_bound() -> None:
    assert result_of([3.0], [17]).max_error_ratio == pytest.approx(2.0, abs=1e-5)


def test_no_noise_has_no_ratio() -> None:
    assert result_of([3.0, -5.0], [16, 0]).sqnr_db is None
    assert decibels(1.0, 0.0) is None
    assert decibels(1.0, 0.1) == 10.0


def test_nothing_has_no_figures() -> None:
    assert result_of([], []) is None


@pytest.mark.parametrize("last", [127, 64])
def test_a_weight_beyond_a_learned_range_is_clipped_at_both_ends(last) -> None:
    weight = QuantizedWeight(
        np.array([[last, -last], [1, 0]], np.int8), np.ones(2, np.float32), np.zeros(2, np.int8), 0
    )
    error = weight_error(torch.tensor([[last + 3.0, -last - 2.0], [1.25, 0]]), weight)
    assert error.clipped_fraction == 0.5
    assert error.max_error_ratio == pytest.approx(0.5, abs=1e-5)


def test_a_weight_has_a_scale_for_each_channel() -> None:
    scales = np.array([1.0, 100.0], np.float32)
    weight = QuantizedWeight(np.array([[1, 127], [1, 0]], np.int8), scales, np.zeros(2, np.int8), 0)
    error = weight_error(torch.tensor([[1.25, 130.0], [110.0, 20.0]]), weight)
    assert error.clipped_fraction == 0.25
    assert error.max_error_ratio == pytest.approx(0.5, abs=1e-5)
