"""A small U-Net, of operators that all have int8 kernels.

Shape legend: B images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch import DatasetInfo, builder
from ptpipe_zoo.nets import Rescale


@builder
def small_unet(
    *,
    shape_CHW: Sequence[int],
    num_classes: int,
    width: int,
    depth: int,
    scale: Sequence[float] = (),
    shift: Sequence[float] = (),
) -> nn.Module:
    """Build a `SmallUNet`, whose outputs are rescaled where `scale` has a number for each.

    Raises StageError for images whose sides can't be halved `depth` + 1 times.
    """
    channels, *sides = shape_CHW
    divisor = 2 ** (depth + 1)
    if any(side % divisor for side in sides):
        raise StageError(
            f"model.small_unet of depth {depth} needs images whose sides are multiples of {divisor}, not "
            f"{sides[0]}x{sides[1]}: choose another image_size, or a smaller depth"
        )
    network = SmallUNet(channels, num_classes, width, depth)
    return nn.Sequential(network, Rescale(scale, shift, num_axes=2)) if scale else network


def segmenter_sizes(kind: str, info: DatasetInfo) -> tuple[tuple[int, int, int], int]:
    """Return the shape (C, H, W) of an image, and K, the classes of a pixel or the numbers to predict for it.

    Raises StageError for data that is not images with masks or maps of their size.

    `kind`: of the stage, for errors.
    """
    match [spec.sample_shape for spec in (*info.signature.inputs, *info.signature.outputs)]:
        case [(int(channels), int(height), int(width)), (int(num_classes), *sides)] if sides == [height, width]:
            return (channels, height, width), num_classes
    raise StageError(
        f"{kind} takes images and returns classes or numbers for each pixel; {info.name} has {info.signature}"
    )


class SmallUNet(nn.Module):
    """A U-Net (Ronneberger, Fischer, Brox, 2015) with batch norm, whose first convolution halves the image.

    `width` channels at half the resolution, twice as many after each of `depth` poolings. The decoder repeats pixels
    instead of transposed convolutions.
    """

    def __init__(self, channels: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.stem = _convolution(channels, width, stride=2)
        self.encoder = nn.ModuleList(_block(size // 2, size) if size > width else _block(size, size) for size in widths)
        self.pool = nn.MaxPool2d(2)
        self.decoder = nn.ModuleList(_block(3 * size, size) for size in reversed(widths[:-1]))
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.head = nn.Sequential(_convolution(width, width), nn.Conv2d(width, num_classes, 1))

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 (B, K, H, W)."""
        x = self.stem(images_BCHW)
        skipped = []
        for level, block in enumerate(self.encoder):
            x = block(self.pool(x) if level else x)
            skipped.append(x)
        for block, skip in zip(self.decoder, reversed(skipped[:-1]), strict=True):
            x = block(torch.cat([self.upsample(x), skip], 1))
        logits_BKHW: torch.Tensor = self.head(self.upsample(x))
        return logits_BKHW


def _convolution(channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU()
    )


def _block(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(_convolution(channels, out_channels), _convolution(out_channels, out_channels))
