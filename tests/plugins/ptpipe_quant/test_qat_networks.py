"""Quantization-aware training of networks with parts that have no int8 form: prepared, trained, converted.

Shape legend: N images, T positions of a sequence, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant import ConvertConfig, PrepareQatConfig, convert, prepare_qat, transforms
from ptpipe_torch import Data, Model, builder
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import float_network
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.int8.observers import is_observer
from ptpipe_torch.torchvision_compat import torchvision

from ...processor import reduced
from ...signatures import stored_pictures
from .conftest import BACKENDS, NUM_CLASSES, logits_of, make_model, train

TARGETS = [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS]
SCHEME: Any = {"inputs": stored_pictures((1, 8, 8)), "weights": "per_channel", "skip": []}


class Rows(nn.Module):
    """Reads an image row by row: linear layer, the part in question, linear layer."""

    def __init__(self, part: nn.Module, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.part, self.head = nn.Linear(8, 16), part, nn.Linear(16, NUM_CLASSES)
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows_NTD = torch.relu(self.embed(x.flatten(1, 2)))
        logits_NK: torch.Tensor = self.head(self._call(self.part, rows_NTD).mean(1))
        return logits_NK


@builder
def attention() -> nn.Module:
    """Self-attention with a residual connection, and dropout of its own."""
    part = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
    return Rows(part, lambda part, x: x + part(x, x, x)[0])


@builder
def lstm() -> nn.Module:
    """Two recurrent layers, with dropout between them."""
    return Rows(nn.LSTM(16, 16, 2, batch_first=True, dropout=0.1), lambda part, x: part(x)[0])


@builder
def gru() -> nn.Module:
    """What its name says."""
    return Rows(nn.GRU(16, 16, 2, batch_first=True, dropout=0.1), lambda part, x: part(x)[0])


@builder
def encoder() -> nn.Module:
    """torch's own encoder."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return Rows(nn.TransformerEncoder(layer, 2), lambda part, x: part(x))


@builder
def encoder_layer() -> nn.Module:
    """A single layer of it."""
    return Rows(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda part, x: part(x))


class OneChannel(nn.Module):
    """Shows gray images to a network for colours."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits_NK: torch.Tensor = self.network(x.expand(-1, 3, -1, -1))
        return logits_NK


@builder
def vision_transformer() -> nn.Module:
    """torchvision's ViT, small."""
    size: Any = {"image_size": 8, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    vit: nn.Module = torchvision().models.VisionTransformer(**size, num_classes=NUM_CLASSES)
    nn.init.normal_(vit.heads[-1].weight)  # torchvision begins with zeros
    return OneChannel(vit)


@builder
def swin_v2() -> nn.Module:
    """torchvision's Swin v2, small: sigmoids of tables, shared with other operators."""
    torchvision()
    from torchvision.models import swin_transformer as swin

    parts: Any = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    network = swin.SwinTransformer([2, 2], 8, [2, 1], [2, 2], [2, 2], num_classes=NUM_CLASSES, **parts)
    return OneChannel(network)


@builder
def pooled(*, activation: str) -> nn.Module:
    """An activation whose output has a fixed range, before max pooling."""
    layer: Any = getattr(nn, activation)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        layer(1) if activation == "Softmax" else layer(),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),  # the third operator in a row that has the activation's scale
        nn.Flatten(),
        nn.Linear(32, NUM_CLASSES),
    )


def trained_int8(build: Any, data: Data, ctx: Any, backend: str, batch_norm: Any = "fold", **arguments: Any) -> Any:
    """Return the prepared, trained and converted model."""
    config = PrepareQatConfig(backend=backend, batch_norm=batch_norm, reduce_range=reduced(backend))
    prepared = prepare_qat(config, ctx, make_model(build, **arguments))
    tuned = train(prepared, data, lr=0.005)
    return tuned, convert(ConvertConfig(), ctx, tuned)


