"""A state that training changes and the state dict does not hold: found before a network without it is delivered."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import JSON, StageError
from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch import FunctionRef, builder
from ptpipe_train import supervised

from .conftest import Lab, assert_same_bits

PASSES: list[int] = []


class Centered(nn.Module):
    """Subtracts a running mean, kept in a buffer or an attribute; or divides by a temperature, which falls."""

    def __init__(self, kind: str, begin: int) -> None:
        super().__init__()
        self.features, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU()), nn.Linear(8, 4)
        self.kind, self.begin, self.num_passes = kind, begin, 0
        if kind == "attribute":
            self.mean = torch.zeros(8)
        elif kind != "temperature":
            self.register_buffer("mean", torch.zeros(8), persistent=kind == "persistent")
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        if self.training:
            PASSES.append(1)
            self.num_passes += 1
            if self.num_passes > self.begin:
                self._change(x.detach().float().mean(0))
        return self.head(x if self.kind == "temperature" else x - self.mean) / self.temperature

    def _change(self, mean: torch.Tensor) -> None:
        if self.kind == "temperature":
            self.temperature *= 0.9
        elif self.kind == "attribute":
            self.mean = 0.9 * self.mean + 0.1 * mean
        else:
            self.mean.lerp_(mean, 0.1)


@builder
def centered(*, kind: str, begin: int = 0) -> nn.Module:
    return Centered(kind, begin)


@pytest.mark.parametrize(
    ("kind", "name"), [("not persistent", "mean"), ("attribute", "mean"), ("temperature", "temperature")]
)
@pytest.mark.parametrize("begin", [0, 5])
def test_it_is_named_after_the_first_epoch_or_the_last(lab: Lab, kind: str, name: str, begin: int) -> None:
    PASSES.clear()
    with pytest.raises(StageError, match=rf"^outputs depend on a state that is not stored .* \(.*{name}.*\): .*buffer"):
        lab.train(
            lab.make_model(FunctionRef.to(centered, kind=kind, begin=begin)),
            lab.make_data(64, 16),
            epochs=3,
            memory_format="contiguous",
        )
    assert len(PASSES) == (12 if begin else 4)


@pytest.mark.parametrize("options", [{}, {"ema": {"decay": 0.9}}, {"precision": "bf16"}, {"early_stopping": {}}])
def test_a_persistent_buffer_is_delivered(lab: Lab, options: dict[str, Any]) -> None:
    model = lab.make_model(FunctionRef.to(centered, kind="persistent"))
    assert lab.train(model, lab.make_data(64, 16), epochs=2, **options).model.tensors["mean"].any()


class Scaled(nn.Module):
    """Multiplies its inputs, which must not all be 0, by a factor; may be nan in eval mode."""

    def __init__(self, growth: float, eval_offset: float) -> None:
        super().__init__()
        self.head, self.factor, self.growth, self.eval_offset = nn.Linear(64, 4), 1.0, growth, eval_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        assert x.any(dim=1).all(), "as texts of padding alone"
        self.factor *= self.growth if self.training else 1.0
        return self.head(x * self.factor) + (0.0 if self.training else self.eval_offset)


@builder
def scaled(*, growth: float = 1.0, eval_offset: str = "0") -> nn.Module:
    return Scaled(growth, float(eval_offset))


def train_without_val(lab: Lab, **arguments: JSON) -> None:
    model = lab.make_model(FunctionRef.to(scaled, **arguments))
    lab.train(model, lab.make_data(32), epochs=1, memory_format="contiguous")


def test_without_val_it_is_found_by_samples_of_train(lab: Lab) -> None:
    train_without_val(lab)
    with pytest.raises(StageError, match=r"not stored with the weights \(factor\)"):
        train_without_val(lab, growth=1.1)


@pytest.mark.parametrize("eval_offset", ["nan", "inf"])
def test_outputs_that_can_not_be_compared_are_refused(lab: Lab, eval_offset: str) -> None:
    with pytest.raises(StageError, match=r"^all outputs of the trained network are nan or inf in eval mode: its buf"):
        train_without_val(lab, eval_offset=eval_offset)


def test_a_counter_that_no_output_depends_on_does_no_harm(lab: Lab) -> None:
    lab.train(lab.make_model(FunctionRef.to(centered, kind="attribute", begin=100)), lab.make_data(64), epochs=1)


@pytest.mark.parametrize("options", [{"batch_norm": "train", "freeze_at": 0.5}, {"learned_step_size": True}])
def test_networks_that_are_prepared_for_int8_keep_all(lab: Lab, options: dict[str, Any]) -> None:
    config = PrepareQatConfig(backend="qnnpack", **options)
    model = prepare_qat(config, lab.context(), lab.make_model(norm=True))
    lab.train(model, lab.make_data(64, 16), epochs=2, lr=0.01)


class Noisy(nn.Module):
    """Adds noise from all streams, also in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1)) + torch.randn(4) + random.random() + np.random.rand()


@builder
def noisy() -> nn.Module:
    return Noisy()


def test_random_numbers_are_the_same_with_and_without_the_comparison(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = lab.make_model(FunctionRef.to(noisy)), lab.make_data(64)
    compared = lab.train_afresh(model, data, epochs=2).model
    monkeypatch.setattr(supervised, "refuse_unstored_state", lambda *_: None)
    assert_same_bits(compared, lab.train_afresh(model, data, epochs=2).model)
