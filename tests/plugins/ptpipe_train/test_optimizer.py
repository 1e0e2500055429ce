from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ptpipe_torch import FunctionRef, builder
from ptpipe_train import TrainConfig
from ptpipe_train.optimizer import load_optimizer, make_optimizer, optimizer_tensors, peak_lr, set_lr

from .conftest import NUM_CLASSES, SIDE, Lab


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 4, 2))
    return net.to(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def _own_random_numbers() -> Any:
    with torch.random.fork_rng():
        yield


def take_steps(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        images = torch.randn(6, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        net(images).square().sum().backward()
        optimizer.step()


SGD = {"optimizer": "sgd", "lr": 0.01, "nesterov": True, "weight_decay": 0.01}
ADAMW = {"optimizer": "adamw", "lr": 0.01}


@pytest.mark.parametrize(
    ("options", "make"),
    [
        (SGD, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False)),
        (ADAMW, lambda p: torch.optim.AdamW(p, 0.01, foreach=False)),
        ({"optimizer": "sgd"}, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=False)),
        ({"optimizer": "sgd", "momentum": 0}, lambda p: torch.optim.SGD(p, 0.05, foreach=False)),
    ],
)
def test_it_is_torchs_optimizer(options: dict[str, Any], make: Any) -> None:
    one, other = make_net(), make_net()
    take_steps(one, make_optimizer(TrainConfig(**options), one.named_parameters(), {}), 5)
    take_steps(other, make(list(other.parameters())), 5)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Spectral(nn.Module):
    """A filter of frequencies, as neural operators have them: a complex parameter."""

    def __init__(self, num_frequencies: int = 3) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(num_frequencies, dtype=torch.complex64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(images) * self.filter, images.shape[-1])


@pytest.mark.parametrize(
    ("options", "make"),
    [
        (SGD, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, weight_decay=0.01)),
        (ADAMW, lambda p: torch.optim.AdamW(p, 0.01)),
    ],
)
def test_complex_parameters(options: dict[str, Any], make: Any) -> None:
    torch.manual_seed(0)
    one, other = Spectral(), Spectral()
    other.load_state_dict(one.state_dict())
    take_steps(one, make_optimizer(TrainConfig(**options, decay_norm_and_bias=True), one.named_parameters(), {}), 3)
    take_steps(other, make(list(other.parameters())), 3)
    torch.testing.assert_close(one.filter, other.filter)


@builder
def spectral_net() -> nn.Module:
    return nn.Sequential(Spectral(SIDE // 2 + 1), nn.Flatten(), nn.Linear(SIDE * SIDE, NUM_CLASSES))


@pytest.mark.parametrize("options", [SGD, ADAMW])
def test_networks_with_complex_parameters_are_trained(options: dict[str, Any], lab: Lab) -> None:
    model = lab.make_model(FunctionRef.to(spectral_net))
    extra = {"ema": {"decay": 0.5}, "clip_grad_norm": 1.0, "checkpoint_every_s": 1e-9}
    trained = lab.train(model, lab.make_data(num_val=20), epochs=2, **options, **extra)
    assert trained.model.tensors["0.filter"].is_complex()
    assert not torch.equal(trained.model.tensors["0.filter"], model.tensors["0.filter"])


@pytest.mark.parametrize("options", [SGD, ADAMW])
def test_state_comes_back_in_its_layout(options: dict[str, Any]) -> None:
    straight, broken = make_net(), make_net()
    first = make_optimizer(TrainConfig(**options), straight.named_parameters(), {})
    take_steps(straight, first, 3)
    broken.load_state_dict(straight.state_dict())
    second = make_optimizer(TrainConfig(**options), broken.named_parameters(), {})
    # As a file hands it back: contiguous.
    load_optimizer(second, {name: tensor.clone().contiguous() for name, tensor in optimizer_tensors(first).items()})
    weight = broken[0].weight
    assert not weight.is_contiguous()
    assert all(value.stride() == weight.stride() for value in second.state[weight].values() if value.dim())
    take_steps(straight, first, 3, seed=1)
    take_steps(broken, second, 3, seed=1)
    assert all(torch.equal(one, other) for one, other in zip(straight.parameters(), broken.parameters(), strict=True))


def test_norm_and_bias_can_be_kept_from_decay() -> None:
    net = make_net()
    (all_of_them,) = make_optimizer(TrainConfig(weight_decay=0.1), net.named_parameters(), {}).param_groups
    assert len(all_of_them["params"]) == len(list(net.parameters()))
    decayed, exempt = make_optimizer(
        TrainConfig(weight_decay=0.1, decay_norm_and_bias=False), net.named_parameters(), {}
    ).param_groups
    assert decayed["weight_decay"] == 0.1
    assert exempt["weight_decay"] == 0
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    assert [names[id(parameter)] for parameter in decayed["params"]] == ["0.weight", "3.weight"]
    assert {names[id(p)] for p in exempt["params"]} == {"1.weight", "1.bias", "3.bias"}


@pytest.mark.parametrize("decay_norm_and_bias", [True, False])
def test_exempt_parameters_keep_their_value_where_nothing_pulls(decay_norm_and_bias: bool) -> None:
    net = make_net()
    config = TrainConfig(weight_decay=0.5, decay_norm_and_bias=decay_norm_and_bias, optimizer="adamw", lr=0.1)
    optimizer = make_optimizer(config, net.named_parameters(), {}, undecayed={"3.weight"})
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {name for name, parameter in net.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == ({"0.weight", "1.weight", "3.bias"} if decay_norm_and_bias else {"0.weight"})


def test_frozen_parameters_are_left_out() -> None:
    net = make_net().requires_grad_(False)
    net[3].requires_grad_(True)
    (group,) = make_optimizer(TrainConfig(), net.named_parameters(), {}).param_groups
    assert [parameter.shape for parameter in group["params"]] == [(2, 20), (2,)]


def test_the_linear_rule_multiplies_by_the_batches_of_a_step() -> None:
    assert peak_lr(TrainConfig(lr=0.1, accumulate=4)) == 0.1
    assert peak_lr(TrainConfig(lr=0.1, accumulate=4, scale_lr="linear")) == pytest.approx(0.4)
    assert peak_lr(TrainConfig(optimizer="adamw")) == 0.001


def test_factors_multiply_the_learning_rate_of_their_parameters() -> None:
    net = make_net()
    config = TrainConfig(lr=0.1, weight_decay=0.2, decay_norm_and_bias=False)
    factors = {"0.weight": 0.1, "1.weight": 0.1, "3.bias": 3.0}
    optimizer = make_optimizer(config, net.named_parameters(), factors)
    set_lr(optimizer, 0.05)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    low = pytest.approx(0.005)
    assert found == {
        "0.weight": (low, 0.2),
        "1.weight": (low, 0.0),
        "1.bias": (0.05, 0.0),
        "3.weight": (0.05, 0.2),
        "3.bias": (pytest.approx(0.15), 0.0),
    }
