"""HardSwish as a product of integers: the same values, on grids that have it, and only there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ptpipe import Context, StageError
from ptpipe_onnx import ExportConfig, OpenVinoConfig, export_onnx, export_openvino
from ptpipe_onnx.exact import compare_exactly
from ptpipe_onnx.graph import remove_unused
from ptpipe_onnx.grid import Grid
from ptpipe_onnx.hardswish_pass import GateGrid, use_float_hardswish, use_integer_hardswish
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_torch import Data, Model
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import reference_network

from .test_latency_passes import passed, run_types
from .test_qdq_passes import Draft, types_of

Run = Callable[..., np.ndarray]
ALL_INTEGERS = np.arange(256, dtype=np.float32)


def hardswish(scale: float, zero_point: int, output: tuple[float, int]) -> onnx.ModelProto:
    draft = Draft()
    value = draft.node("HardSwish", [draft.quantize("images", scale, zero_point)])
    return draft.finished(draft.quantize(value, *output))


def values_of(scale: float, zero_point: int) -> np.ndarray:
    """All values of the grid, in the shape of the draft's input."""
    values = (ALL_INTEGERS - zero_point) * np.float32(scale)
    return np.resize(values, (2, 4, 6, 6)).astype(np.float32)


@pytest.mark.parametrize(("num_steps", "zero_point"), [(16, 16), (40, 128), (95, 129), (127, 127), (200, 255)])
def test_all_integers_have_the_same_results(num_steps: int, zero_point: int, run_onnx: Run, tmp_path: Path) -> None:
    scale = 3 / num_steps
    high = max((255 - zero_point) * scale, 0.1)
    model = hardswish(scale, zero_point, ((high + 0.4) / 255, round(0.4 / ((high + 0.4) / 255))))
    after = passed(model, use_integer_hardswish)
    assert "HardSwish" not in types_of(after)
    assert run_types(after, tmp_path) >= {"Clip", "QLinearMul"}
    images = values_of(scale, zero_point)
    expected = run_onnx(model.SerializeToString(), images)
    assert np.ptp(expected) > 0.1
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), images, optimize=True), expected)


@pytest.mark.parametrize(
    ("scale", "zero_point"),
    [(3 / 40.5, 128), (3 / 40 * 1.0002, 128), (3 / 130, 128), (3 / 40, 39)],  # the last two: -3 is no value of the grid
)
def test_other_grids_stay_float(scale: float, zero_point: int) -> None:
    after = passed(hardswish(scale, zero_point, (0.05, 10)), use_integer_hardswish)
    assert types_of(after)["HardSwish"] == 1
    assert types_of(after)["Clip"] == 0


def test_the_rounding_of_a_stored_scale_is_tolerated() -> None:
    for num_steps in range(16, 129):
        scale = np.float32(np.float32(3 / num_steps) * np.float32(255)) / np.float32(255)
        gate = GateGrid.of(Grid(scale, 128, np.dtype(np.uint8)))
        assert gate is not None
        assert gate.limits == (128 - num_steps, min(128 + num_steps, 255))


@pytest.mark.parametrize("reads_integers", [False, True])
def test_a_float_hardswish_is_left_alone(reads_integers: bool) -> None:
    draft = Draft()
    value = draft.quantize("images", 3 / 40, 128) if reads_integers else "images"
    model = draft.finished(draft.node("HardSwish", [value]))
    assert types_of(passed(model, use_integer_hardswish)) == types_of(model)


def test_the_pass_can_be_undone() -> None:
    model = hardswish(3 / 40, 128, (0.05, 10))
    read = ir.serde.deserialize_model(passed(model, use_integer_hardswish))
    assert use_float_hardswish(read.graph)
    assert not use_float_hardswish(read.graph)
    remove_unused(read)
    assert types_of(ir.serde.serialize_model(read)) == types_of(model)


def test_other_products_are_not_undone() -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 128)
    model = draft.finished(draft.quantize(draft.node("Mul", [value, value]), 0.1, 0))
    assert not use_float_hardswish(ir.serde.deserialize_model(model).graph)


@pytest.fixture(scope="module")
def mobile(float_model: Callable[[str], Model], digits: Data, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A calibrated int8 network with a HardSwish, and its file."""
    folder = tmp_path_factory.mktemp("mobile")

    def context(name: str) -> Context:
        (folder / name).mkdir()
        return Context(name, name, 7, folder / name)

    prepared = prepare(PrepareConfig(backend="fbgemm"), context("prepare"), float_model("mobile"))
    calibrated, _ = calibrate(CalibrateConfig(), context("calibrate"), prepared, digits)
    int8 = convert(ConvertConfig(), context("convert"), calibrated)
    return int8, export_onnx(ExportConfig(num_samples=200), context("export"), int8, digits)


def test_a_calibrated_network_has_such_a_grid(mobile: Any, tmp_path: Path) -> None:
    model = onnx.load(mobile[1].path)
    assert types_of(model)["HardSwish"] == 0
    assert {"QLinearMul", "Clip"} <= run_types(model, tmp_path)


FAULTS = {"min": 1, "max": 2, "zero point": 2, "scale": 1}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_factor_is_refused(mobile: Any, fault: str, tmp_path: Path) -> None:
    int8, file = mobile
    with quantized_engine("fbgemm"):
        reference, network = reference_network(int8.build_prepared())[0], int8.build()
    compare_exactly(file.path, reference, network)
    model = onnx.load(file.path)
    op_type = "Clip" if fault in ("min", "max") else "DequantizeLinear"
    (node,) = [
        node
        for node in model.graph.node
        if node.op_type == op_type and any(name.endswith(".gate") for name in (node.input[0], node.output[0]))
    ]
    (tensor,) = [array for array in model.graph.initializer if array.name == node.input[FAULTS[fault]]]
    content = numpy_helper.to_array(tensor)
    changed = content * np.float32(1.01) if fault == "scale" else content.astype(int) + (-1 if fault == "max" else 1)
    tensor.CopyFrom(numpy_helper.from_array(changed.astype(content.dtype), tensor.name))
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(StageError, match=r"HardSwish of swish.* has another factor than relu6\(x \+ 3\) / 6"):
        compare_exactly(tmp_path / "broken.onnx", reference, network)


def test_openvino_gets_the_operator_back(mobile: Any, digits: Data, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    ctx = Context("vino", "export.openvino", 7, tmp_path)
    model = export_openvino(OpenVinoConfig(num_samples=200), ctx, mobile[1], digits)  # compares the outputs
    content = (model.folder / "model.xml").read_text()
    assert content.count('type="HSwish"') == 1
    assert 'type="Clamp"' not in content
