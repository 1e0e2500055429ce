"""What is stored of models that repairs changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ptpipe import Context
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_quant.repairs.adaround import adaround
from ptpipe_quant.repairs.bias_correct import bias_correct
from ptpipe_quant.repairs.config import AdaroundConfig, BiasCorrectConfig
from ptpipe_torch import Data, Model

from .conftest import logits_of


def test_conversion_drops_the_float_tensors(trained: Model, digits: Data, ctx: Context, tmp_path: Path) -> None:
    plain = calibrate(CalibrateConfig(), ctx, prepare(PrepareConfig(), ctx, trained), digits).model
    rounded = adaround(AdaroundConfig(num_samples=64, num_iterations=20), ctx, plain, digits)
    repaired = bias_correct(BiasCorrectConfig(num_samples=64), ctx, rounded, digits)
    assert len(repaired.tensors) > len(plain.tensors)
    int8, unrepaired = convert(ConvertConfig(), ctx, repaired), convert(ConvertConfig(), ctx, plain)
    assert int8.tensors.keys() == unrepaired.tensors.keys()
    for name, tensor in int8.tensors.items():
        assert torch.equal(tensor, repaired.tensors[name]), name
    int8.save(tmp_path)
    stored = Model.load(tmp_path)
    assert np.array_equal(logits_of(stored, digits, 50), logits_of(int8, digits, 50))
    images = torch.rand(2, *trained.signature.inputs[0].sample_shape)
    assert torch.equal(stored.build_prepared()(images), repaired.build_prepared()(images))
