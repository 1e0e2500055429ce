"""The passes around the quantizer, in the stage: nearer to the float file, and checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ptpipe import Context
from ptpipe.events import LogLine, Notice
from ptpipe_onnx import quantize_onnx
from ptpipe_onnx.quantization import optimization
from ptpipe_onnx.quantization.config import QuantizeOnnxConfig
from ptpipe_torch import Data, OnnxFile

from ..conftest import RecordedEvents

Run = Callable[..., OnnxFile]
RNG = np.random.default_rng(5)


def paddle_file(path: Path, like: OnnxFile, opset: int = 11) -> OnnxFile:
    """As converters from PaddlePaddle write networks: HardSwish, GELU and scales of tensors spelled out."""
    nodes, arrays = list[onnx.NodeProto](), dict[str, np.ndarray]()

    def number(value: float, *shape: int) -> str:
        arrays[name := f"number{len(arrays)}"] = np.full(shape, value, np.float32)
        return name

    def node(op_type: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op_type, inputs, [f"v{len(nodes)}"], **attributes))
        return str(nodes[-1].output[0])

    def conv(x: str, num_inputs: int, num_outputs: int, stride: int) -> str:
        arrays[weight := f"w{len(arrays)}"] = (
            RNG.normal(size=(num_outputs, num_inputs, 3, 3)) * np.sqrt(2 / (9 * num_inputs))
        ).astype(np.float32)
        y = node("Conv", x, weight, pads=[1, 1, 1, 1], strides=[stride, stride])
        return node("Add", node("Mul", y, number(1.5, 1)), number(0.1, 1))

    def hardswish(x: str) -> str:
        clipped = node("Clip", node("Add", x, number(3, 1)), number(0), number(6))
        return node("Div", node("Mul", x, clipped), number(6, 1))

    def gelu(x: str) -> str:
        gate = node("Add", node("Erf", node("Div", x, number(np.sqrt(2)))), number(1))
        return node("Mul", node("Mul", x, gate), number(0.5))

    x = gelu(conv(hardswish(conv("images", 1, 16, 1)), 16, 16, 2))
    x = node("Flatten", node("GlobalAveragePool", hardswish(conv(x, 16, 32, 2))))
    arrays["head"], arrays["bias"] = RNG.normal(size=(32, 10)).astype(np.float32), np.zeros(10, np.float32)
    nodes.append(helper.make_node("Gemm", [x, "head", "bias"], ["logits"]))
    tensor = helper.make_tensor_value_info
    ends = [tensor("images", TensorProto.FLOAT, ["N", 1, 16, 16]), tensor("logits", TensorProto.FLOAT, ["N", 10])]
    stored = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "paddle", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save_model(model, path)
    return OnnxFile(path, like.signature)


def test_a_file_of_spelled_operators_is_nearer_to_the_float_one_with_fewer_operators(
    float_file, digits: Data, run_stage: Run, events: RecordedEvents, tmp_path
) -> None:
    file = paddle_file(tmp_path / "float.onnx", float_file)
    found = {}
    for optimize in (False, True):
        quantized = run_stage(quantize_onnx, file, digits, optimize=optimize)
        kinds = [node.op_type for node in onnx.load(quantized.path).graph.node]
        counts = {name: events.metrics[name] for name in ("num_int8_nodes", "num_float_nodes")}
        found[optimize] = {"sqnr_db": quantized.parity["sqnr_db"], "kinds": kinds, **counts}
    plain, optimized = found[False], found[True]
    assert optimized["sqnr_db"] > plain["sqnr_db"] + 1
    assert (
        optimized["num_int8_nodes"] + optimized["num_float_nodes"] < plain["num_int8_nodes"] + plain["num_float_nodes"]
    )
    assert [of["kinds"].count("Div") for of in (plain, optimized)] == [3, 1], "that of the GELU stays"


@pytest.mark.parametrize("options", [{"format": "qoperator"}, {"mode": "dynamic"}])
def test_other_forms_are_the_quantizers_own(options, float_file, digits: Data, run_stage: Run, tmp_path) -> None:
    contents = [
        onnx.load(run_stage(quantize_onnx, float_file, digits, optimize=optimize, **options).path)
        for optimize in (True, False)
    ]
    first, second = ([node.op_type for node in content.graph.node] for content in contents)
    assert first == second


def kept(
    write: Callable[[Path], None], float_file: OnnxFile, digits: Data, events: RecordedEvents, tmp_path: Path
) -> bool:
    path = tmp_path / "after.onnx"
    ctx = Context("a", "quant.onnx", 7, tmp_path, _tell=events.append)

    def written() -> OnnxFile:
        write(path)
        return OnnxFile(path, float_file.signature)

    return optimization._is_kept(QuantizeOnnxConfig(), ctx, digits, float_file, written, lambda name, pair: 1e-3)


def test_a_pass_that_changes_outputs_is_not_kept(float_file, digits: Data, events: RecordedEvents, tmp_path) -> None:
    def harmed(path: Path) -> None:
        content = onnx.load(float_file.path)
        weight = next(own for own in content.graph.initializer if len(own.dims) == 4)
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
        onnx.save_model(content, path)

    assert not kept(harmed, float_file, digits, events, tmp_path)
    (notice,) = (event.text for event in events if isinstance(event, Notice))
    assert notice.startswith("optimize would change logits by")
    events.clear()
    assert kept(lambda path: onnx.save_model(onnx.load(float_file.path), path), float_file, digits, events, tmp_path)
    assert not [event for event in events if isinstance(event, Notice)]


def test_a_file_that_cannot_be_rewritten_stays_and_the_log_says_why(
    float_file, digits: Data, events: RecordedEvents, tmp_path
) -> None:
    def failing(path: Path) -> None:
        path.write_bytes(b"no ONNX file")

    assert not kept(failing, float_file, digits, events, tmp_path)
    (line,) = (event.text for event in events if isinstance(event, LogLine) and event.text.startswith("optimize:"))
    assert line.endswith("; it stays as it is")
