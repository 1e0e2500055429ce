"""A network of one's own: `model.tiny_resnet`, a residual network for small images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from ptpipe import Context, Stage, StageConfig, hookimpl, stage
from ptpipe_torch import Data, FunctionRef, Model, Recipe, builder

if TYPE_CHECKING:
    from torch import nn


class TinyResnetConfig(StageConfig):
    """Options of `model.tiny_resnet`."""

    width: int = Field(default=16, ge=1, le=512, description="channels of the first block, doubled by each further one")
    num_blocks: int = Field(default=2, ge=1, le=5, description="residual blocks; all but the first halve the image")


@builder
def tiny_resnet(in_channels: int, num_classes: int, width: int, num_blocks: int) -> nn.Module:
    """Build the architecture; the weights are loaded into it later."""
    from torch import nn  # here and not above, so that `ptpipe plan` need not wait for torch

    def convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)]

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(*convolution(inputs, outputs, stride), nn.ReLU(), *convolution(outputs, outputs))
            self.skip = nn.Sequential(*convolution(inputs, outputs, stride)) if stride > 1 else nn.Identity()
            self.relu = nn.ReLU()

        def forward(self, images_NCHW: Any) -> Any:
            return self.relu(self.body(images_NCHW) + self.skip(images_NCHW))

    blocks = [Block(width, width, 1)]
    blocks += [Block(width << number, width << number + 1, 2) for number in range(num_blocks - 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << num_blocks - 1, num_classes)]
    return nn.Sequential(*convolution(in_channels, width), nn.ReLU(), *blocks, *head)


@stage("model.tiny_resnet", packages=("torch",))
def make_tiny_resnet(config: TinyResnetConfig, ctx: Context, data: Data) -> Model:
    """Make a small residual network for the data set's channels and classes."""
    import torch

    (image, *_), (logits, *_) = data.info.signature.inputs, data.info.signature.outputs
    part = FunctionRef.to(
        tiny_resnet,
        in_channels=image.sample_shape[0],
        num_classes=logits.sample_shape[0],
        width=config.width,
        num_blocks=config.num_blocks,
    )
    with torch.random.fork_rng(devices=[]):  # torch's own random numbers stay as they were
        torch.manual_seed(ctx.seed)
        network = part.resolve("builder")(**part.arguments)
    ctx.metric(num_parameters=sum(parameter.numel() for parameter in network.parameters()))
    return Model.from_module(Recipe(part, data.info.signature), network)


@hookimpl
def ptpipe_stages() -> list[Stage[..., Any]]:
    """Offer the kinds of this file."""
    return [make_tiny_resnet]
