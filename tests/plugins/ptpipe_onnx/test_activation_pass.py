"""GELU and SiLU in files: ONNX Runtime runs one operator, also between integers, and the values stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from ptpipe_onnx.activation_pass import write_fusable_activations
from ptpipe_onnx.export import build_graph
from ptpipe_torch import BATCH, FunctionRef, Model, Recipe, Signature, TensorSpec, builder

from .test_qdq_passes import IMAGES_NCHW, Draft, kernels_of

Run = Callable[..., np.ndarray]
OPERATORS = {"erf": "Gelu", "tanh": "FastGelu"}
"""ONNX Runtime's."""


def gate(draft: Draft, x: str, form: str) -> str:
    """1 + erf(x / sqrt(2)), or the approximation by tanh."""
    if form == "erf":
        value = draft.node("Erf", [draft.node("Div", [x, draft.array(np.sqrt(2), np.float32)])])
    else:
        cubed = draft.node("Pow", [x, draft.array(3, np.float32)])
        inner = draft.node("Add", [x, draft.node("Mul", [draft.array(0.044715, np.float32), cubed])])
        value = draft.node("Tanh", [draft.node("Mul", [draft.array(np.sqrt(2 / np.pi), np.float32), inner])])
    return draft.node("Add", [value, draft.array(1, np.float32)])


def gelu(draft: Draft, x: str, form: str, halved: str = "gate") -> str:
    half, total = draft.array(0.5, np.float32), gate(draft, x, form)
    if halved == "gate":  # as torch exports it
        return draft.node("Mul", [x, draft.node("Mul", [half, total])])
    if halved == "input":
        return draft.node("Mul", [draft.node("Mul", [x, half]), total])
    return draft.node("Mul", [draft.node("Mul", [x, total]), half])


def check_same(model: onnx.ModelProto, run_onnx: Run, atol: float, inputs: np.ndarray = IMAGES_NCHW) -> onnx.ModelProto:
    """Check the values of the file with the pass: to the bit, and with all optimizations to `atol`."""
    content = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model))
    write_fusable_activations(content.graph)
    after = ir.serde.serialize_model(content)
    onnx.checker.check_model(after, full_check=True)
    expected = run_onnx(model.SerializeToString(), inputs)
    assert np.ptp(expected) > 100 * atol
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), inputs), expected)
    found = run_onnx(after.SerializeToString(), inputs, optimize=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    return after


@pytest.mark.parametrize("form", OPERATORS)
def test_a_gelu_of_floats_is_one_operator(form: str, run_onnx: Run, tmp_path: Path) -> None:
    draft = Draft()
    model = draft.finished(draft.node("Abs", [gelu(draft, draft.node("Sin", ["images"]), form)]))
    assert kernels_of(model, tmp_path).float.total() > 2, "ONNX Runtime fuses it: the pass has become useless"
    kernels = kernels_of(check_same(model, run_onnx, 1e-5), tmp_path)
    assert kernels.float == {"Sin": 1, OPERATORS[form]: 1, "Abs": 1}


@pytest.mark.parametrize("is_read_elsewhere", [True, False])
@pytest.mark.parametrize(("form", "halved"), [("erf", "gate"), ("erf", "input"), ("erf", "product"), ("tanh", "gate")])
def test_a_gelu_of_integers_is_one_operator(
    form: str, halved: str, is_read_elsewhere: bool, run_onnx: Run, tmp_path: Path
) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 100)
    result = draft.quantize(gelu(draft, value, form, halved), 0.04, 5)
    if is_read_elsewhere:
        result = draft.quantize(draft.node("Add", [value, result]), 0.09, 60)
    model = draft.finished(result)
    assert OPERATORS[form] not in kernels_of(model, tmp_path).float, "ONNX Runtime fuses it: the pass is useless"
    kernels = kernels_of(check_same(model, run_onnx, 0.0901 if is_read_elsewhere else 0.0401), tmp_path)
    assert kernels.float == {OPERATORS[form]: 1}
    assert kernels.integer.total() == is_read_elsewhere, "what else reads the tensor still reads integers"


def silu(draft: Draft, x: str) -> str:
    return draft.node("Mul", [draft.node("Sigmoid", [x]), x])


@pytest.mark.parametrize("is_read_elsewhere", [True, False])
def test_a_silu_of_integers_is_one_operator(is_read_elsewhere: bool, run_onnx: Run, tmp_path: Path) -> None:
    draft = Draft()
    value = draft.quantize("images", 0.05, 100)
    result = draft.quantize(silu(draft, value), 0.04, 5)
    if is_read_elsewhere:
        result = draft.quantize(draft.node("Add", [value, result]), 0.09, 60)
    model = draft.finished(result)
    assert "QuickGelu" not in kernels_of(model, tmp_path).float, "ONNX Runtime fuses it: the pass is useless"
    kernels = kernels_of(check_same(model, run_onnx, 0.0901 if is_read_elsewhere else 0.0401), tmp_path)
    assert kernels.float == {"QuickGelu": 1}
    assert kernels.integer.total() == is_read_elsewhere, "what else reads the tensor still reads integers"


def test_a_sigmoid_that_weights_another_tensor_stays(run_onnx: Run) -> None:
    draft = Draft()
    value, weighted = draft.quantize("images", 0.05, 100), draft.quantize("images", 0.02, 9)
    model = draft.finished(draft.node("Mul", [draft.node("Sigmoid", [value]), weighted]))
    assert "Max" not in [node.op_type for node in check_same(model, run_onnx, 1e-5).graph.node]


@pytest.mark.parametrize("is_before", [True, False])
def test_half_of_another_product_stays(is_before: bool, run_onnx: Run) -> None:
    """`y` is computed behind the gate, and can't be halved before it."""
    draft = Draft()
    y = draft.node("Sin", ["images"]) if is_before else ""
    halved = draft.node("Mul", [draft.array(0.5, np.float32), gate(draft, "images", "erf")])
    y = y or draft.node("Sin", ["images"])
    model = draft.finished(draft.node("Mul", [y, halved]))
    assert [node.op_type for node in check_same(model, run_onnx, 1e-5).graph.node] == [
        node.op_type for node in model.graph.node
    ]


class Perceptron(nn.Module):
    """GELU between linear layers, and as a transformer's layer has it."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.inner, self.gelu, self.outer = nn.Linear(8, 16), nn.GELU(approximate), nn.Linear(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        y_BLD: torch.Tensor = self.layer(self.outer(self.gelu(self.inner(x_BLD))))
        return y_BLD


@builder
def perceptron(*, approximate: str) -> nn.Module:
    return Perceptron(approximate)


@pytest.mark.parametrize(("approximate", "found"), [("none", {"Gelu": 2}), ("tanh", {"FastGelu": 1, "Gelu": 1})])
def test_what_torch_exports_has_the_form(approximate: str, found: dict[str, int], tmp_path: Path) -> None:
    x, y = (TensorSpec(name, "float32", (BATCH, "length", 8)) for name in ("x", "y"))
    recipe = Recipe(FunctionRef.to(perceptron, approximate=approximate), Signature((x,), (y,)))
    content = build_graph(Model.from_module(recipe, perceptron(approximate=approximate)), opset=18).model
    write_fusable_activations(content.graph)
    kernels = kernels_of(ir.serde.serialize_model(content), tmp_path)
    counts = {name.removeprefix("Bias"): number for name, number in kernels.float.items() if name.endswith("Gelu")}
    assert counts == found
    assert not kernels.float.keys() & {"Erf", "Tanh"}
