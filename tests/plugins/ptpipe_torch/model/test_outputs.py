"""Outputs of networks for which no data set says what they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptpipe import StageError
from ptpipe_torch import Signature, TensorSpec
from ptpipe_torch.model.outputs import specs_of, with_outputs


def rows(num: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(num, *shape, dtype=dtype)


def specs(make: Any) -> list[str]:
    return [str(spec) for spec in specs_of([make(2), make(1)], (2, 1))]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda num: rows(num, 3), ["output (batch, 3) float32"]),
        (lambda num: rows(num), ["output (batch) float32"]),
        (
            lambda num: (rows(num, 4, 5), rows(num, 2, dtype=torch.int64)),
            ["output_0 (batch, 4, 5) float32", "output_1 (batch, 2) int64"],
        ),
        (lambda num: {"aux": rows(num, 1), "out": rows(num, 7)}, ["aux (batch, 1) float32", "out (batch, 7) float32"]),
    ],
)
def test_names_and_shapes(make, expected) -> None:
    assert specs(make) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda num: rows(5, 3), r"returns output of shape \(5, 3\) for 2 and \(5, 3\) for 1 samples; it needs a row"),
        (lambda num: rows(num, num), r"returns output of shape \(2, 2\) for 2 and \(1, 1\) for 1"),
        (lambda num: {"a": rows(num)} if num == 2 else {"b": rows(num)}, r"a of shape \(2,\) for 2 and None for 1"),
        (lambda num: rows(num, 3, dtype=torch.float16), "returns output as float16; outputs are float32, float64"),
        (
            lambda num: [rows(num), [rows(num)]],
            r"returns a list of 2 values \(Tensor, list\); it must return a tensor, several",
        ),
        (lambda num: {"a b": rows(num)}, "returns a dict of a b; it must return"),
        (lambda num: {1: rows(num)}, "returns a dict of 1; it must return"),
        (lambda num: None, "returns a NoneType; it must return"),
        (lambda num: (), "returns a tuple of 0 values; it must return"),
    ],
)
def test_anything_else_is_refused(make, message) -> None:
    with pytest.raises(StageError, match=message):
        specs(make)


def test_an_output_is_not_called_as_an_input() -> None:
    spec = TensorSpec("x", "float32", ("batch", 3))
    with pytest.raises(StageError, match="an input and an output are both called x"):
        with_outputs(Signature((spec,), ()), (spec,))
