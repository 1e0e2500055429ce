"""Export with one trace of the network, where a second one would change nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from ptpipe_onnx import torch_exporter
from ptpipe_onnx.export import build_graph
from ptpipe_onnx.file_layers import layers_of
from ptpipe_onnx.quantization.nodes import NodeNames
from ptpipe_torch import BATCH, Model, Signature, TensorSpec


def described(model: ir.Model) -> Iterator[object]:
    """Yield what a graph computes; values by number, as the exporter's names hold numbers of its own."""
    numbers: defaultdict[ir.Value, int] = defaultdict(lambda: len(numbers))

    def source(value: ir.Value | None) -> object:
        if value is None or value.const_value is None:
            return None if value is None else numbers[value]
        return value.const_value.dtype, str(value.const_value.shape), value.const_value.tobytes()

    for node in model.graph:
        attributes = {name: str(of.value) for name, of in node.attributes.items()}
        inputs = [source(value) for value in node.inputs]
        if node.op_type == "Reshape":  # a size that stays is written as 0 or as -1
            attributes, inputs = {}, inputs[:1]
        outputs = [(numbers[value], str(value.shape), value.dtype) for value in node.outputs]
        yield node.domain, node.op_type, attributes, inputs, outputs
    yield [(value.name, str(value.shape), numbers[value]) for value in (*model.graph.inputs, *model.graph.outputs)]
    yield len(model.graph.initializers), sorted(name for name in model.graph.initializers if "weight" in name)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each exported network had to be traced again."""
    found: list[bool] = []
    needs = torch_exporter._needs_decomposition

    def recorded(*arguments: Any) -> bool:
        found.append(needs(*arguments))
        return found[-1]

    monkeypatch.setattr(torch_exporter, "_needs_decomposition", recorded)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["cnn", "mobile", "attention"])
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("qat", [False, True])
def test_int8_networks_are_traced_once(
    name: str,
    backend: str,
    qat: bool,
    int8_model: Callable[..., Model],
    traces: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = int8_model(name, backend, qat=qat)
    once = build_graph(model, 20).model
    assert traces == [False]
    for pass_ in ("_needs_decomposition", "_needs_promotion"):
        monkeypatch.setattr(torch_exporter, pass_, lambda *arguments: True)
    for step in ("decompose", "_decompose_each"):
        monkeypatch.setattr(torch_exporter, step, lambda *arguments: None)
    assert list(described(once)) == list(described(build_graph(model, 20).model))


def test_float_networks_are_traced_once(
    float_model: Callable[[str], Model], traces: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = float_model("mobile")  # batch norms, and ReLU6 in place
    once = build_graph(model, 20).model
    assert traces == [False]
    for step in ("decompose", "_decompose_each"):
        monkeypatch.setattr(torch_exporter, step, lambda *arguments: None)
    twice = build_graph(model, 20).model
    assert traces == [False, True]
    assert list(described(once)) == list(described(twice))


class Spectrum(nn.Module):
    """The front end of networks of sounds, whose complex numbers are reshaped."""

    def forward(self, x_NT: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(16)
        spectrum_NFT = torch.stft(x_NT, 16, 8, window=window, return_complex=True)
        return spectrum_NFT.reshape(x_NT.shape[0], 9, -1).abs()


def test_complex_numbers(run_onnx: Callable[..., np.ndarray], traces: list[bool]) -> None:
    outputs = TensorSpec("outputs", "float32", (BATCH, 9, 9))
    model = torch_exporter.export(Spectrum(), Signature((TensorSpec("x", "float32", (BATCH, 64)),), (outputs,)), 20)
    assert traces == [True]
    x_NT = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    serialized = ir.to_proto(model).SerializeToString()
    np.testing.assert_allclose(run_onnx(serialized, x_NT.numpy()), Spectrum()(x_NT).numpy(), atol=1e-5)


class MixedTypes(nn.Module):
    """Operators whose arguments are of several types, or of another one than the result's."""

    def forward(self, x_NK: torch.Tensor) -> torch.Tensor:
        positive_NK = x_NK > 0
        whole_NK = positive_NK + positive_NK.long()
        sums_N1 = positive_NK.sum(1, keepdim=True)
        return torch.cat(
            [whole_NK / 2, x_NK * positive_NK, whole_NK + 0.5, torch.sqrt(sums_N1), whole_NK.float() + 1], 1
        )


