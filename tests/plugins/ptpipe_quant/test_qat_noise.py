"""What networks do in training alone: stochastic depth and noise as libraries write them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import Context
from ptpipe.events import Event, LogLine, Notice
from ptpipe_quant import ConvertConfig, PrepareQatConfig, convert, prepare_qat
from ptpipe_torch import TrainingCallback, builder
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.training_layers import may_act_in_training_alone

from .conftest import BACKENDS, NUM_CLASSES, make_model, train


def drop_path(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """As timm has it."""
    if p == 0.0 or not training:
        return x
    return x * x.new_empty((len(x), *(1 for _ in x.shape[1:]))).bernoulli_(1 - p) / (1 - p)


class DropPath(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return drop_path(x, self.p, self.training)


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x + torch.randn_like(x)
        return x


class Doubled(nn.Module):
    """Returns something else in eval mode, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x * 2


class Residual(nn.Module):
    """A residual branch through a layer of the user's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.stem, self.branch = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.layer, self.head = layer, nn.Linear(8, NUM_CLASSES)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.branch(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits_NK: torch.Tensor = self.head(self.between(F.relu(self.stem(x))).mean((2, 3)))
        return logits_NK


class BySizes(Residual):
    """Branches on a size, so that it is traced with sizes."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return super().between(x) if x.shape[-1] > 4 else x


class Inline(Residual):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = super().between(x)
        return x + torch.randn_like(x) if self.training else x


NETWORKS: dict[str, Any] = {
    "drop_path": lambda: Residual(DropPath(0.5)),
    "noise": lambda: Residual(Noise()),
    "by_sizes": lambda: BySizes(DropPath(0.5)),
    "inline": lambda: Inline(nn.Identity()),
    "inline_beside_dropout": lambda: Inline(nn.Dropout(0.1)),
}


@builder
def network(*, name: str) -> nn.Module:
    """One of `NETWORKS`."""
    module: nn.Module = NETWORKS[name]()
    return module


@pytest.mark.parametrize(
    ("layer", "may_act"),
    [
        (DropPath(0.1), True),
        (Noise(), True),
        (Doubled(), True),
        (nn.ReLU(), False),
        (nn.Identity(), False),
        (nn.BatchNorm2d(2), False),
        (Residual(Noise()), False),
    ],
)
def test_which_layers_may_act_in_training_alone(layer, may_act) -> None:
    assert may_act_in_training_alone(layer) == may_act


@builder
def with_script() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch prefers its compiler
        part = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, 16)))
    return nn.Sequential(part, nn.ReLU(), nn.Linear(16, NUM_CLASSES))


def test_a_part_in_torchscript_stays_float(ctx: Context, events: list[Event]) -> None:
    prepared = prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, make_model(with_script))
    assert "0.1.weight" in prepared.tensors
    fake_quantized = [name for name, layer in prepared.build().named_modules() if hasattr(layer, "weight_fake_quant")]
    assert fake_quantized == ["2"]
    assert any("0 stays float: it is TorchScript" in event.text for event in events if isinstance(event, LogLine))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["drop_path", "noise", "by_sizes"])
def test_such_layers_act_in_training_and_leave_no_trace_in_int8(
    ctx, digits, events: list[Event], name, backend
) -> None:
    model = prepare_qat(PrepareQatConfig(backend=backend), ctx, make_model(network, name=name))
    module, x = model.build_prepared().train(), torch.randn(16, 1, 8, 8)
    for layer in module.modules():
        if isinstance(layer, TrainingCallback):
            layer.on_progress(0.0)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    int8 = convert(ConvertConfig(), ctx, train(model, digits, lr=0.01))
    with quantized_engine(backend):
        assert sum(map(has_int8_weights, int8.build().modules())) == 3
    assert not [event for event in events if isinstance(event, Notice) and "noise" in event.text]


@pytest.mark.parametrize(("name", "is_noticed"), [("inline", True), ("inline_beside_dropout", False)])
def test_noise_that_tracing_loses_is_noticed(ctx, events: list[Event], name, is_noticed) -> None:
    """Beside dropout that is kept it can't be told from it."""
    prepare_qat(PrepareQatConfig(backend=BACKENDS[0]), ctx, make_model(network, name=name))
    assert any(isinstance(event, Notice) and "without noise" in event.text for event in events) == is_noticed
