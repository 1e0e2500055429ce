"""Ranges end where the readers of a tensor tell no values apart any more: calibrated, trained and converted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe_quant.transforms import prepare_qat, prepare_static
from ptpipe_torch.int8.decomposed import DEQUANTIZE
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.int8.layer_parity import quantize_nodes
from ptpipe_torch.int8.observers import ACTIVATION_OBSERVERS, observer_at
from ptpipe_torch.int8.read_ranges import _FLAT, _ROUNDED, limit_of, read_range

from ....signatures import stored_pictures

F = nn.functional
SCHEME = {"inputs": stored_pictures((3, 8, 8)), "backend": "fbgemm", "weights": "per_channel", "skip": []}
EVERYTHING = (-math.inf, math.inf)
Function = Callable[[torch.Tensor], torch.Tensor]


class Read(nn.Module):
    """A convolution with large outputs, what reads them, and another convolution."""

    def __init__(self, reader: Function) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.reader = reader

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.reader(self.conv(x)))


def read(reader: Function) -> Read:
    torch.manual_seed(0)
    network = Read(reader)
    with torch.no_grad():
        network.conv.weight.mul_(30)
        network.conv.bias.fill_(-4.0)
    return network


def images() -> torch.Tensor:
    return torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def calibrated(reader: Function, observer: str = "min_max") -> GraphModule:
    prepared = prepare_static(read(reader), observer=observer, calibrating=True, **SCHEME)
    with torch.no_grad():
        prepared(images())
    return prepared


def observed(prepared: GraphModule) -> Any:
    """Return the call of the observer behind the first convolution."""
    (convolution,) = (node for node in prepared.graph.nodes if str(node.target) == "conv")
    (call,) = convolution.users
    assert observer_at(prepared, call) is not None
    return call


READERS: dict[str, tuple[Function, tuple[float, float]]] = {
    "sigmoid": (torch.sigmoid, (-6.5, 5.5)),
    "sigmoid layer": (nn.Sigmoid(), (-6.5, 5.5)),
    "tanh": (torch.tanh, (-3.3, 2.8)),
    "hard-sigmoid": (F.hardsigmoid, (-3.0, 3.0)),
    "HardSwish": (nn.Hardswish(), (-3.0, math.inf)),
    "SiLU": (F.silu, (-6.5, math.inf)),
    "SiLU layer": (nn.SiLU(), (-6.5, math.inf)),
    "GELU": (F.gelu, (-4.5, math.inf)),
    "two": (lambda x: torch.sigmoid(x) + F.hardswish(x), (-6.5, math.inf)),
    "ELU": (F.elu, EVERYTHING),
    "a sum": (lambda x: x + F.hardswish(x), EVERYTHING),
    "another gate": (lambda x: x * torch.sigmoid(x.flip(1)), EVERYTHING),
}


@pytest.mark.parametrize("name", READERS)
def test_readers(name) -> None:
    reader, expected = READERS[name]
    prepared = calibrated(reader)
    assert read_range(prepared, observed(prepared)) == expected


def test_hardtanh_has_limits_of_its_own() -> None:
    prepared = prepare_static(read(nn.Hardtanh(0.0, 20.0)), observer="min_max", calibrating=False, **SCHEME)
    assert read_range(prepared, observed(prepared)) == (0.0, 20.0)


@pytest.mark.parametrize("name", READERS)
def test_a_reference_network_is_read_alike(name) -> None:
    reader, expected = READERS[name]
    with quantized_engine("fbgemm"), deprecations_silenced():
        network, _ = reference_network(calibrated(reader))
    (quantize,) = (node for node in quantize_nodes(network) if str(node.all_input_nodes[0].target) == "conv")
    assert all(user.target is DEQUANTIZE for user in quantize.users)
    assert read_range(network, quantize) == expected


@pytest.mark.parametrize("observer", sorted(set(ACTIVATION_OBSERVERS) - {"histogram"}))
@pytest.mark.parametrize("name", ["hard-sigmoid", "HardSwish", "SiLU"])
def test_a_calibrated_range_ends_there(name, observer) -> None:
    reader, (low, high) = READERS[name]
    prepared = calibrated(reader, observer)
    found: Any = observer_at(prepared, observed(prepared))
    assert found.min_val < 2 * low and found.max_val > 6  # what was seen
    scale, zero_point = (value.item() for value in found.calculate_qparams())
    if observer != "entropy":  # its ranges are as wide at both ends
        assert -zero_point * scale >= low - 0.51 * scale
    assert (255 - zero_point) * scale <= min(high, found.max_val.item() * 1.07) + 0.51 * scale


@pytest.mark.parametrize("name", ["hard-sigmoid", "HardSwish", "SiLU"])
@pytest.mark.parametrize("learned_step_size", [False, True])
def test_so_does_one_of_training(name, learned_step_size) -> None:
    reader, (low, high) = READERS[name]
    options = {"batch_norm": "fold", "learned_step_size": learned_step_size, **SCHEME}
    training = prepare_qat(read(reader), freeze_at=1.0, **options).train()
    for _ in range(3):
        training(images())
    (fake_quant,) = {
        part
        for part in training.modules()
        if hasattr(part, "observer_enabled") and limit_of(part.activation_post_process) == (low, high)
    }
    observer = fake_quant.activation_post_process
    assert observer.min_val == low
    assert observer.max_val == high if math.isfinite(high) else observer.max_val > 6
    converting = prepare_qat(read(reader), freeze_at=None, **options)
    converting.load_state_dict(training.state_dict())
    with quantized_engine("fbgemm"), deprecations_silenced():
        reference, _ = reference_network(converting)
    grids = {(node.args[1], node.args[2]) for node in quantize_nodes(reference)}
    assert (fake_quant.scale.item(), fake_quant.zero_point.item()) in grids


@pytest.mark.parametrize("observer", ["min_max", "mse"])
@pytest.mark.parametrize("name", ["sigmoid", "tanh", "hard-sigmoid", "HardSwish", "SiLU", "GELU"])
def test_what_readers_return_is_nearer_to_the_float_values(name, observer) -> None:
    reader, _ = READERS[name]
    prepared = calibrated(reader, observer)
    found: Any = observer_at(prepared, observed(prepared))
    with torch.no_grad():
        x = prepared.get_submodule("conv")(images())

    def error() -> float:
        scale, zero_point = found.calculate_qparams()
        rounded = torch.fake_quantize_per_tensor_affine(x, scale, zero_point.int(), 0, 255)
        return float((reader(rounded) - reader(x)).square().mean())

    limited, found.read_range = error(), EVERYTHING
    assert limited < error() * 0.7


@pytest.mark.parametrize("observer", ["min_max", "mse"])
def test_values_that_no_reader_tells_apart_are_no_error(observer) -> None:
    prepared = calibrated(nn.Hardswish(), observer)
    found: Any = observer_at(prepared, observed(prepared))
    found.min_val.fill_(-20.0)
    found.max_val.fill_(-5.0)
    scale, zero_point = found.calculate_qparams()
    assert (zero_point * scale).item() == pytest.approx(3)


@pytest.mark.parametrize("limits", _FLAT, ids=str)
def test_beyond_the_limits_operators_are_flat(limits) -> None:
    low, high = limits
    below, above = torch.linspace(-200, low, 10_000), torch.linspace(min(high, 1e3), 1e3, 10_000)
    for operator in _FLAT[limits]:
        if isinstance(operator, str):
            continue
        apply: Any = operator() if isinstance(operator, type) else operator
        for beyond, limit in ((below, low), (above, high)):
            assert torch.isinf(torch.tensor(limit)) or (apply(beyond) - apply(torch.tensor(limit))).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("limits", "step", "zero_point"), list(zip(_ROUNDED, (1 / 256, 1 / 128), (0, 128), strict=True))
)
def test_beyond_the_limits_integers_are_equal(limits, step, zero_point) -> None:
    low, high = limits
    function = _ROUNDED[limits][0]
    for beyond in (torch.linspace(-50, low, 10_000), torch.linspace(high, 50, 10_000)):
        integers = (function(beyond) / step).round().add(zero_point).clamp(0, 255)
        assert integers.unique().numel() == 1
