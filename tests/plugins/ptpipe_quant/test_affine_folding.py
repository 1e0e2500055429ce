"""Constants that a layer's output is multiplied by, or that are added to it, become part of its weight and bias."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import (
    AnalyzeConfig,
    CalibrateConfig,
    ConvertConfig,
    PrepareConfig,
    PrepareQatConfig,
    analyze,
    calibrate,
    convert,
    prepare,
    prepare_qat,
)
from ptpipe_quant.affine_folding import take_output_scales
from ptpipe_quant.trace import trace_network
from ptpipe_torch import BATCH, Data, TensorSpec, builder
from ptpipe_torch.int8.fx import fold_batch_norms
from ptpipe_torch.int8.output_scales import fold_output_scales, insert_output_scales, multiply_outputs

from ...signatures import pictures
from .conftest import BACKENDS, NUM_CLASSES, accuracy, logits_of, make_model, train

SHAPE_CHW = (3, 8, 8)


class Affine(nn.Module):
    """A convolution and a linear layer over channels last, and what `body` does to their outputs."""

    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body = body
        self.conv, self.linear = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.Linear(3, 6)
        self.norm, self.drop, self.second = nn.BatchNorm2d(6), nn.Dropout(0.5), nn.Linear(3, 6)
        self.second.weight = self.linear.weight
        self.gamma, self.gains = nn.Parameter(torch.linspace(-1, 2, 6)), nn.Parameter(torch.tensor([0.5, 3.0]))
        self.register_buffer("offset", torch.linspace(0, 1, 6).view(6, 1, 1))
        self.positions, self.ones = nn.Parameter(torch.linspace(0.5, 1.5, 8)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def arithmetic(body: Callable[[Any, torch.Tensor], torch.Tensor], purpose: Literal["static", "qat"] = "static") -> int:
    """Return how many products and sums are left, after a check that the network is the same function."""
    torch.manual_seed(1)
    network, x = Affine(body).eval(), torch.randn(2, *SHAPE_CHW)
    expected = network(x)
    graph = trace_network(network, pictures(SHAPE_CHW), purpose=purpose).graph
    torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-5)
    words = ("mul", "add", "sub", "div")
    return sum(any(word in node.name for word in words) for node in graph.graph.nodes)


FOLDED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "number": lambda n, x: n.conv(x).mul(0.1),
    "layer scale": lambda n, x: n.gamma * n.linear(x.permute(0, 2, 3, 1)),
    "behind moves": lambda n, x: n.drop(n.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)) * n.gamma[:, None, None],
    "flattened": lambda n, x: n.conv(x).flatten(2).transpose(1, 2) * n.gamma,
    "batch norm": lambda n, x: torch.mul(n.norm(n.conv(x)), n.gamma.view(1, -1, 1, 1)),
    "gain": lambda n, x: n.conv(x) * n.gains[1],
    "sum": lambda n, x: n.conv(x) + n.offset,
    "number of a sum": lambda n, x: 1 + n.linear(x.permute(0, 2, 3, 1)),
    "both": lambda n, x: n.conv(x) * 0.5 + n.offset,
    "difference": lambda n, x: n.conv(x) - n.offset,
    "quotient": lambda n, x: n.conv(x) / 4,
}
LEFT: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "by position": lambda n, x: n.conv(x) * n.positions,
    "by position, equal until it is trained": lambda n, x: n.conv(x) * n.ones,
    "larger": lambda n, x: n.conv(x)[..., :1].mean(1, keepdim=True) * n.gamma[:, None, None],
    "of inputs": lambda n, x: n.conv(x) * x.mean(1, keepdim=True),
    "an activation between": lambda n, x: n.conv(x).relu() * n.gamma[:, None, None],
    "from a number": lambda n, x: 1 - n.conv(x),
}


@pytest.mark.parametrize("name", FOLDED)
def test_constants_become_part_of_the_layer(name: str) -> None:
    assert arithmetic(FOLDED[name]) == 0


@pytest.mark.parametrize("name", LEFT)
def test_what_is_another_constant_at_another_place_stays(name: str) -> None:
    assert arithmetic(LEFT[name]) == 1


def test_an_output_that_something_else_reads_stays() -> None:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        y = n.conv(x)
        return torch.cat([y, y * 0.1])

    assert arithmetic(body) == 1


def test_layers_of_one_weight_are_scaled_apart() -> None:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        return torch.cat([n.linear(x) * n.gamma, n.second(x)])

    assert arithmetic(body) == 0


TAKEN = {
    "number": 0.1, "layer scale": "gamma", "behind moves": "gamma", "flattened": "gamma", "batch norm": "gamma",
    "quotient": 0.25,
}  # fmt: skip
"""What a layer's output is multiplied by in training, by the keys of `FOLDED`."""


@pytest.mark.parametrize("name", {**FOLDED, **LEFT})
def test_in_training_layers_take_factors_that_stay_parameters(name: str) -> None:
    torch.manual_seed(1)
    network, x = Affine({**FOLDED, **LEFT}[name]).eval(), torch.randn(2, *SHAPE_CHW)
    expected = network(x)
    graph = trace_network(network, pictures(SHAPE_CHW), purpose="qat").graph
    scales = take_output_scales(graph)
    factors = [scale[0] if isinstance(scale, tuple) else scale for scale in scales.values()]
    assert factors == ([TAKEN[name]] if name in TAKEN else [0.5] if name == "both" else [])
    graph = fold_batch_norms(graph)
    insert_output_scales(graph, scales)
    torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-5)
    assert all(dict(graph.named_parameters())[name] is network.gamma for name in factors if isinstance(name, str))
    fold_output_scales(graph)
    assert not graph.graph.find_nodes(op="call_function", target=multiply_outputs)
    torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("behind", [nn.ReLU(), nn.BatchNorm2d(6)])
