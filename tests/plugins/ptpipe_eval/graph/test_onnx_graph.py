"""Multiply-accumulates of ONNX graphs: by hand, and against torch's for exported networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from ptpipe_eval.graph.onnx_graph import count_onnx, stored_bytes
from ptpipe_eval.graph.torch_graph import count_network
from ptpipe_onnx.checks import unsupported_opset

FLOAT = TensorProto.FLOAT


def tensor(name: str, *shape: int, dtype: Any = np.float32) -> Any:
    return numpy_helper.from_array(np.ones(shape, dtype), name)


def count(tmp_path: Path, nodes: list[Any], stored: list[Any], shape: tuple[int, ...], out: str = "y") -> Any:
    """Counts of a graph whose input `x` has a symbolic batch axis."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["N", *shape[1:]])],
        [onnx.ValueInfoProto(name=out) if out != "y" else helper.make_tensor_value_info("y", FLOAT, None)],
        stored,
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("own", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "a.onnx")
    return count_onnx(tmp_path / "a.onnx", {"x": np.ones(shape, np.float32)})


node = helper.make_node
CASES: dict[str, tuple[list[Any], list[Any], tuple[int, ...], int]] = {
    "conv": ([node("Conv", ["x", "w"], ["y"], group=2)], [tensor("w", 6, 2, 3, 3)], (1, 4, 8, 8), 6 * 36 * 18),
    "transposed": ([node("ConvTranspose", ["x", "w"], ["y"])], [tensor("w", 4, 6, 3, 3)], (1, 4, 5, 5), 100 * 54),
    "gemm": ([node("Gemm", ["w", "x"], ["y"], transA=1, transB=1)], [tensor("w", 7, 5)], (1, 7), 5 * 7),
    "matmul": ([node("MatMul", ["x", "w"], ["y"])], [tensor("w", 2, 5, 3)], (1, 2, 4, 5), 2 * 4 * 5 * 3),
    "einsum": ([node("Einsum", ["x", "w"], ["y"], equation="bij,jk->bik")], [tensor("w", 5, 3)], (1, 4, 5), 60),
    "attention": ([node("Attention", ["x", "x", "x"], ["y"])], [], (1, 2, 7, 8), 2 * 7 * 7 * 16),
    "lstm": (
        [node("LSTM", ["x", "w", "r"], ["y"], hidden_size=6, direction="bidirectional")],
        [tensor("w", 2, 24, 5), tensor("r", 2, 24, 6)],
        (1, 2, 5),
        2 * 2 * 24 * 11,
    ),
    "none": ([node("Relu", ["x"], ["y"])], [], (1, 3), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_known_operators(tmp_path, name):
    *graph, expected = CASES[name]
    found = count(tmp_path, *graph)
    assert (sum(found.macs.values()), found.uncounted) == (expected, [])


@pytest.mark.parametrize("num_outputs", [2, 2000])  # weights of that size are left out of the inference
def test_shapes_that_are_computed_on_the_way(tmp_path, num_outputs):
    """The graph's own inference does not follow them, so that it is run once."""
    if (message := unsupported_opset(23)) is not None:
        pytest.skip(message)
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Slice", ["shape", "zero", "one"], ["batch"]),
        node("ReduceMax", ["x"], ["largest"], keepdims=0),
        node("Cast", ["largest"], ["rows"], to=TensorProto.INT64),
        node("Unsqueeze", ["rows", "zero"], ["rows1"]),
        node("Concat", ["batch", "rows1", "rest"], ["wanted"], axis=0),
        node("Reshape", ["x", "wanted"], ["reshaped"]),
        node("MatMul", ["reshaped", "w"], ["y"]),
    ]
    integers = [
        numpy_helper.from_array(np.array([value], np.int64), name)
        for name, value in (("zero", 0), ("one", 1), ("rest", -1))
    ]
    found = count(tmp_path, nodes, [*integers, tensor("w", 6, num_outputs)], (1, 6))
    assert (found.macs, found.uncounted) == ({"float32": 6 * num_outputs}, [])


def test_what_is_not_known_is_not_guessed(tmp_path):
    body = helper.make_graph(
        [node("MatMul", ["x", "w"], ["inner"])], "body", [], [helper.make_tensor_value_info("inner", FLOAT, None)]
    )
    yes = numpy_helper.from_array(np.array(True), "yes")
    nodes = [
        node("If", ["yes"], ["z"], then_branch=body, else_branch=body, name="branch"),
        node("Attention", ["x", "x", "x"], ["a"], domain="com.microsoft", name="theirs"),
        node("Magic", ["a"], ["b"], domain="own", name="magic"),
        node("Einsum", ["x", "w"], ["y"], equation="...i,ij->...j", name="dots"),
    ]
    found = count(tmp_path, nodes, [yes, tensor("w", 3, 3)], (1, 3))
    assert found.uncounted == ["branch (If)", "theirs (Attention)", "magic (Magic)", "dots (Einsum)"]
    assert found.operators["own.Magic"] == 1


def qdq(source: str, result: str) -> list[Any]:
    return [
        node("QuantizeLinear", [source, "scale", "zero"], [f"{result}_q"]),
        node("DequantizeLinear", [f"{result}_q", "scale", "zero"], [result]),
    ]


QUANTIZATION = [tensor("scale"), numpy_helper.from_array(np.array(0, np.uint8), "zero")]
WEIGHT = [
    numpy_helper.from_array(np.ones((6, 4, 3, 3), np.int8), "w8"),
    tensor("one"),
    numpy_helper.from_array(np.array(0, np.int8), "zero8"),
]


@pytest.mark.parametrize("quantized_output", [True, False])
def test_what_lies_between_quantize_and_dequantize_is_int8_where_a_kernel_is(tmp_path, quantized_output):
    nodes = [
        *qdq("x", "xd"),
        node("DequantizeLinear", ["w8", "one", "zero8"], ["w"]),
        node("Conv", ["xd", "w"], ["c"], name="conv"),
        node("Relu", ["c"], ["r"], name="relu"),
        *(qdq("r", "d") if quantized_output else [node("Identity", ["r"], ["d"])]),
        node("Softmax", ["d"], ["y"], name="softmax"),
    ]
    found = count(tmp_path, nodes, [*QUANTIZATION, *WEIGHT], (1, 4, 5, 5))
    macs = 6 * 9 * 36
    if quantized_output:
        assert (found.macs, found.float_operators) == ({"int8": macs}, ["softmax (Softmax)"])
    else:
        assert (found.macs, found.float_operators) == (
            {"float32": macs},
            ["conv (Conv)", "relu (Relu)", "softmax (Softmax)"],
        )
    assert found.weights_read_bytes == 6 * 36 + 4 + 1 + 4 + 1


def test_channels_that_an_export_appends_are_not_counted(tmp_path):
    """Nor is a copy an operator in float."""
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["integers"]),
        node("Pad", ["integers", "pads", "zero"], ["padded"]),
        node("DequantizeLinear", ["padded", "scale", "zero"], ["data"]),
        node("Conv", ["data", "w"], ["made"]),
        node("Max", ["made"], ["y"]),
    ]
    pads = numpy_helper.from_array(np.array([0, 0, 0, 0, 0, 1, 0, 0]), "pads")
    scale = numpy_helper.from_array(np.float32(1), "scale"), numpy_helper.from_array(np.uint8(0), "zero")
    found = count(tmp_path, nodes, [tensor("w", 6, 4, 3, 3), pads, *scale], (1, 3, 8, 8))
    assert (sum(found.macs.values()), found.uncounted) == (6 * 36 * 3 * 9, [])
    assert [name for name in found.float_operators if "Max" in name or "Pad" in name] == []
    nodes[3] = node("Conv", ["data", "w"], ["made"], group=4)
    found = count(tmp_path, nodes, [tensor("w", 4, 1, 3, 3), pads, *scale], (1, 3, 8, 8))
    assert (sum(found.macs.values()), found.uncounted) == (3 * 36 * 9, []), "depthwise"
    pads = numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads")
    nodes[3] = node("Conv", ["data", "w"], ["made"], group=2)
    found = count(tmp_path, nodes, [tensor("w", 6, 2, 3, 3), pads, *scale], (1, 4, 8, 8))
    assert (sum(found.macs.values()), found.uncounted) == (6 * 64 * 2 * 9, []), "a border alone, and two groups"


