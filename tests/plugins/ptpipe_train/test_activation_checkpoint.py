"""Layers that run again in the backward pass: the same training, with less memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from ptpipe import StageError
from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch import FunctionRef, Model, builder
from ptpipe_torch.python_file import seeded_everywhere
from ptpipe_train import TrainConfig
from ptpipe_train.activation_checkpoint import checkpoint_layers

from .conftest import Lab, assert_same_bits


class Block(nn.Module):
    """Convolution, batch norm and dropout beside an identity; counts its forward passes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))
        self.num_runs = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.training:
            self.num_passes += 1
            self.num_runs += 1
        return x + scale * self.dropout(self.norm(self.conv(x)).relu())


@builder
def block_net() -> nn.Module:
    body = [nn.Conv2d(1, 8, 3, padding=1), Block(8), nn.ReLU(), Block(8), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(32, 4))


def make_model(lab: Lab) -> Model:
    return lab.make_model(FunctionRef.to(block_net))


@pytest.mark.parametrize("types", [["Block"], ["Conv2d", "BatchNorm2d"], ["Block", "BatchNorm2d", "Block"]])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"precision": "fp16", "clip_grad_norm": 1.0}])
def test_the_training_is_the_same_bit_for_bit(lab: Lab, types: list[str], options: dict[str, Any]) -> None:
    model, data = make_model(lab), lab.make_data(100, 20)
    options = {"epochs": 2, "accumulate": 2} | options
    once = lab.train_afresh(model, data, **options)
    twice = lab.train_afresh(model, data, gradient_checkpointing=types, **options)
    assert_same_bits(once.model, twice.model)
    assert once.metrics["history"] == twice.metrics["history"]


def test_gradients_and_buffers_are_those_of_one_pass() -> None:
    torch.manual_seed(0)
    nets = [block_net().train() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    checkpoint_layers(nets[1], ["Block"])
    images = torch.randn(6, 1, 8, 8)
    for net in nets:
        torch.manual_seed(1)
        net(images).square().sum().backward()
    for (name, ours), theirs in zip(nets[1].named_parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    assert list(nets[0].state_dict()) == list(nets[1].state_dict())
    for name, value in nets[0].state_dict().items():
        assert torch.equal(value, nets[1].state_dict()[name]), name
    assert [net[1].num_runs for net in nets] == [1, 2]
    with torch.no_grad():
        nets[1](images)
    assert nets[1][1].num_runs == 3
    assert [type(layer).__name__ for layer in nets[1]] == [type(layer).__name__ for layer in nets[0]]


class RandomBlock(nn.Module):
    """A linear layer, and noise from one of the streams that torch doesn't restore; may be skipped by chance."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self.linear, self.stream = nn.Linear(4, 4), stream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stream == "depth" and random.random() < 0.5:
            return x
        noise = {"python": random.gauss, "normal": np.random.normal}.get(self.stream, np.random.uniform)(1.0, 0.5)
        return x + (self.linear(x) * noise).relu()


@pytest.mark.parametrize("stream", ["python", "numpy", "normal", "depth"])
def test_layers_draw_the_same_numbers_again_from_python_and_numpy(stream: str) -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(*(RandomBlock(stream) for _ in range(4))) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    checkpoint_layers(nets[1], ["RandomBlock"])
    inputs = torch.randn(3, 4, requires_grad=True)
    next_numbers = []
    with seeded_everywhere(5, torch.device("cpu")):
        for net in nets:
            random.seed(1)
            np.random.seed(1)
            net(inputs).square().sum().backward()
            next_numbers.append((random.random(), np.random.normal()))
    assert next_numbers[0] == next_numbers[1]
    assert any(ours.grad is not None for ours in nets[1].parameters())
    for (name, ours), theirs in zip(nets[1].named_parameters(), nets[0].parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name


def test_activations_are_not_kept() -> None:
    kept = []
    for types in ([], ["Block"]):
        net = block_net().train()
        checkpoint_layers(net, types)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            net(torch.randn(6, 1, 8, 8))
        kept.append(sum(sizes))
    assert kept[1] < 0.5 * kept[0]


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_fake_quantized_layers_without_ranges_of_activations(lab: Lab, backend: str) -> None:
    config = PrepareQatConfig(backend=backend, batch_norm="train", freeze_at=0.5)
    model, data = prepare_qat(config, lab.context(), lab.make_model(norm=True)), lab.make_data(64, 16)
    options = {"epochs": 2, "lr": 0.01}
    once = lab.train_afresh(model, data, **options)
    twice = lab.train_afresh(model, data, gradient_checkpointing=["QatLayer"], **options)
    assert_same_bits(once.model, twice.model)
    with pytest.raises(StageError, match="contains fake quantization of activations, which would observe"):
        lab.train_afresh(model, data, gradient_checkpointing=["ActivationFakeQuant"])


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["Blok"], r"^gradient_checkpointing: the network has no layer of type Blok \(did you mean 'Block'\?\)$"),
        (["Bottleneck"], r"\(it has: AdaptiveAvgPool2d, BatchNorm2d, Block, .*\)$"),
        (["Sequential"], "no layer of type Sequential"),
    ],
)
def test_types_that_the_network_does_not_have_are_named(lab: Lab, types: list[str], message: str) -> None:
    with pytest.raises(StageError, match=message):
        lab.train(make_model(lab), lab.make_data(20), gradient_checkpointing=types)


def test_a_container_is_refused() -> None:
    with pytest.raises(StageError, match="ModuleList has no forward pass of its own"):
        checkpoint_layers(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])}), ["ModuleList"])


@pytest.mark.parametrize("parallel", [{"mode": "pp"}, {"mode": "ddp+pp", "workers": 4}])
def test_pipelines_refuse_it(parallel: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"can't be combined with parallel mode .*more microbatches take less"):
        TrainConfig(gradient_checkpointing=("Linear",), parallel=parallel)