def test_what_a_layer_would_be_fused_with_is_not_moved_in_front_of_a_factor(behind: nn.Module) -> None:
    network = Affine(lambda n, x: behind(n.conv(x) * n.gamma[:, None, None]))
    network.behind = behind
    graph = trace_network(network.eval(), pictures(SHAPE_CHW), purpose="qat").graph
    assert take_output_scales(graph) == {}


def test_a_product_that_is_larger_than_the_output_stays() -> None:
    network = nn.Sequential(nn.Linear(4, 1), Larger()).eval()
    x = torch.randn(2, 5, 4)
    graph = trace_network(network, (TensorSpec("x", "float32", (BATCH, 5, 4)),)).graph
    assert any("mul" in node.name for node in graph.graph.nodes)
    torch.testing.assert_close(graph(x), network(x))


class Larger(nn.Module):
    """Makes seven channels of one."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.linspace(1, 2, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors


class Residual(nn.Module):
    """Residual scaling, by a number and by layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.mix = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self.gamma, self.head = nn.Parameter(torch.linspace(-0.5, 0.5, 8)), nn.Linear(8 * 36, NUM_CLASSES)
        self.last, self.norm, self.gain = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = x + self.conv(x) * 0.2
        x = x + self.norm(self.last(x)) * self.gain
        x = x + (self.gamma * self.mix(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return self.head(x.flatten(1))


@builder
def residual() -> nn.Module:
    return Residual()


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_branches_are_trained_as_int8_layers(
    backend: Any, learned: bool, digits: Data, ctx: Context, metrics: Any
) -> None:
    config = PrepareQatConfig(backend=backend, learned_step_size=learned, batch_norm="fold" if learned else "train")
    prepared = prepare_qat(config, ctx, make_model(residual))
    assert metrics()["gradient_difference"] < 1e-3
    trained = train(prepared, digits, lr=0.05, epochs=3)
    assert not torch.equal(trained.tensors["gamma"], prepared.tensors["gamma"])
    int8 = convert(ConvertConfig(), ctx, trained)
    network: Any = int8.build()
    for layer in (network.conv, network.mix, network.last):
        used = layer._weight_bias()[0].int_repr().abs().flatten(1).amax(1)
        assert learned or (used >= 64).all()
    errors = analyze(AnalyzeConfig(split="test", num_samples=64), ctx, trained, digits)
    assert learned or all(layer.weight is None or layer.weight.sqnr_db > 25 for layer in errors.layers)
    assert "gamma" in int8.tensors
    assert "gamma" not in (int8.int8_tensors or ())
    assert [name for name in prepared.build().graph.nodes if "mul" in name.name] == []
    export_onnx(ExportConfig(num_samples=64), ctx, int8, digits)
    assert (metrics()["num_int8_layers"], metrics()["num_float_nodes"]) == (5, 0)
    assert metrics()["max_layer_difference_steps"] <= 1
    assert accuracy(logits_of(int8, digits), digits) > 0.9


def test_a_stored_model_of_a_former_version_has_its_products(ctx: Context) -> None:
    model = make_model(residual)
    module = prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, model).recipe.prepare[0]
    former = {name: value for name, value in module.arguments.items() if name != "scaled_layers"}
    graph = module.resolve("transform")(model.build(), **former)
    assert [node.target for node in graph.graph.nodes if "mul" in node.name] == [operator.mul] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_branches_are_int8(backend: Any, digits: Data, ctx: Context, metrics: Any) -> None:
    prepared = prepare(PrepareConfig(backend=backend), ctx, make_model(residual))
    int8 = convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, digits).model)
    assert "gamma" not in int8.tensors
    file = export_onnx(ExportConfig(num_samples=64), ctx, int8, digits)
    assert file.path.exists()
    assert (metrics()["num_int8_layers"], metrics()["num_float_nodes"]) == (5, 0)
    assert metrics()["max_layer_difference_steps"] <= 1


def test_layers_that_stay_float_are_scaled_as_well(digits: Data, ctx: Context) -> None:
    model = make_model(residual)
    prepared = prepare_qat(PrepareQatConfig(skip=["conv", "last", "norm"]), ctx, model)
    int8 = convert(ConvertConfig(), ctx, train(prepared, digits, lr=0.05, epochs=2))
    assert accuracy(logits_of(int8, digits), digits) > 0.85
    export_onnx(ExportConfig(num_samples=64), ctx, int8, digits)


def test_a_network_traced_by_torch_export_has_them_as_well(ctx: Context) -> None:
    prepared = prepare_qat(PrepareQatConfig(route="export"), ctx, make_model(residual))
    assert {"gamma", "gain"} <= prepared.tensors.keys()
    assert [node for node in prepared.build().graph.nodes if "mul" in node.name] == []


def test_a_factor_of_zero_behind_a_batch_norm_is_learned(digits: Data, ctx: Context) -> None:
    network = residual()
    network.gain.data.zero_()
    model = make_model(residual).with_state_dict_of(network)
    trained = train(prepare_qat(PrepareQatConfig(), ctx, model), digits, lr=0.05)
    assert trained.tensors["gain"] != 0
    assert trained.tensors["last.bn.running_var"].min() > 1e-3
