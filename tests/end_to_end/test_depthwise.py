"""A depthwise convolution at the largest integers, from quant.prepare to the ONNX file.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_torch import ArrayColumn, Data, FunctionRef, Model, Recipe, builder
from ptpipe_torch.int8.engine import supported_engines

from ..datasets import image_info, image_split
from ..signatures import classifier, logits_from


@builder
def depthwise_net(*, channels: int) -> nn.Module:
    """Spread an image over the channels, filter them, add all pixels up to ten logits."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 1),
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        nn.Flatten(),
        nn.Linear(channels * 64, 10),
    )


def model_with_largest_weights(channels: int) -> Model:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        net: Any = depthwise_net(channels=channels)
        nn.init.ones_(net[0].weight)
        nn.init.zeros_(net[0].bias)
        nn.init.ones_(net[1].weight)[::2] = -1
        return Model.from_module(
            Recipe(FunctionRef.to(depthwise_net, channels=channels), classifier((1, 8, 8), 10)), net
        )


def black_and_white_images() -> Data:
    pixels_NHWC = np.random.default_rng(7).integers(0, 2, (64, 8, 8, 1)).astype(np.uint8) * 255
    pixels_NHWC[:8] = 255
    splits = {
        name: image_split(
            np.array([f"{name}/{index}" for index in range(64)]), np.zeros(64, np.int64), ArrayColumn(pixels_NHWC)
        )
        for name in ("calibration", "test")
    }
    info = image_info("extreme", tuple("0123456789"), (1, 8, 8), (0.0,), (1.0,))
    return Data(info, splits)


@pytest.mark.parametrize(
    ("backend", "channels"),
    [pair for pair in (("fbgemm", 8), ("x86", 128), ("qnnpack", 8)) if pair[0] in supported_engines()],
)
def test_float_int8_and_the_file_agree(tmp_path: Path, backend: str, channels: int) -> None:
    model, data = model_with_largest_weights(channels), black_and_white_images()
    ctx = Context(stage_id="int8", kind="quant.test", seed=7, scratch=tmp_path, _tell=lambda _: None)
    prepared = prepare(PrepareConfig(backend=backend, weights="per_channel"), ctx, model)
    calibrated, _ = calibrate(CalibrateConfig(), ctx, prepared, data)
    int8 = convert(ConvertConfig(), ctx, calibrated)
    (batch,) = data.batches("calibration", batch_size=64)
    images_NCHW = batch.inputs["images"].numpy()
    with model.predictor(1) as predict:
        float_NK = logits_from(predict, images_NCHW)
    with int8.predictor(1) as predict:
        int8_NK = logits_from(predict, images_NCHW)
    assert np.abs(int8_NK - float_NK).max() < 0.1 * float_NK.std()  # 2 * float_NK.std() where a kernel saturates

    file = export_onnx(ExportConfig(), ctx, int8, data)
    with file.with_exact_sums().predictor(1) as predict:
        assert np.abs(logits_from(predict, images_NCHW) - int8_NK).max() < 0.05 * float_NK.std()
    arrays = [numpy_helper.to_array(tensor) for tensor in onnx.load(file.path).graph.initializer]
    (weights,) = (array for array in arrays if array.shape == (channels, 1, 3, 3))
    assert weights.dtype == np.int8
    assert np.abs(weights.astype(int)).max() == (127 if backend == "qnnpack" else 64)
