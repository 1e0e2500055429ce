"""Networks whose channels have ranges of very different sizes, as training of separable networks leaves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import Context
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare
from ptpipe_torch import Data, Model, builder
from ptpipe_torch.runtime import torch_threads

from ..conftest import NUM_CLASSES, logits_of, make_model, train


@builder
def separable_net(*, activation: str = "ReLU") -> nn.Module:
    """Convolution, depthwise and pointwise convolution with batch norms, pooling, linear layer."""

    def block(layer: nn.Module, channels: int) -> list[nn.Module]:
        return [layer, nn.BatchNorm2d(channels), getattr(nn, activation)()]

    return nn.Sequential(
        *block(nn.Conv2d(1, 8, 3, padding=1, bias=False), 8),
        *block(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), 8),
        *block(nn.Conv2d(8, 16, 1, bias=False), 16),
        nn.MaxPool2d(2),
        *block(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), 16),
        *block(nn.Conv2d(16, 24, 1, bias=False), 24),
        nn.Flatten(),
        nn.Linear(24 * 16, NUM_CLASSES),
    )


class Residual(nn.Module):
    """A skip connection, a shared layer, a layer of several readers, one in front of ReLU6, several spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.Conv2d(8, 8, 3, padding=1)
        self.shared = nn.Conv2d(8, 8, 1)
        self.clipped, self.behind = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1, bias=False)
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect")
        self.prelu = nn.PReLU(8)
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.b(F.leaky_relu(self.a(x), 0.1))
        x = self.shared(self.shared(x).relu())
        x = self.prelu(self.behind(F.relu6(self.clipped(x))))
        x = torch.cat([self.left(x), self.right(x)], 1)
        x = F.adaptive_avg_pool2d(x, 1)
        x = torch.relu(self.hidden(x.view(x.size(0), -1)))
        logits_NK: torch.Tensor = self.head(x)
        return logits_NK


@builder
def residual_net() -> nn.Module:
    """What `Residual` says."""
    return Residual()


def with_uneven_channels(model: Model) -> Model:
    """Scale the channels of each batch norm by 2**-4 to 2**4, and undo it in the next layer: the same function.

    For `separable_net`: as float networks may be, and as int8 with one scale per tensor can't.
    """
    state = {name: tensor.clone() for name, tensor in model.tensors.items()}
    random = torch.Generator().manual_seed(0)
    for first, second in ((1, 3), (4, 6), (7, 10), (11, 13)):
        scale = 2.0 ** (torch.rand(len(state[f"{first}.weight"]), generator=random) * 8 - 4)
        state[f"{first}.weight"] *= scale
        state[f"{first}.bias"] *= scale
        weight = state[f"{second}.weight"]
        is_depthwise = weight.shape[1] == 1
        state[f"{second}.weight"] = weight / scale.reshape((-1, 1, 1, 1) if is_depthwise else (1, -1, 1, 1))
    return Model(model.recipe, state)


def static_int8(
    model: Model, data: Data, ctx: Context, repair: Callable[[Model], Model] = lambda model: model, **options: Any
) -> Model:
    """Prepare, calibrate, repair and convert, with one scale per weight."""
    options = {"weights": "per_tensor", "observer": "min_max", **options}
    prepared = prepare(PrepareConfig(**options), ctx, model)
    return convert(ConvertConfig(), ctx, repair(calibrate(CalibrateConfig(), ctx, prepared, data).model))


def difference(one: Model, other: Model, data: Data, num_samples: int | None = 300) -> float:
    """Root mean square of the logits' difference, in standard deviations of the second model's logits."""
    first_NK, second_NK = (logits_of(model, data, num_samples) for model in (one, other))
    return float(np.sqrt(((first_NK - second_NK) ** 2).mean()) / second_NK.std())


@pytest.fixture(scope="session")
def separable(digits: Data) -> Model:
    """`separable_net`, trained on digits to some 95 %."""
    with torch_threads(1):
        return train(make_model(separable_net), digits, lr=0.05, epochs=4)
