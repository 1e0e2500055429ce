"""Which layers are gathered one by one. What comes of it is in `test_parallel.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant.transforms import prepare_qat
from ptpipe_train.config_parallel import Parallel
from ptpipe_train.parallel.fsdp import layers_to_wrap, refuse_scalars

from ...signatures import stored_pictures


class Net(nn.Module):
    """A list, attention, whose inner layer is never called, and a weight that two layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2)
        for step in self.steps:
            x = step(x)
        x, _ = self.attention(x, x, x)
        return self.two(self.one(x)).mean(1)


IMAGES_NCHW = torch.zeros(2, 3, 2, 4)


def chosen(module: nn.Module, images_NCHW: torch.Tensor = IMAGES_NCHW, **options: Any) -> list[str]:
    names = {layer: name for name, layer in module.named_modules()}
    options = {"mode": "fsdp", "workers": 2, **options}
    return [names[layer] for layer in layers_to_wrap(module, Parallel(**options), [images_NCHW])]


def test_only_layers_that_are_called_and_have_parameters_of_their_own() -> None:
    network = Net()
    before = {name: (tensor.clone(), network.training) for name, tensor in network.state_dict().items()}
    assert chosen(network, wrap_min_parameters=1) == ["attention", "steps.1", "steps.0"]
    assert chosen(network, wrap_min_parameters=100) == ["attention"]
    assert chosen(network, wrap=("Linear",)) == ["steps.1", "steps.0"]
    assert chosen(network) == []
    assert all(torch.equal(network.state_dict()[name], value) for name, (value, _) in before.items())
    assert network.training
    assert not any(layer._forward_pre_hooks for layer in network.modules())


def test_a_graph_has_containers_that_nobody_calls() -> None:
    network = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), nn.Flatten(), nn.Linear(32, 4))
    options = {
        "inputs": stored_pictures((3, 2, 4)),
        "backend": "fbgemm",
        "weights": "per_channel",
        "skip": (),
    }
    prepared = prepare_qat(network, **options, batch_norm="fold", freeze_at=1.0)
    assert "0" in dict(prepared.named_modules())
    assert chosen(prepared, wrap_min_parameters=1) == ["2", "0.0"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Conv2d", "the network has no layer of type Conv2d"),
        ("ModuleList", "no ModuleList of the network can be gathered separately"),
        ("NonDynamicallyQuantizableLinear", "its forward is never called"),
    ],
)
def test_types_that_can_not_be_gathered_are_named(name: str, words: str) -> None:
    with pytest.raises(StageError, match=words):
        chosen(Net(), wrap=(name,))


def test_scalars_have_no_rows_to_shard() -> None:
    network = nn.Module()
    network.text, network.scale = nn.Linear(2, 3), nn.Parameter(torch.ones(1))
    refuse_scalars(network)
    network.text.logit_scale = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(StageError, match=r"text\.logit_scale is a scalar: give it the shape \(1,\), or use mode ddp"):
        refuse_scalars(network)
