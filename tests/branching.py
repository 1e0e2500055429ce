"""Networks with parallel branches whose outputs are added, as RepVGG, MobileOne and FastViT are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

SHAPE_CHW = (4, 9, 9)
Body: TypeAlias = Callable[[Any, torch.Tensor], torch.Tensor]


class Branches(nn.Module):
    """Depthwise and dense convolutions, and what `body` does with them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.large = nn.Conv2d(4, 4, 5, padding=2, groups=4, bias=False)
        self.small, self.pixel = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 4, 1, groups=4)
        self.dilated = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4)
        self.large_norm, self.small_norm, self.norm = (nn.BatchNorm2d(4) for _ in range(3))
        self.by_batch, self.drop = nn.BatchNorm2d(4, track_running_stats=False), nn.Identity()
        self.strided, self.strided_pixel = nn.Conv2d(4, 4, 3, 2, 1, groups=4), nn.Conv2d(4, 4, 1, 2, groups=4)
        self.dense, self.gamma = nn.Conv2d(4, 4, 5, padding=2), nn.Parameter(torch.linspace(-1, 2, 4)[:, None, None])
        self.dense_pixel, self.grouped = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.dense_norm = nn.BatchNorm2d(4)
        self.wide, self.lines = nn.Conv2d(4, 4, (1, 5), padding=(0, 2), groups=4), nn.Conv2d(4, 4, (5, 1), groups=4)
        for norm in (self.large_norm, self.small_norm, self.norm, self.dense_norm):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def repvgg(n: Any, x: torch.Tensor) -> torch.Tensor:
    return n.large_norm(n.large(x)) + n.small_norm(n.small(x)) + n.norm(x)


MERGED: dict[str, tuple[Body, dict[str, list[str]]]] = {
    "RepVGG": (repvgg, {"large": ["small", "small_norm", "norm"]}),
    "sum in place": (lambda n, x: n.small(x).add_(n.drop(n.norm(n.drop(x)))), {"small": ["norm"]}),
    "the last is the largest": (
        lambda n, x: n.pixel(x) + n.small(x) + n.large(x),
        {"large": ["small", "pixel"]},
    ),
    "sum from zero": (lambda n, x: sum([n.norm(x), n.small(x), n.pixel(x)]), {"small": ["norm", "pixel"]}),
    "difference": (lambda n, x: n.norm(x) - n.small(x), {"small": ["norm"]}),
    "difference of a difference": (lambda n, x: n.large(x) - (n.norm(x) - n.small(x)), {"large": ["small", "norm"]}),
    "norm behind": (lambda n, x: n.norm(n.large(x) + n.pixel(x)), {"large": ["pixel"]}),
    "dilated": (lambda n, x: n.large(x) + n.dilated(x), {"large": ["dilated"]}),
    "MobileOne, pointwise": (
        lambda n, x: n.norm(x) + n.dense_norm(n.dense_pixel(x)) + n.pixel(x),
        {"dense_pixel": ["norm", "pixel"]},
    ),
    "depthwise and grouped": (lambda n, x: n.small(x) + n.grouped(x), {"grouped": ["small"]}),
    "strided": (lambda n, x: n.strided(x) + n.strided_pixel(x), {"strided": ["strided_pixel"]}),
    "two inputs": (
        lambda n, x: torch.cat([n.large(x) + n.pixel(x), n.small(y := x.relu()) + n.norm(y)], 1),
        {"large": ["pixel"], "small": ["norm"]},
    ),
}
MIXED: dict[str, tuple[Body, dict[str, list[str]]]] = {
    "RepVGG": (
        lambda n, x: n.large_norm(n.dense(x)) + n.dense_norm(n.dense_pixel(x)) + n.norm(x),
        {"dense": ["dense_norm", "dense_pixel", "norm"]},
    ),
    "three": (lambda n, x: n.small(x) + n.grouped(x) + n.dense(x), {"dense": ["grouped", "small"]}),
    "dense and depthwise": (lambda n, x: n.dense(x) + n.pixel(x), {"dense": ["pixel"]}),
    "grouped": (lambda n, x: n.norm(x) - n.grouped(x), {"grouped": ["norm"]}),
}
"""Dense kernels of several sizes."""
LEFT: dict[str, Body] = {
    "neither has the room": lambda n, x: n.wide(x) + n.lines(nn.functional.pad(x, (0, 0, 2, 2))),
    "of another tensor": lambda n, x: n.large(x) + n.pixel(x.relu()),
    "something else reads it": lambda n, x: (y := n.large(x)) + n.pixel(x) * y.sigmoid(),
    "residual": lambda n, x: x + n.drop(n.norm(n.small(x))),
    "no convolution": lambda n, x: n.norm(x) + x,
    "statistics of the batch": lambda n, x: n.large(x) + n.by_batch(x),
    "sequence": lambda n, x: n.large(n.small(x)) + n.pixel(x),
    "broadcast": lambda n, x: n.large(x) + x[:1],
}