def relative_difference(tuned: Model, int8: Model, data: Data) -> float:
    """Return the rms difference of the int8 model's logits from fake quantization's, in their standard deviations."""
    fake_NK, real_NK = logits_of(tuned, data, 200), logits_of(int8, data, 200)
    return float(np.sqrt(np.square(fake_NK - real_NK).mean()) / fake_NK.std())


@pytest.fixture(scope="module")
def few(digits: Data) -> Data:
    """Digits for a few steps."""
    train_split = digits.splits["train"].subset(np.arange(192))
    return Data(digits.info, {**digits.splits, "train": train_split}, digits.loader)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize(
    ("build", "float_parts", "num_int8"),
    [
        (lstm, {"part": nn.LSTM}, 2),
        (gru, {"part": nn.GRU}, 2),
        (attention, {}, 6),
        (encoder, {}, 14),
        (encoder_layer, {}, 8),
        (vision_transformer, {}, 14),
        (swin_v2, {"network.features.1.0.attn.cpb_mlp.2": nn.Linear}, 15),
    ],
)
def test_what_is_int8_and_what_is_float(few, ctx, backend, build, float_parts, num_int8) -> None:
    tuned, int8 = trained_int8(build, few, ctx, backend)
    with quantized_engine(backend):
        network = int8.build()
    assert {name: type(network.get_submodule(name)) for name in float_parts} == float_parts
    assert sum(has_int8_weights(layer) for layer in network.modules()) == num_int8
    assert not [name for name, part in network.named_modules() if is_observer(part)]
    assert relative_difference(tuned, int8, few) < (0.15 if reduced(backend) else 0.1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("batch_norm", ["fold", "train"])
@pytest.mark.parametrize("activation", ["Sigmoid", "Tanh", "Hardsigmoid", "Softmax"])
def test_fixed_ranges_before_max_pooling(few, ctx, backend, batch_norm, activation) -> None:
    tuned, int8 = trained_int8(pooled, few, ctx, backend, batch_norm, activation=activation)
    assert relative_difference(tuned, int8, few) < 0.05


@pytest.mark.parametrize("build", [attention, lstm, gru, encoder, encoder_layer, vision_transformer])
def test_before_training_the_function_is_the_users(build) -> None:
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = make_model(build)
    with torch.no_grad():
        expected = model.build().eval()(x)
        prepared = transforms.prepare_qat(model.build(), backend="fbgemm", **SCHEME, batch_norm="fold", freeze_at=0.75)
        for layer in prepared.modules():
            if hasattr(layer, "weight_fake_quant"):
                layer.weight_fake_quant = nn.Identity()
        torch.testing.assert_close(float_network(prepared).eval()(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [attention, lstm, encoder])
def test_a_part_trains_with_its_own_dropout(build) -> None:
    graph = transforms.prepare_qat(build(), backend="fbgemm", **SCHEME, batch_norm="fold", freeze_at=0.0).train()
    x = torch.randn(4, 1, 8, 8)
    assert not torch.equal(graph(x), graph(x))
    graph.eval()
    assert torch.equal(graph(x), graph(x))


def test_fake_quantization_left_in_a_converted_network_is_refused() -> None:
    options: Any = {"backend": "fbgemm", **SCHEME, "skip": ["part"], "batch_norm": "fold", "freeze_at": None}
    graph = transforms.prepare_qat(encoder(), **options)
    graph(torch.randn(4, 1, 8, 8))
    # As torch did: it swaps linear layers that the graph doesn't call itself.
    layer: Any = graph.get_submodule("part.layers.0")
    layer.linear1 = type(graph.get_submodule("head")).from_float(
        with_qconfig(layer.linear1, graph.get_submodule("head"))
    )
    with quantized_engine("fbgemm"), pytest.raises(StageError, match=r"part\.layers\.0\.linear1 can't become int8"):
        transforms.to_int8(graph, backend="fbgemm")


def with_qconfig(layer: Any, other: Any) -> Any:
    layer.qconfig = other.qconfig
    return layer
