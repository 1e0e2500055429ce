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


class Joining(nn.Module):
    """Halves pictures twice, enlarges what is left and joins both: of odd sizes by a branch, as networks often do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(channels, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1))
        self.up = nn.Upsample(scale_factor=4)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = self.up(self.down(images_NCHW))
        if x.shape[2:] != images_NCHW.shape[2:]:
            x = nn.functional.interpolate(x, size=images_NCHW.shape[2:], mode="nearest")
        return torch.cat([x, images_NCHW], 1)
