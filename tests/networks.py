"""Networks that tests of several folders need."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Applied(nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)
