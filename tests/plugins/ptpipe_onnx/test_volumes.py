"""Convolutions over volumes as convolutions over images: the same integers.

Shape legend: N samples, C channels, D, H, W depth, height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ptpipe import StageError
from ptpipe_onnx.exact import compare_exactly
from ptpipe_onnx.graph import nodes, remove_unused
from ptpipe_onnx.latency_passes import use_quicker_kernels
from ptpipe_onnx.volumes import KernelAxis, VolumeConvolution, write_as_volumes, write_volumes_as_images

from .conftest import Exported
from .test_planted_faults import reference_of
from .test_qdq_passes import Draft, kernels_of, types_of

Run = Callable[..., np.ndarray]
RNG = np.random.default_rng(11)
SIZES_DHW = (5, 6, 7)


def volume(*, kernel: Sequence[int] = (3, 3, 3), has_bias: bool = True, **attributes: Any) -> onnx.ModelProto:
    draft = Draft()
    inputs = 4 // attributes.get("group", 1)
    weight = draft.weight(RNG.integers(-127, 128, (6, inputs, *kernel)), RNG.uniform(0.001, 0.01, 6))
    biases = [draft.array(RNG.normal(size=6), np.float32)] if has_bias else []
    value = draft.node("Conv", [draft.quantize("images", 0.05, 120), weight, *biases], **attributes)
    return draft.finished(draft.quantize(value, 0.1, 110), ("N", 4, *SIZES_DHW))


def applied(model: onnx.ModelProto) -> ir.Model:
    inferred = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    write_volumes_as_images(inferred.graph)
    remove_unused(inferred)
    return inferred


def serialized(model: ir.Model) -> bytes:
    content = ir.to_proto(model)
    content.graph.ClearField("value_info")
    onnx.checker.check_model(content, full_check=True)
    return content.SerializeToString()


CASES: list[tuple[dict[str, Any], KernelAxis]] = [
    ({}, KernelAxis(3, 1, 1, (0, 0))),
    ({"pads": [1] * 6}, KernelAxis(3, 1, 1, (1, 1))),
    ({"pads": [2, 0, 1, 0, 1, 0], "strides": [2, 1, 2]}, KernelAxis(3, 2, 1, (2, 0))),
    ({"kernel": (2, 3, 1), "dilations": [3, 2, 1], "has_bias": False}, KernelAxis(2, 1, 3, (0, 0))),
    ({"kernel": (1, 3, 3), "strides": [2, 1, 1]}, KernelAxis(1, 2, 1, (0, 0))),
    ({"kernel": (5, 1, 1), "pads": [2, 0, 0, 2, 0, 0]}, KernelAxis(5, 1, 1, (2, 2))),
]


@pytest.mark.parametrize(("options", "axis"), CASES)
def test_the_integers_are_the_same_and_the_form_is_undone(
    options: dict[str, Any], axis: KernelAxis, run_onnx: Run, tmp_path
) -> None:
    model = volume(**options)
    after = applied(model)
    (convolution,) = nodes(after.graph, "Conv")
    written = VolumeConvolution.of(convolution)
    assert written is not None and written.axis == axis and (written.pad is not None) == any(axis.pads)
    content = serialized(after)
    for num_samples in (3, 1):
        x = (RNG.normal(size=(num_samples, 4, *SIZES_DHW)) * 3).astype(np.float32)
        before = run_onnx(model.SerializeToString(), x)
        np.testing.assert_allclose(run_onnx(content, x), before, rtol=0, atol=1e-5)
        np.testing.assert_allclose(run_onnx(content, x, optimize=True), before, rtol=0, atol=0.1001)  # rounded ties
    assert kernels_of(onnx.ModelProto.FromString(content), tmp_path).integer == {"QLinearConv": 1}
    assert write_as_volumes(after.graph)
    remove_unused(after)
    assert types_of(ir.to_proto(after)) == types_of(model)
    np.testing.assert_array_equal(run_onnx(serialized(after), x), before)


@pytest.mark.parametrize("num_readers", [1, 2])
def test_volumes_are_pooled_in_float_on_the_same_grid(num_readers: int, run_onnx: Run, tmp_path) -> None:
    draft = Draft()
    grid = [draft.array(0.05, np.float32), draft.array(120, np.uint8)]
    integers = draft.node("QuantizeLinear", ["images", *grid])
    pooled = draft.node("MaxPool", [integers], kernel_shape=[2, 3, 2], strides=[1, 2, 2], pads=[0, 1, 0, 0, 1, 1])
    outputs = [draft.node("DequantizeLinear", [pooled, *grid]) for _ in range(num_readers)]
    model = draft.finished(draft.node("Add", [outputs[0], outputs[-1]]), ("N", 4, *SIZES_DHW))
    after = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    use_quicker_kernels(after.graph)
    x = (RNG.normal(size=(2, 4, *SIZES_DHW)) * 3).astype(np.float32)
    content = serialized(after)
    for optimize in (False, True):
        expected = run_onnx(model.SerializeToString(), x, optimize=optimize)
        np.testing.assert_array_equal(run_onnx(content, x, optimize=optimize), expected)
    kernels = kernels_of(onnx.ModelProto.FromString(content), tmp_path)
    assert kernels.float["MaxPool"] == 1 and "MaxPool" not in kernels.integer


def test_convolutions_that_read_the_same_integers(run_onnx: Run) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 120)
    weight = draft.weight(RNG.integers(-127, 128, (4, 4, 3, 3, 3)), 0.00513)  # no sum is a tie
    sums = [draft.quantize(draft.node("Conv", [value, weight], pads=[1] * 6), 0.1, 110) for _ in range(2)]
    model = draft.finished(draft.node("Add", sums), ("N", 4, *SIZES_DHW))
    x = (RNG.normal(size=(2, 4, *SIZES_DHW)) * 3).astype(np.float32)
    after = serialized(applied(model))
    np.testing.assert_allclose(run_onnx(after, x), run_onnx(model.SerializeToString(), x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", ["groups", "auto_pad", "unknown sizes", "images"])
def test_what_is_no_such_convolution_stays(change: str) -> None:
    model = volume(group=2) if change == "groups" else volume(pads=[1] * 6)
    if change == "auto_pad":
        model = volume(auto_pad="SAME_UPPER")
    if change == "unknown sizes":
        model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "depth"
    if change == "images":
        (stored,) = (own for own in model.graph.initializer if len(own.dims) == 5)
        stored.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(stored)[:, :, 0], stored.name))
        del model.graph.input[0].type.tensor_type.shape.dim[2]
        next(node for node in model.graph.node if node.op_type == "Conv").attribute[0].ints[:] = [1] * 4
    assert types_of(ir.to_proto(applied(model))) == types_of(model)


@pytest.mark.parametrize(("backend", "qat"), [("fbgemm", False), ("fbgemm", True)])
def test_an_export_of_volumes(backend: str, qat: bool, exported: Callable[..., Exported]) -> None:
    made = exported("volumes", backend, qat=qat)
    assert made.events.metrics["layers_identical"] == 3
    assert made.events.metrics["integer_coverage"] == "2 of 2 convolutions, 1 of 1 linear layers"
    convolutions = [node for node in ir.load(made.file.path).graph if node.op_type == "Conv"]
    found = [VolumeConvolution.of(node) for node in convolutions]
    assert [None if written is None else written.axis for written in found] == [
        KernelAxis(3, 1, 1, (1, 1)), KernelAxis(2, 2, 1, (0, 0)),
    ]  # fmt: skip


def shifted(model: onnx.ModelProto) -> None:
    """The last slice under a kernel of three is the one before it."""
    changed(model, next(node for node in model.graph.node if node.op_type == "Concat"), lambda start: start - 1)


def changed(model: onnx.ModelProto, concat: onnx.NodeProto, change: Callable[[np.ndarray], np.ndarray]) -> None:
    part = next(node for node in model.graph.node if concat.input[-1] in node.output)
    for index in (1, 2):
        stored = next(own for own in model.graph.initializer if own.name == part.input[index])
        array = numpy_helper.from_array(change(numpy_helper.to_array(stored)), f"changed{index}")
        model.graph.initializer.append(array)
        part.input[index] = array.name


def exchanged(model: onnx.ModelProto) -> None:
    """Two slices stand in the wrong order."""
    concat = next(node for node in model.graph.node if node.op_type == "Concat")
    concat.input[0], concat.input[1] = concat.input[1], concat.input[0]


def padded(model: onnx.ModelProto) -> None:
    """The volume is padded with another number than zero."""
    pad = next(node for node in model.graph.node if node.op_type == "Pad")
    model.graph.initializer.append(numpy_helper.from_array(np.array(201, np.uint8), "changed"))
    pad.input[2] = "changed"


def moved(model: onnx.ModelProto) -> None:
    """The padding is at the other end."""
    pad = next(node for node in model.graph.node if node.op_type == "Pad")
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 2, *[0] * 8], np.int64), "changed"))
    pad.input[1] = "changed"


@pytest.mark.parametrize("fault", [shifted, exchanged, padded, moved], ids=lambda fault: fault.__name__)
def test_a_fault_of_the_form_is_found(fault: Callable[..., None], exported: Callable[..., Exported], tmp_path) -> None:
    made = exported("volumes", "fbgemm")
    content = onnx.load(made.file.path)
    fault(content)
    onnx.save_model(content, tmp_path / "broken.onnx")
    network = made.model.build()
    with pytest.raises(StageError, match=r"the file's layer 1.* is not the model's"):
        compare_exactly(tmp_path / "broken.onnx", reference_of(made.model), network)
