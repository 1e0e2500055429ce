"""Layers get another forward pass, and keep all else."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ptpipe_train.mix_in import mix_in


class Doubled:
    def forward(self: Any, *args: Any) -> Any:
        return 2 * super().forward(*args)  # type: ignore[misc]


class Negated:
    def forward(self: Any, *args: Any) -> Any:
        return -super().forward(*args)  # type: ignore[misc]


def test_state_and_name_stay_and_mixins_add_up() -> None:
    layer, other, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.ones(1, 3)
    expected, state = layer(x), layer.state_dict()
    mix_in(layer, Doubled)
    assert torch.equal(layer(x), 2 * expected)
    mix_in(layer, Negated)
    assert torch.equal(copy.deepcopy(layer)(x), -2 * expected)
    assert type(layer).__name__ == "Linear" and isinstance(layer, nn.Linear)
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())
    assert type(other) is nn.Linear
    mix_in(other, Doubled)
    assert type(other) in type(layer).__mro__
