"""Files with one small fault are refused, right ones are not.

Shape legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from torch.fx import GraphModule

from ptpipe import StageError
from ptpipe_onnx.exact import compare_exactly
from ptpipe_onnx.layerwise import compare_file
from ptpipe_torch import Data, Model
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import reference_network

from .conftest import Exported
from .planted_faults import FAULTS, PRODUCT_FAULTS, broken_files

NUM_FAULTS = 36


def reference_of(model: Model) -> GraphModule:
    prepared = model.build_prepared()
    with quantized_engine(model.recipe.backend):
        return reference_network(prepared)[0]


def refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except StageError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("name", "backend", "qat", "num_faults"),
    [
        ("cnn", "fbgemm", False, NUM_FAULTS),
        ("residual", "qnnpack", True, NUM_FAULTS),
        ("rows", "fbgemm", False, 10),
        ("depthwise", "fbgemm", True, 24),
        ("volumes", "fbgemm", False, 24),
        ("repeated", "fbgemm", False, 24),
    ],
)
def test_small_faults_are_found(
    name: str,
    backend: str,
    qat: bool,
    num_faults: int,
    exported: Callable[..., Exported],
    digits: Data,
    tmp_path: Path,
) -> None:
    made = exported(name, backend, qat=qat)
    model, file, reference = made.model, made.file, reference_of(made.model)
    with quantized_engine(backend):
        int8_network = model.build()
    (batch,) = digits.batches("test", order_N=np.arange(32), batch_size=32)
    images_NCHW = batch.inputs["images"].numpy()
    passed, found_by_layers, kinds = [], 0, set()
    for fault, path in broken_files(file.path, tmp_path, num_faults):
        exactly = refusal(lambda path=path: compare_exactly(path, reference, int8_network))
        by_layers = refusal(
            lambda path=path: compare_file(path, reference, {"images": images_NCHW}, ["logits"], tmp_path).check()
        )
        kinds.add(fault.partition(" in layer")[0])
        found_by_layers += by_layers is not None
        if exactly is None:
            passed.append(fault)
    assert passed == []
    of_convolutions = {"pads shifted", "dilated"} if name == "rows" else set()
    of_several_scales = {"one scale for all channels", "two scales swapped"}
    assert kinds >= FAULTS.keys() - of_convolutions - of_several_scales
    assert found_by_layers >= 0.75 * num_faults  # a twelfth of the faults is far below a step of a layer's output


def test_faults_of_products_of_activations_are_found(
    exported: Callable[..., Exported], digits: Data, tmp_path: Path
) -> None:
    made = exported("attention", "fbgemm")
    model, file, reference = made.model, made.file, reference_of(made.model)
    with quantized_engine("fbgemm"):
        int8_network = model.build()
    (batch,) = digits.batches("test", order_N=np.arange(32), batch_size=32)
    inputs = {"images": batch.inputs["images"].numpy()}
    found = {}
    for name, plant in PRODUCT_FAULTS.items():
        for index in range(2):
            broken, path = onnx.load(file.path), tmp_path / "broken.onnx"
            plant(broken.graph, [node for node in broken.graph.node if node.op_type == "MatMul"][index])
            onnx.checker.check_model(broken)
            onnx.save(broken, path)
            exactly = refusal(lambda path=path: compare_exactly(path, reference, int8_network))
            by_layers = refusal(lambda path=path: compare_file(path, reference, inputs, ["logits"], tmp_path).check())
            found[name, index] = exactly is not None, by_layers is not None
    assert {name for (name, _), (exactly, _) in found.items() if exactly} == {"operand_scaled", "result_shifted"}
    assert all(exactly or by_layers for exactly, by_layers in found.values()), found
    assert all(found["heads_exchanged", index] == (False, True) for index in range(2)), "grids and layers are the same"


def fill(name: str, position: int, value: int) -> Callable[[onnx.GraphProto], None]:
    """Return what writes a number into an initializer. `position`: in the flat array."""

    def plant(graph: onnx.GraphProto) -> None:
        (array,) = (array for array in graph.initializer if array.name == name)
        content = onnx.numpy_helper.to_array(array).copy()
        content.flat[position] = value
        array.CopyFrom(onnx.numpy_helper.from_array(content, name))

    return plant


def test_faults_of_appended_channels_are_found(exported: Callable[..., Exported], tmp_path: Path) -> None:
    made = exported("cnn", "fbgemm")
    file, reference = onnx.load(made.file.path), reference_of(made.model)
    with quantized_engine("fbgemm"):
        int8_network = made.model.build()
    (pad,) = (node for node in file.graph.node if node.op_type == "Pad")
    zero_point, weight = pad.input[2], next(array.name for array in file.graph.initializer if len(array.dims) == 4)
    faults = {
        "its pads of the input": fill(pad.input[1], 6, 1),
        "its int8 weights": fill(weight, 9, 1),  # the first of the second channel, which the model doesn't have
    }
    for quantity, plant in faults.items():
        broken, path = onnx.ModelProto(), tmp_path / "broken.onnx"
        broken.CopyFrom(file)
        plant(broken.graph)
        onnx.save(broken, path)
        with pytest.raises(StageError, match=quantity):
            compare_exactly(path, reference, int8_network)
    other = onnx.numpy_helper.from_array(np.array(3, np.uint8), "other")
    file.graph.initializer.append(other)
    pad.input[2] = other.name
    assert zero_point != other.name
    onnx.save(file, path)
    with pytest.raises(StageError, match="its padding of the input: 3, in the model"):
        compare_exactly(path, reference, int8_network)


def test_faults_of_the_channels_of_a_depthwise_convolution_are_found(
    exported: Callable[..., Exported], tmp_path: Path
) -> None:
    made = exported("depthwise", "fbgemm", qat=True)
    reference, path = reference_of(made.model), tmp_path / "broken.onnx"
    with quantized_engine("fbgemm"):
        int8_network = made.model.build()

    def input_of(file: onnx.ModelProto, op_type: str, index: int) -> str:
        node = [node for node in file.graph.node if node.op_type == op_type][-1]
        return node.input[index]

    assert [node.op_type for node in onnx.load(made.file.path).graph.node].count("Slice") == 1
    faults: list[tuple[str, tuple[str, int, int, int]]] = [
        ("padding of the input: 5", ("Pad", 2, 0, 5)),
        ("int8 weights: shape", ("Pad", 1, 5, 7)),
        ("int8 weights: shape", ("Slice", 2, 0, 16)),
        ("int8 weights: shape", ("Slice", 1, 0, 1)),
    ]
    for message, (op_type, index, position, content) in faults:
        file = onnx.load(made.file.path)
        if index == 2 and op_type == "Pad":  # its zero point is that of other operators, too
            file.graph.initializer.append(onnx.numpy_helper.from_array(np.array(content, np.uint8), "other"))
            next(node for node in reversed(file.graph.node) if node.op_type == "Pad").input[2] = "other"
        else:
            fill(input_of(file, op_type, index), position, content)(file.graph)
        onnx.save(file, path)
        with pytest.raises(StageError, match=message):
            compare_exactly(path, reference, int8_network)


def test_a_convolution_that_is_no_linear_layer_on_a_sequence_is_found(
    exported: Callable[..., Exported], tmp_path: Path
) -> None:
    made = exported("rows", "fbgemm")
    reference, path = reference_of(made.model), tmp_path / "broken.onnx"
    with quantized_engine("fbgemm"):
        int8_network = made.model.build()

    def of(file: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
        return next(node for node in file.graph.node if node.op_type == op_type)

    faults: list[Callable[[onnx.ModelProto], object]] = [
        lambda file: of(file, "Transpose").attribute[0].CopyFrom(onnx.helper.make_attribute("perm", [0, 1, 2])),
        lambda file: of(file, "Conv").attribute.append(onnx.helper.make_attribute("strides", [2])),
        lambda file: of(file, "Conv").attribute.append(onnx.helper.make_attribute("group", 4)),
    ]
    for plant in faults:
        file = onnx.load(made.file.path)
        plant(file)
        onnx.save(file, path)
        with pytest.raises(StageError, match="layer rows is not the model's: its operator: Conv, in the model: a line"):
            compare_exactly(path, reference, int8_network)
