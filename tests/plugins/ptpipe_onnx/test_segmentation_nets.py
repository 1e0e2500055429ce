"""torchvision's segmentation networks the whole way: trained, quantized, as ONNX files, for batches of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_torch import Data, Model
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_zoo import TorchvisionConfig
from ptpipe_zoo import torchvision as torchvision_stage

from ...streets import street_data
from ...texts import quantized, trained

LIGHT = "lraspp_mobilenet_v3_large"
PATHS = [("static", "fbgemm"), ("float", "fbgemm"), ("dynamic", "fbgemm"), ("static", "qnnpack")]
PATHS += [("qat", "fbgemm"), ("qat", "qnnpack")]
CASES = [
    (name, path, backend) for name in (LIGHT, "deeplabv3_mobilenet_v3_large", "fcn_resnet50") for path, backend in PATHS
]


@pytest.fixture(scope="module")
def data() -> Data:
    return street_data()


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "path", "backend"), CASES)
def test_a_file_computes_what_torch_does_in_batches_of_any_size(
    name: str, path: str, backend: str, data: Data, tmp_path: Path
) -> None:
    if backend not in supported_engines():
        pytest.skip(f"no {backend} here")
    ctx = Context("net", "model.test", 7, tmp_path)
    model: Model = trained(torchvision_stage(TorchvisionConfig(name=name), ctx, data), data, epochs=2, lr=1e-3)
    if path != "float":
        model = quantized(model, data, ctx, backend, path)
    file = export_onnx(ExportConfig(num_samples=8), ctx, model, data)
    images_BCHW = np.random.default_rng(0).normal(size=(5, 3, 32, 48)).astype(np.float32)
    with file.with_exact_sums().predictor(1) as onnx_predict, model.predictor(1) as torch_predict:
        for size in (1, 5):
            inputs = {"images": images_BCHW[:size]}
            found, expected = onnx_predict(inputs)["logits"], torch_predict(inputs)["logits"]
            assert found.shape == (size, 3, 32, 48)
            limit = 1e-4 * np.ptp(expected)
            if path not in ("float", "dynamic"):  # a step of the logits, of which there may be but a few
                limit = max(0.1 * np.ptp(expected), 1.01 * np.diff(np.unique(expected)).max())
            assert np.abs(found - expected).max() <= limit
    shape = onnx.load(file.path).graph.input[0].type.tensor_type.shape
    assert shape.dim[0].dim_param == "batch"
    if path != "float":
        floats = sum(tensor.nbytes for tensor in model.tensors.values() if tensor.dtype == torch.float32)
        assert file.size_bytes < 0.4 * floats
