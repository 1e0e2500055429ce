"""The oracle of the fuzzer (in no mirror: it crosses plugins): small faults, planted one at a time, are all seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from ptpipe.testing import Bench
from ptpipe_onnx import export_onnx
from ptpipe_quant import calibrate, convert, prepare
from ptpipe_torch import Model
from ptpipe_torch.int8.engine import quantized_engine

from . import oracle
from .networks import Network
from .onnx_unrounded import unrounded_logits

pytestmark = [pytest.mark.plugins, pytest.mark.slow]

NETWORK = Network((2, 8, 8), 4, (("unit", 1, 0), ("residual", 0, 0), ("pool", 0, 0), ("unit", 1, 0)), neck=5, seed=1)
NUM_LAYERS = 5


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A right network: float logits, int8 model, ONNX file, and what the oracle expects of it."""
    bench, data = Bench(tmp_path_factory.mktemp("bench")), NETWORK.data()
    model = NETWORK.model()
    prepared = bench.run(prepare, {"observer": "min_max"}, model=model)
    calibrated = bench.run(calibrate, {}, model=prepared, data=data).model
    int8: Model = bench.run(convert, {}, model=calibrated)
    (batch,) = data.batches("calibration", batch_size=24)
    images_NCHW = batch.inputs["images"].contiguous()
    float_NK = oracle.run(model.build(), images_NCHW)
    expected_NK = oracle.check_int8(int8, images_NCHW, float_NK, saturates=False)
    path = bench.run(export_onnx, {}, model=int8, data=data).path
    return SimpleNamespace(images_NCHW=images_NCHW, float_NK=float_NK, int8=int8, expected_NK=expected_NK, path=path)


def change(model: onnx.ModelProto, name: str, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(edit(array).astype(array.dtype), name))


def without_first_channel(weight: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(weight[:1]), weight[1:]])


def extremes_swapped(scales: np.ndarray) -> np.ndarray:
    swapped, places = scales.copy(), [scales.argmin(), scales.argmax()]
    swapped[places] = scales[places[::-1]]
    return swapped


PLANTED: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "a bias is zero": (".bias.int32", np.zeros_like),
    "a channel of the weights is zero": (".weight", without_first_channel),
    "all channels have one scale": (".weight.scale", lambda x: np.full_like(x, x.max())),
    "two scales are swapped": (".weight.scale", extremes_swapped),
    "scales are 2 % larger": (".weight.scale", lambda x: x * 1.02),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_a_file_is_seen(fault: str, forms: SimpleNamespace, tmp_path: Path) -> None:
    ending, edit = PLANTED[fault]
    content = onnx.load(str(forms.path))
    names = [tensor.name for tensor in content.graph.initializer if tensor.name.endswith(ending)]
    assert len(names) == NUM_LAYERS
    for name in names:
        changed = onnx.ModelProto.FromString(content.SerializeToString())
        change(changed, name, edit)
        onnx.save(changed, str(tmp_path / "wrong.onnx"))
        found_NK, _ = unrounded_logits(tmp_path / "wrong.onnx", forms.images_NCHW.numpy())
        with pytest.raises(oracle.Difference):
            oracle.assert_close(torch.from_numpy(found_NK), forms.expected_NK, fault)


def test_a_wrong_kernel_is_seen(forms: SimpleNamespace) -> None:
    with quantized_engine(forms.int8.recipe.backend), torch.no_grad():
        network: Any = forms.int8.build()
        layer = network.get_submodule("conv1")
        right = layer.forward
        layer.forward = lambda x: torch.quantize_per_tensor(
            right(x).dequantize() + 2 * layer.scale, layer.scale, layer.zero_point, torch.quint8
        )
        kernels = oracle.Kernels(network)
        kernels.run(forms.images_NCHW)
    assert [name for name, steps in kernels.steps.items() if steps > oracle.MAX_STEPS] == ["conv1"]


def test_another_function_is_seen(forms: SimpleNamespace) -> None:
    with pytest.raises(oracle.Difference, match="float network"):
        oracle.check_int8(forms.int8, forms.images_NCHW, forms.float_NK * 1.01, saturates=False)
