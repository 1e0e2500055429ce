"""Builders of the MLP and the small CNN, and seeded construction of any network.

Every nonlinearity is a module, so that FX quantization can fuse it with the preceding layer.
Shape legend: C channels, H height, W width of an image; K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe_torch import DatasetInfo, FunctionRef, Model, Recipe, builder


@builder
def mlp(*, shape_CHW: Sequence[int], num_classes: int, hidden: Sequence[int], dropout: float) -> nn.Sequential:
    """Build fully connected layers with ReLU, and dropout unless it is 0, on the flattened image."""
    layers: list[nn.Module] = [nn.Flatten()]
    channels, height, width = shape_CHW
    size = channels * height * width
    for next_size in hidden:
        layers += [nn.Linear(size, next_size), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        size = next_size
    return nn.Sequential(*layers, nn.Linear(size, num_classes))


@builder
def small_cnn(*, shape_CHW: Sequence[int], num_classes: int, width: int) -> nn.Sequential:
    """Build two blocks (3x3 convolution, batch norm, ReLU, 2x2 max pooling) and two linear layers.

    Raises StageError for images below 4x4: pooling twice would leave nothing.
    """
    channels, height, image_width = shape_CHW
    if min(height, image_width) < 4:
        raise StageError(f"model.small_cnn needs images of at least 4x4 pixels, not {height}x{image_width}")
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 4) * (image_width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def build_seeded(builder_ref: FunctionRef, seed: int) -> nn.Module:
    """Build the network with initial weights that depend on the seed alone, without touching torch's global RNG."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return builder_ref.resolve("builder")(**builder_ref.arguments)


def make_model(builder_ref: FunctionRef, network: nn.Module, info: DatasetInfo, ctx: Context) -> Model:
    """Return a Model with the weights of `network`, which `builder_ref` built; record its number of parameters."""
    ctx.metric(num_parameters=sum(parameter.numel() for parameter in network.parameters()))
    return Model.from_module(Recipe(builder_ref, info.signature), network)
