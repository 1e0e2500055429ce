"""SmoothQuant: the same function, smaller activation channels, attention, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant.repairs import smooth
from ptpipe_quant.repairs.config import SmoothConfig
from ptpipe_torch import Model, builder

from ..conftest import BACKENDS, NUM_CLASSES, convolution_only, make_model
from .conftest import difference, separable_net, static_int8

WIDTH = 16


class Block(nn.Module):
    """A transformer layer over the rows of an image: layer norms in front of attention and of two linear layers."""

    def __init__(self, *, own_attention: bool) -> None:
        super().__init__()
        self.own_attention = own_attention
        self.embed = nn.Linear(8, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        if own_attention:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            self.out = nn.Linear(WIDTH, WIDTH)
        else:
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.squeeze(1))
        y = self.norm1(x)
        if self.own_attention:
            scores = torch.softmax(self.q(y) @ self.k(y).transpose(1, 2) / 4, -1)
            x = x + self.out(scores @ self.v(y))
        else:
            x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(torch.relu(self.up(self.norm2(x))))
        logits_NK: torch.Tensor = self.head(self.norm3(x).mean(1))
        return logits_NK


@builder
def block(*, own_attention: bool) -> nn.Module:
    """What `Block` says."""
    return Block(own_attention=own_attention)


def with_outliers(model: Model) -> Model:
    """Make two channels behind layer norms 60 times larger, and undo it in the next layers: the same function."""
    state = {name: tensor.clone() for name, tensor in model.tensors.items()}
    for norm, readers in (("norm1", ("q", "k", "v", "attention.in_proj_")), ("norm2", ("up",))):
        for channel in (3, 7):
            state[f"{norm}.weight"][channel] *= 60
            state[f"{norm}.bias"][channel] *= 60
            for name in readers:
                weight = f"{name}weight" if name.endswith("_") else f"{name}.weight"
                if weight in state:
                    state[weight][:, channel] /= 60
    return Model(model.recipe, state)


@pytest.mark.parametrize("own_attention", [True, False])
def test_the_same_function_with_smaller_activations(digits, ctx, metrics, own_attention) -> None:
    model = with_outliers(make_model(block, own_attention=own_attention))
    smoothed = smooth(SmoothConfig(alpha=0.5, num_samples=100), ctx, model, digits)
    assert difference(smoothed, model, digits) < 1e-5
    assert metrics()["output_difference"] < 1e-5
    assert metrics()["worst_channel_ratio_before"] > 30 > 15 > metrics()["worst_channel_ratio"]
    assert metrics()["smoothed_layers"] == (5 if own_attention else 3)
    changed = {
        name.split(".")[0] for name in model.tensors if not torch.equal(model.tensors[name], smoothed.tensors[name])
    }
    attention = {"q", "k", "v"} if own_attention else {"attention"}
    assert changed == {"norm1", "norm2", "up", "down", *attention}
    left_alone = dict(line.split(": ", 1) for line in metrics()["left_alone"])
    assert left_alone["norm3"] == "its output goes to mean"
    assert left_alone["head"] == "its output goes to the network's output"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_loses_less(digits, ctx, backend) -> None:
    model = with_outliers(make_model(block, own_attention=True))
    smoothed = smooth(SmoothConfig(), ctx, model, digits)
    before, after = (
        difference(static_int8(each, digits, ctx, backend=backend, weights="per_channel"), model, digits)
        for each in (model, smoothed)
    )
    assert after < 0.5 * before


def test_alpha_moves_all_or_nothing_of_the_activations(digits, ctx) -> None:
    model = with_outliers(make_model(block, own_attention=True))
    all_moved = smooth(SmoothConfig(alpha=1.0, num_samples=64), ctx, model, digits)
    (batch,) = digits.batches("calibration", order_N=range(64), batch_size=64)
    network = all_moved.build()
    seen = []
    network.norm1.register_forward_hook(lambda _layer, _inputs, output: seen.append(output))
    with torch.no_grad():
        network(batch.inputs["images"])
    peaks_C = seen[0].abs().flatten(0, -2).amax(0)
    assert torch.allclose(peaks_C, torch.ones(WIDTH), rtol=1e-3)


@builder
def nothing_to_smooth() -> nn.Module:
    """One layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, NUM_CLASSES))


def test_errors(digits, ctx) -> None:
    with pytest.raises(StageError, match=r"no layer norm or linear layer can be smoothed: 1 "):
        smooth(SmoothConfig(), ctx, make_model(nothing_to_smooth), digits)
    with pytest.raises(StageError, match=r"quant\.\w+: val has 0 samples"):
        smooth(SmoothConfig(split="val"), ctx, make_model(block, own_attention=True), digits)
    with pytest.raises(StageError, match=r"no layer norm or linear layer can be smoothed"):
        smooth(SmoothConfig(), ctx, make_model(separable_net), digits)
    with pytest.raises(StageError, match=r"can be smoothed: the network has none$"):
        smooth(SmoothConfig(), ctx, make_model(convolution_only), digits)
