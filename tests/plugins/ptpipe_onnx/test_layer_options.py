"""Files of models whose layers have options of their own: the scales are those that each layer is to have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from ptpipe import Context
from ptpipe_quant import stages
from ptpipe_quant.config import CalibrateConfig, PrepareConfig, PrepareQatConfig
from ptpipe_torch import Data, Model, OnnxFile
from ptpipe_torch.int8.engine import quantized_engine

WEIGHTS = {"2.*": {"weights": "per_tensor"}, "Linear": {"weights": "per_channel"}}
NUM_SCALES = {"0.0": 8, "2.0": 1, "5": 32, "7": 10}


def int8(model: Model, data: Data, ctx: Context, backend: str, *, is_qat: bool) -> Model:
    if is_qat:
        prepared = stages.prepare_qat(PrepareQatConfig(backend=backend, layers=WEIGHTS), ctx, model)
    else:
        layers = {**WEIGHTS, "0.*": {"observer": "min_max"}}
        prepared = stages.prepare(PrepareConfig(backend=backend, layers=layers), ctx, model)
    return stages.convert(ctx, stages.calibrate(CalibrateConfig(num_samples=64), ctx, prepared, data)[0])


def scales_of(layer: torch.nn.Module) -> np.ndarray:
    weight = layer.weight()
    is_per_channel = weight.qscheme() == torch.per_channel_affine
    return np.atleast_1d(weight.q_per_channel_scales().numpy() if is_per_channel else np.float32(weight.q_scale()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("is_qat", [False, True])
def test_a_file_has_the_scales_of_each_layer(
    backend: str,
    is_qat: bool,
    float_model: Callable[[str], Model],
    digits: Data,
    tmp_path: Path,
    run_export: Callable[..., OnnxFile],
) -> None:
    model = int8(float_model("cnn"), digits, Context("int8", "quant", 7, tmp_path), backend, is_qat=is_qat)
    with quantized_engine(backend):
        network = model.build()
    graph = onnx.load(run_export(model).path).graph
    arrays = {array.name: numpy_helper.to_array(array) for array in graph.initializer}
    in_file = [arrays[node.input[1]] for node in graph.node if arrays.get(node.input[0], np.zeros(0)).dtype == np.int8]
    assert sorted(array.size for array in in_file) == sorted(NUM_SCALES.values())
    for name, num_scales in NUM_SCALES.items():
        expected = scales_of(network.get_submodule(name)).astype(np.float32)
        assert expected.size == num_scales
        assert any(array.size == num_scales and np.array_equal(array.ravel(), expected) for array in in_file), name
