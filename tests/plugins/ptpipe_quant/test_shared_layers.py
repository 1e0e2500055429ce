"""Weights that a layer and a function share stay one parameter, which both read in int8 too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    PrepareConfig,
    PrepareQatConfig,
    calibrate,
    convert,
    prepare,
    prepare_qat,
)
from ptpipe_torch import Data, builder

from .conftest import BACKENDS, NUM_CLASSES, logits_of, make_model, train


class Tied(nn.Module):
    """A decoder with the weights of its encoder; `is_same`: as a second call, else transposed."""

    def __init__(self, *, is_same: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 64)
        self.bias = nn.Parameter(torch.zeros(64))
        self.head = nn.Linear(64, NUM_CLASSES)
        self.is_same = is_same

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.encoder(x.flatten(1)))
        weight, bias = self.encoder.weight, self.bias
        decoded = F.linear(hidden, weight, self.encoder.bias) if self.is_same else F.linear(hidden, weight.t(), bias)
        out: torch.Tensor = self.head(F.relu(decoded))
        return out


@builder
def tied(*, is_same: bool) -> nn.Module:
    return Tied(is_same=is_same)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_function_reads_the_float_weight_of_an_int8_layer(ctx: Context, digits: Data, metrics: Any, is_same) -> None:
    model = make_model(tied, is_same=is_same)
    prepared = prepare(PrepareConfig(backend=BACKENDS[0]), ctx, model)
    int8 = convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(num_samples=64), ctx, prepared, digits).model)
    assert metrics()["int8_layers"] == 2
    expected, found = (logits_of(each, digits, 64) for each in (model, int8))
    assert np.square(found - expected).mean() < 0.01 * np.square(expected).mean()


def test_training_one_trains_the_other(ctx: Context, digits: Data, metrics: Any) -> None:
    prepared = prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, make_model(tied, is_same=False))
    trained = train(prepared, digits, lr=1e-3)
    weight = trained.tensors["encoder.weight"]
    assert not torch.equal(weight, prepared.tensors["encoder.weight"])
    assert torch.equal(weight, trained.tensors["encoder_read2.weight"])
    export_onnx(ExportConfig(), ctx, convert(ConvertConfig(), ctx, trained), digits)
    assert metrics()["int8_layers"] == 2