def test_integer_operators_are_int8(tmp_path):
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        node("MatMulInteger", ["q", "w8", "z"], ["i"]),
        node("Cast", ["i"], ["f"], to=FLOAT),
        node("Mul", ["f", "s"], ["y"], name="rescale"),
    ]
    weight = numpy_helper.from_array(np.ones((4, 3), np.int8), "w8")
    found = count(tmp_path, nodes, [weight], (1, 4))
    assert (found.macs, found.float_operators) == ({"int8": 12}, ["rescale (Mul)"])
    assert stored_bytes(tmp_path / "a.onnx") == {"int8": 12}


def test_products_of_packed_weights_are_counted_as_float(tmp_path):
    """Two weights in a byte, 16 in a block, which has a scale."""
    product = helper.make_node(
        "MatMulNBits", ["x", "w4", "scales"], ["y"], domain="com.microsoft", K=32, N=3, bits=4, block_size=16
    )
    packed = numpy_helper.from_array(np.zeros((3, 2, 8), np.uint8), "w4")
    graph = helper.make_graph(
        [product],
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["N", 32])],
        [helper.make_tensor_value_info("y", FLOAT, ["N", 3])],
        [packed, tensor("scales", 3, 2)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "a.onnx")
    found = count_onnx(tmp_path / "a.onnx", {"x": np.ones((1, 32), np.float32)})
    assert (found.macs, found.uncounted) == ({"float32": 96}, [])
    assert found.weights_read_bytes == 3 * 16 + 6 * 4


