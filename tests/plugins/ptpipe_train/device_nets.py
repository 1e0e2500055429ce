"""Networks whose operators a CUDA device has in another form than the CPU."""

from __future__ import annotations

import torch
from torch import nn

from ptpipe_torch import builder

from .conftest import NUM_CLASSES, SIDE


@builder
def swish_net() -> nn.Module:
    """HardSwish as MobileNetV3 has it, twice."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Hardswish(), nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.Hardswish(),
        nn.Flatten(), nn.Linear(8 * SIDE * SIDE // 4, NUM_CLASSES),
    )  # fmt: skip


@builder
def gated_net() -> nn.Module:
    """Gates, whose outputs have a given range."""
    return GatedNet()


class GatedNet(nn.Module):
    """A convolution times a sigmoid, plus tanh; a hard-sigmoid of its means."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(1, 8, 3, 2, 1)
        self.weight, self.head = nn.Linear(8, 8), nn.Linear(8, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.value(images).tanh() * self.gate(images).sigmoid()
        means = features.mean((2, 3))
        logits: torch.Tensor = self.head(means * nn.functional.hardsigmoid(self.weight(means)))
        return logits


@builder
def part_in_float32_net() -> nn.Module:
    """Autocast switched off in its middle."""
    return PartInFloat32()


class PartInFloat32(nn.Module):
    """A convolution, linear layers in float32, one under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.head = nn.Conv2d(1, 8, 3, 2, 1), nn.Linear(8, 8), nn.Linear(8, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.conv(images).relu()
        with torch.autocast(images.device.type, enabled=False):
            means = self.linear(features.float().mean((2, 3)))
            means = means / means.square().mean(1, keepdim=True).add(0.1).sqrt()
        logits: torch.Tensor = self.head(means)
        return logits


@builder
def fourier_net() -> nn.Module:
    """A complex parameter."""
    return FourierNet()


class FourierNet(nn.Module):
    """A filter of frequencies, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(SIDE, SIDE // 2 + 1, dtype=torch.complex64) / SIDE)
        self.head = nn.Linear(SIDE * SIDE, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        filtered = torch.fft.irfft2(torch.fft.rfft2(images) * self.filter, s=images.shape[2:])
        logits: torch.Tensor = self.head(filtered.flatten(1))
        return logits


@builder
def ranking_net() -> nn.Module:
    """The four places that score best."""
    return RankingNet()


class RankingNet(nn.Module):
    """A convolution, the places of the best scores, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.score, self.head = nn.Conv2d(1, 8, 3, 2, 1), nn.Linear(8, 1), nn.Linear(8, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        places = self.conv(images).relu().flatten(2).transpose(1, 2)
        best = self.score(places).squeeze(2).topk(4).indices.unsqueeze(2).expand(-1, -1, 8)
        logits: torch.Tensor = self.head(places.gather(1, best)).mean(1)
        return logits


@builder
def scaled_net() -> nn.Module:
    """Layers whose outputs are multiplied."""
    return ScaledNet()


class ScaledNet(nn.Module):
    """Branches with a factor: one for each channel, behind a batch norm, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.norm, self.third, self.head = nn.BatchNorm2d(8), nn.Linear(8, 8), nn.Linear(8, NUM_CLASSES)
        self.gamma, self.gain = nn.Parameter(torch.full((8, 1, 1), 0.5)), nn.Parameter(torch.tensor(0.3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images).relu()
        x = x + self.gamma * self.one(x)
        x = (x + self.norm(self.two(x)) * self.gain).mean((2, 3))
        logits: torch.Tensor = self.head(x + self.third(x) * 0.2)
        return logits


NETWORKS = [swish_net, gated_net, scaled_net, part_in_float32_net, fourier_net, ranking_net]
