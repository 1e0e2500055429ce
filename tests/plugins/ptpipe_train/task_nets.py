"""A segmenter without batch norm, as a plugin: it trains alike however a batch is divided."""

from __future__ import annotations

from torch import nn

from ptpipe import Context, StageConfig, stage
from ptpipe_torch import Data, FunctionRef, Model, Recipe, builder
from ptpipe_torch.runtime import seeded


@builder
def segmenter(*, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, num_classes, 1)
    )


class NoConfig(StageConfig):
    """It has no options."""


@stage("net.segmenter", packages=("torch",))
def net_segmenter(config: NoConfig, ctx: Context, data: Data) -> Model:
    """Make the network."""
    ref = FunctionRef.to(segmenter, num_classes=data.info.signature.outputs[0].shape[1])
    with seeded(ctx.seed):
        return Model.from_module(Recipe(ref, data.info.signature), segmenter(**ref.arguments))