def test_tables_are_read_by_the_row_even_where_they_are_computed_once(tmp_path):
    nodes = [
        node("Cast", ["x"], ["ids"], to=TensorProto.INT64),
        node("Cast", ["t8"], ["t"], to=FLOAT),
        node("Mul", ["t", "one"], ["table"], name="folded"),
        node("Gather", ["table", "ids"], ["y"]),
    ]
    table = numpy_helper.from_array(np.ones((1000, 4), np.int8), "t8")
    found = count(tmp_path, nodes, [table, tensor("one", 1, 4)], (1, 3))
    assert found.float_operators == []
    assert found.weights_read_bytes == 3 * 4 * 4  # of float32: the table is scaled when the file is loaded


def test_a_file_for_a_batch_of_four_counts_one_sample(tmp_path):
    graph = helper.make_graph(
        [node("MatMul", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, [4, 5])],
        [helper.make_tensor_value_info("y", FLOAT, [4, 3])],
        [tensor("w", 5, 3)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "a.onnx")
    assert count_onnx(tmp_path / "a.onnx", {"x": np.ones((1, 5), np.float32)}).macs == {"float32": 15}


class Net(nn.Module):
    """Convolution, recurrence, attention and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2, groups=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.lstm = nn.LSTM(14, 6, batch_first=True, bidirectional=True)
        self.query, self.out = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.up(self.conv(x).relu()).mean(1)
        states, _ = self.lstm(features)
        scores = torch.softmax(self.query(states) @ states.transpose(1, 2), -1)
        return self.out(scores @ states).mean(1)


@pytest.mark.filterwarnings("ignore")
def test_an_exported_network_counts_as_the_network(tmp_path):
    network, example = Net().eval(), torch.zeros(1, 1, 16, 16)
    torch.onnx.export(
        network, (example,), tmp_path / "a.onnx", dynamo=False, opset_version=17,
        input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
    )  # fmt: skip
    found, expected = count_onnx(tmp_path / "a.onnx", {"x": example.numpy()}), count_network(network, [example])
    assert found.macs == expected.macs and found.macs["float32"] > 10_000
    assert found.uncounted == expected.uncounted == []
