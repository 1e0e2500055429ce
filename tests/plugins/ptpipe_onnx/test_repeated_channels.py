"""Depthwise convolutions with several outputs for each channel: the values before and after, and their comparison.

Shape legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ptpipe import StageError
from ptpipe_onnx.added_channels import pad_depthwise
from ptpipe_onnx.exact import compare_exactly
from ptpipe_onnx.graph import nodes
from ptpipe_onnx.repeated_channels import RepeatedChannels, repeat_channels
from ptpipe_torch.int8.engine import quantized_engine

from .conftest import Exported
from .test_added_channels import check_same_values, depthwise, stem, stored
from .test_latency_passes import Run, passed
from .test_planted_faults import reference_of
from .test_qdq_passes import Draft, kernels_of, types_of

RNG = np.random.default_rng(5)


def both_passes(graph: ir.Graph) -> None:
    repeat_channels(graph)
    pad_depthwise(graph)


@pytest.mark.parametrize("apply", [repeat_channels, both_passes])
@pytest.mark.parametrize(("num_channels", "kernel", "multiplier"), [(8, 3, 2), (6, 5, 4), (36, 3, 2), (3, 7, 5)])
def test_each_channel_is_repeated(
    num_channels: int, kernel: int, multiplier: int, apply: Callable[[ir.Graph], None], run_onnx: Run, tmp_path: Path
) -> None:
    model = depthwise(num_channels, kernel, multiplier=multiplier)
    after = passed(model, apply)
    (convolution,) = nodes(ir.serde.deserialize_model(after).graph, "Conv")
    assert RepeatedChannels.of(convolution) == RepeatedChannels(num_channels, multiplier)
    check_same_values(model, after, num_channels, run_onnx)
    kernels = kernels_of(after, tmp_path)
    assert (kernels.integer, kernels.float) == ({"QLinearConv": 1}, {})


def test_sequences(run_onnx: Run) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 90)
    weight = draft.weight(RNG.integers(-127, 128, (8, 1, 3)), RNG.uniform(0.005, 0.02, 8))
    model = draft.finished(draft.quantize(draft.node("Conv", [value, weight], group=4), 0.1, 128), ("N", 4, 9))
    after = passed(model, repeat_channels)
    assert types_of(after)["Gather"] == 1
    x = (RNG.normal(size=(3, 4, 9)) * 4).astype(np.float32)
    expected = run_onnx(model.SerializeToString(), x)
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), x), expected)


def test_convolutions_of_one_tensor_share_the_copies(run_onnx: Run) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 90)
    branches = []
    for kernel in (3, 5):
        weight = draft.weight(RNG.integers(-127, 128, (8, 1, kernel, kernel)), RNG.uniform(0.005, 0.02, 8))
        branch = draft.node("Conv", [value, weight], group=4, pads=[kernel // 2] * 4)
        branches.append(draft.quantize(branch, 0.1, 128))
    model = draft.finished(draft.node("Sum", branches), ("N", 4, 6, 6))
    after = passed(model, repeat_channels)
    assert types_of(after)["Gather"] == 1
    images_NCHW = RNG.normal(size=(3, 4, 6, 6)).astype(np.float32)
    expected = run_onnx(model.SerializeToString(), images_NCHW)
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), images_NCHW), expected)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(depthwise(8, 3), id="one output for each channel"),
        pytest.param(depthwise(1, 3, multiplier=8), id="one channel"),
        pytest.param(stem(6, (3, 3), group=3), id="groups of two channels"),
        pytest.param(stem(6, (3, 3)), id="dense"),
    ],
)
def test_other_convolutions_are_left_alone(model: onnx.ModelProto) -> None:
    after = passed(model, repeat_channels)
    assert types_of(after) == types_of(model)


def test_another_order_of_the_copies_is_found(exported: Callable[..., Exported], tmp_path: Path) -> None:
    made = exported("repeated", "fbgemm")
    reference, path = reference_of(made.model), tmp_path / "broken.onnx"
    with quantized_engine("fbgemm"):
        int8_network = made.model.build()
    file = onnx.load(made.file.path)
    assert types_of(file)["Gather"] == 2
    compare_exactly(made.file.path, reference, int8_network)
    for array in [array for array in file.graph.initializer if ".to." in array.name]:
        broken = onnx.load(made.file.path)
        (indices,) = (own for own in broken.graph.initializer if own.name == array.name)
        swapped = stored(file)[array.name].copy()
        swapped[[0, 2]] = swapped[[2, 0]]
        indices.CopyFrom(onnx.numpy_helper.from_array(swapped, array.name))
        onnx.save(broken, path)
        with pytest.raises(StageError, match="its group: "):
            compare_exactly(path, reference, int8_network)