def test_types_are_promoted_where_an_operator_mixes_them(run_onnx: Callable[..., np.ndarray]) -> None:
    """ONNX has no operator of two types; torch.export leaves the conversion to the operator."""
    outputs = TensorSpec("outputs", "float32", (BATCH, 21))
    network = MixedTypes().eval()
    model = torch_exporter.export(network, Signature((TensorSpec("x", "float32", (BATCH, 5)),), (outputs,)), 20)
    x_NK = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    serialized = ir.to_proto(model).SerializeToString()
    np.testing.assert_allclose(run_onnx(serialized, x_NK.numpy()), network(x_NK).numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("network", "is_needed"), [(MixedTypes(), True), (nn.Sequential(nn.Linear(5, 3), nn.GELU()), False)]
)
def test_types_are_promoted_only_where_it_changes_an_operator(network: nn.Module, is_needed: bool) -> None:
    program = torch.export.export(network.eval(), (torch.zeros(2, 5),))
    assert torch_exporter._needs_promotion(program.graph_module) is is_needed


def test_no_other_operator_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the one of an export that runs all of them."""
    run, names = torch.fx.Interpreter.run_node, []

    def recorded(interpreter: Any, node: torch.fx.Node) -> Any:
        if isinstance(interpreter, torch_exporter._TypePromotionInterpreter):
            names.append(str(node.target))
        return run(interpreter, node)

    monkeypatch.setattr(torch.fx.Interpreter, "run_node", recorded)
    network = nn.Sequential(nn.Linear(5, 5), nn.GELU(), MixedTypes(), nn.Linear(21, 3)).eval()
    ends = [TensorSpec(name, "float32", (BATCH, size)) for name, size in (("x", 5), ("y", 3))]
    signature = Signature((ends[0],), (ends[1],))
    selected = torch_exporter.export(network, signature, 20)
    assert {"aten.add.Tensor", "aten.div.Tensor", "aten.sum.dim_IntList"} < set(names)
    assert not {"aten.linear.default", "aten.gelu.default", "aten.cat.default"} & set(names)
    monkeypatch.setattr(torch_exporter, "_is_promoted", lambda *arguments: True)
    assert list(described(selected)) == list(described(torch_exporter.export(network, signature, 20)))
    assert {"aten.linear.default", "aten.gelu.default", "aten.cat.default"} < set(names)


class TinyConstants(nn.Module):
    """Adds and multiplies by what is nearly 0 and 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 0.0) * 1.0 / (x.norm(dim=1, keepdim=True) + 1e-8) * 1.000004


def test_constants_that_are_nearly_0_or_1_stay(run_onnx: Callable[..., np.ndarray]) -> None:
    signature = Signature((TensorSpec("x", "float32", (BATCH, 3)),), (TensorSpec("y", "float32", (BATCH, 3)),))
    model = torch_exporter.optimize(torch_exporter.export(TinyConstants().eval(), signature, 18))
    assert [node.op_type for node in model.graph if node.op_type != "Identity"] == ["ReduceL2", "Add", "Div", "Mul"]
    x = np.float32([[0, 0, 0], [1, 2, 3]])
    found = run_onnx(ir.to_proto(model).SerializeToString(), x, optimize=True)
    np.testing.assert_allclose(found, TinyConstants()(torch.from_numpy(x)).numpy(), rtol=1e-6)


class Branch(nn.Module):
    """Takes one of two branches, of which one returns what is outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return torch.cond(x.sum() > 0, lambda a: a.clone(), lambda a: a * 2, (y,)) * 3


def test_a_branch_may_return_what_is_outside_of_it(run_onnx: Callable[..., np.ndarray]) -> None:
    signature = Signature((TensorSpec("x", "float32", (BATCH, 3)),), (TensorSpec("y", "float32", (BATCH, 3)),))
    model = torch_exporter.optimize(torch_exporter.export(Branch().eval(), signature, 18))
    serialized = ir.to_proto(model).SerializeToString()
    onnx.checker.check_model(serialized, full_check=True)
    for x in (np.float32([[1, 2, 3]]), np.float32([[1, 2, -30]])):
        np.testing.assert_array_equal(run_onnx(serialized, x), Branch()(torch.from_numpy(x)).numpy())


def test_layers_on_sequences_keep_their_names() -> None:
    network = nn.Sequential(nn.Linear(5, 3, bias=False), nn.ReLU(), nn.Linear(3, 2)).eval()
    ends = [TensorSpec(name, "float32", (BATCH, 4, size)) for name, size in (("x", 5), ("y", 2))]
    exported = torch_exporter.export(network, Signature((ends[0],), (ends[1],)), 18)
    graph = torch_exporter.optimize(exported).graph
    assert {"0.weight.transposed", "2.weight.transposed"} <= set(graph.initializers)
    assert [layer.name for layer in layers_of(graph)] == ["0", "2"]
    names = NodeNames(ir.to_proto(exported).graph)
    products = [node for node in ir.to_proto(exported).graph.node if node.op_type == "MatMul"]
    assert [names.layer(node) for node in products] == ["0", "2"]
