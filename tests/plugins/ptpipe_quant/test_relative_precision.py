"""What needs relative precision is left float, and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe_quant import float_nodes
from ptpipe_quant.float_nodes import operators_on_constants, operators_to_leave_float
from ptpipe_quant.relative_precision import operators_of_relative_precision
from ptpipe_quant.trace import trace_network
from ptpipe_quant.transforms import prepare_qat, prepare_static, to_int8
from ptpipe_torch.int8.engine import quantized_engine

from ...processor import reduced
from ...signatures import pictures, stored_pictures
from .conftest import BACKENDS
from .spellings import INPUT_SHAPE_CHW, Net, conv, logits

Step = Callable[[torch.Tensor], torch.Tensor]


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    centered = x - x.mean(dim=1, keepdim=True)
    return centered / torch.sqrt(centered.square().mean(dim=1, keepdim=True) + 1e-6)


def response_norm(x: torch.Tensor) -> torch.Tensor:
    norm = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
    return x * (norm / (norm.mean(1, keepdim=True) + 1e-6)) + x


def power(x: torch.Tensor) -> torch.Tensor:
    return x * (x.var(1, keepdim=True) + 1e-6) ** -0.5


def softmax(x: torch.Tensor) -> torch.Tensor:
    exponentials = torch.exp(x)
    return exponentials / exponentials.sum(1, keepdim=True)


def decibels(x: torch.Tensor) -> torch.Tensor:
    return 10 * torch.log10(x.abs().clamp(min=1e-10)) + 3


def local_mean(x: torch.Tensor) -> torch.Tensor:
    return (F.avg_pool2d(F.relu(x).pow(3), 3, 1, 1) + 1e-6) ** (1 / 3)


CASES: dict[Step, set[str]] = {
    rms: {"pow_1", "mean", "add", "rsqrt", "mul"},
    layer_norm: {"mean", "sub", "square", "mean_1", "add", "sqrt", "truediv"},
    response_norm: {"norm", "mean", "add", "truediv", "mul"},
    power: {"var", "add", "pow_1", "mul"},
    softmax: {"exp", "sum_1", "truediv"},
    decibels: {"abs_1", "clamp", "log10", "mul", "add"},
    local_mean: {"pow_1", "avg_pool2d", "add", "pow_2"},
}


def found_in(network: nn.Module, route: str = "fx") -> set[str]:
    graph = trace_network(network, pictures(INPUT_SHAPE_CHW), route=route).graph
    return {node.name for node in operators_of_relative_precision(graph, set(operators_on_constants(graph)))}


def with_step(step: Step) -> Net:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        return logits(n, n.conv(step(n.stem(x))))

    torch.manual_seed(0)
    return Net(body, conv=conv()).eval()


@pytest.mark.parametrize("step", CASES)
def test_normalizations_and_logarithms(step: Step) -> None:
    assert found_in(with_step(step)) == CASES[step]


@pytest.mark.parametrize("step", [rms, layer_norm])
def test_they_are_found_in_an_exported_graph(step: Step) -> None:
    assert len(found_in(with_step(step), "export")) == len(CASES[step])


def test_scale_and_shift_by_parameters_belong_to_a_normalization() -> None:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        return logits(n, n.conv(n.gamma[:, None, None] * layer_norm(n.stem(x)) + n.beta[:, None, None]))

    network = Net(body, conv=conv())
    network.gamma, network.beta = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
    assert found_in(network.eval()) == {*CASES[layer_norm], "mul", "add_1"}


POOLINGS: dict[str, Any] = {
    "window": lambda x: F.avg_pool2d(x, (x.size(-2), x.size(-1))),
    "mean": lambda x: x.mean((2, 3)),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
    "layer": nn.AdaptiveAvgPool2d(1),
    "window_layer": nn.AvgPool2d(12),
}


def generalized_mean(n: Any, x: torch.Tensor) -> torch.Tensor:
    powers = torch.pow(F.relu(n.stem(x)).clamp(min=1e-6), exponent=n.p)
    return n.fc((n.pool(powers) ** (1.0 / n.p)).flatten(1))


def pooled(name: str, *, is_trained: bool = True) -> Net:
    torch.manual_seed(0)
    network = Net(generalized_mean)
    network.p = nn.Parameter(torch.full((1,), 3.0)) if is_trained else 3.0
    network.pool = POOLINGS[name]
    return network.eval()


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("name", POOLINGS)
def test_generalized_mean_pooling(name: str, is_trained: bool) -> None:
    found = found_in(pooled(name, is_trained=is_trained))
    assert {"clamp", "pow_1", "pow_2"} < found and len(found) >= 5  # the pooling, and the shape of its result


def test_generalized_mean_pooling_has_gradients_in_qat() -> None:
    options = {"inputs": stored_pictures(INPUT_SHAPE_CHW), "backend": "fbgemm", "weights": "per_channel", "skip": ()}
    with quantized_engine("fbgemm"):
        network = prepare_qat(pooled("window"), **options, narrow_weights=True, batch_norm="fold", freeze_at=0.75)
        network.train()
        for _ in range(2):  # the first one makes the ranges
            network(torch.randn(4, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(1))).sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in network.parameters())


def test_what_other_operators_read_too_is_no_part_of_it() -> None:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.stem(x)
        stream = x + F.relu(n.conv(x))
        return logits(n, n.conv(rms(stream)) + stream)

    assert found_in(Net(body, conv=conv()).eval()) == {"pow_1", "mean", "add_1", "rsqrt", "mul"}


@pytest.mark.parametrize("step", [lambda x: x / 4, lambda x: F.relu6(x + 3) / 6, lambda x: x**2 + x.mean(1, True)])
def test_other_arithmetic_is_left_alone(step: Step) -> None:
    assert found_in(with_step(step)) == set()


def test_a_temperature_is_no_divisor_of_that_kind() -> None:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        return logits(n, n.conv(n.stem(x) / n.temperature.exp()))

    network = Net(body, conv=conv())
    network.temperature = nn.Parameter(torch.ones(1))
    assert found_in(network.eval()) == set()


def filtered(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.before(x)
    return logits(n, n.stem(torch.log(torch.matmul(x.square(), n.bank) + 1e-6)))


@pytest.mark.parametrize(("is_first", "is_fixed"), [(True, True), (False, True), (True, False)])
def test_a_fixed_filter_bank_in_front_of_a_network(is_first: bool, is_fixed: bool) -> None:
    network = Net(filtered, before=nn.Identity() if is_first else conv(3, 3))
    bank = torch.rand(12, 12)
    if is_fixed:
        network.register_buffer("bank", bank)
    else:
        network.bank = nn.Parameter(bank)
    expected = {"add", "log"} | ({"square", "bank_1"} if is_first and is_fixed else set())
    assert found_in(network.eval()) == expected


def halves(part: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> Step:
    def power(x: torch.Tensor) -> torch.Tensor:
        real, imaginary = part(x)
        return real**2 + imaginary**2

    return power


POWERS: dict[str, Step] = {
    "slices": halves(lambda x: (x[:, :4], x[:, 4:])),
    "chunk": halves(lambda x: x.chunk(2, 1)),
    "split": halves(lambda x: torch.split(x, [4, 4], 1)),
    "tensor_split": halves(lambda x: x.tensor_split(2, 1)),
    "narrow": halves(lambda x: (x.narrow(1, 0, 4), torch.narrow(x, 1, 4, 4))),
    "select": halves(lambda x: (x.unflatten(1, (2, 4)).select(1, 0), x.unflatten(1, (2, 4)).select(1, 1))),
    "unbind": halves(lambda x: x.unflatten(1, (2, 4)).unbind(1)),
    "movedim": lambda x: x.unflatten(1, (2, 4)).movedim(1, -1).square().sum(-1),
    "moveaxis": lambda x: torch.moveaxis(x.unflatten(1, (2, 4)), 1, -1).square().sum(-1),
    "swapaxes": lambda x: x.unflatten(1, (2, 4)).swapaxes(0, 1).square().sum(0),
    "swapdims": lambda x: torch.swapdims(x.unflatten(1, (2, 4)), 0, 1).square().sum(0),
    "norm": lambda x: x.unflatten(1, (2, 4)).norm(dim=1),
}


EXPORTED = ("split", "movedim", "swapaxes", "norm")


@pytest.mark.parametrize(
    ("name", "route"), [*((name, "fx") for name in POWERS), *((name, "export") for name in EXPORTED)]
)
def test_a_spectrogram_is_float_from_the_input_on(name: str, route: str) -> None:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        frames = F.pad(x, (2, 2, 0, 0), mode="reflect").flatten(2).unfold(-1, 16, 8)  # (batch, 3, 23, 16)
        spectrum = torch.matmul(frames, n.bank).permute(0, 3, 1, 2)
        return logits(n, n.stem(torch.log(POWERS[name](spectrum) + 1e-6)))

    network = Net(body)
    network.stem = conv(4, 8)
    network.register_buffer("bank", torch.rand(16, 8))
    graph = trace_network(network.eval(), pictures(INPUT_SHAPE_CHW), route=route).graph
    nodes = [node.name for node in graph.graph.nodes if node.op.startswith("call") and node.target != "size"]
    assert set(nodes[: nodes.index("stem")]) <= {node.name for node in operators_to_leave_float(graph)}


def turned(n: Any, x: torch.Tensor) -> torch.Tensor:
    """Features turned by the angles of their positions, as rotary embeddings do."""
    x = n.stem(x).flatten(2)
    angles = torch.matmul(
        torch.cumsum(torch.ones_like(x[:, :1]), 2).transpose(1, 2).float(), n.frequencies.to(x.device)
    )
    angles = torch.cat([angles, angles], dim=-1).transpose(1, 2)
    return logits(n, n.conv((x * angles.cos() + x.flip(1) * angles.sin()).unflatten(2, (12, 12))))


@pytest.mark.parametrize("is_fixed", [True, False])
def test_angles_and_the_product_of_positions_and_frequencies(is_fixed: bool) -> None:
    network = Net(turned, conv=conv())
    if is_fixed:
        network.register_buffer("frequencies", torch.rand(1, 4))
    else:
        network.frequencies = nn.Parameter(torch.rand(1, 4))
    found = found_in(network.eval())
    assert {"cos", "sin", "cat"} < found
    assert any(name.startswith("frequencies") for name in found) == is_fixed
    assert not found & {"mul", "mul_1", "add"}


def test_angles_of_inputs_in_front_of_a_network() -> None:
    def body(n: Any, x: torch.Tensor) -> torch.Tensor:
        angles = 2 * torch.pi * x.flatten(2).transpose(1, 2) @ n.directions
        features = torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1).transpose(1, 2)
        return logits(n, n.stem(features.unflatten(2, (12, 12))))

    network = Net(body)
    network.register_buffer("directions", torch.randn(3, 8))
    network.stem = conv(16, 8)
    assert {"mul", "directions_1", "sin", "cos"} <= found_in(network.eval())


def rounding(step: Step, backend: str) -> float:
    """The root mean square of the error of int8, relative to the logits' spread; of pixels that differ 300-fold."""
    network = with_step(step)
    nn.init.zeros_(network.stem.bias)
    scales = torch.logspace(0, 2.5, 12)[:, None]
    x = scales * torch.randn(8, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(1))
    options = {"inputs": stored_pictures(INPUT_SHAPE_CHW), "backend": backend, "weights": "per_channel"}
    with quantized_engine(backend), torch.no_grad(), warnings.catch_warnings(action="ignore"):
        expected = network(x)
        options |= {"narrow_weights": reduced(backend), "skip": ("stem",), "observer": "min_max"}
        prepared = prepare_static(network, **options, calibrating=False)
        prepared(x)
        found = to_int8(prepared, backend=backend)(x)
    return float((found - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize(("step", "limit"), [(rms, 0.04), (layer_norm, 0.04), (local_mean, 0.08)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_values_survive(step: Step, limit: float, backend: str) -> None:
    with patch.object(float_nodes, "operators_of_relative_precision", lambda *_: []):
        before = rounding(step, backend)
    assert before > 0.1
    assert rounding(step, backend) < limit
