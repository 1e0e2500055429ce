"""torchvision's segmentation networks, adapted to a data set's channels, image size and classes.

Shape legend: B images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch import builder
from ptpipe_torch.torchvision_compat import torchvision
from ptpipe_zoo.nets import Rescaled
from ptpipe_zoo.torchvision_models import adapt_channels, one_line_errors, stem


@builder
def segmenter(
    *,
    name: str,
    shape_CHW: Sequence[int],
    num_classes: int,
    scale: Sequence[float] = (),
    shift: Sequence[float] = (),
) -> nn.Module:
    """Build a network with random weights that returns logits (B, K, H, W), without its auxiliary classifier.

    Args:
        name: as torchvision registers it.
        shape_CHW: shape of an image.
        num_classes: K.
        scale: of each output, to the units of a regression's maps; empty: none.
        shift: added after it.

    Raises StageError for an unknown name.
    """
    models = torchvision().models
    if name not in list_segmenters():
        raise StageError(f"torchvision {torchvision().__version__} has no segmentation network {name!r}")
    with one_line_errors(name, shape_CHW):
        network: nn.Module = models.get_model(
            name, weights=None, weights_backbone=None, num_classes=num_classes, aux_loss=False
        )
    network.__class__ = _returning_logits(type(network))
    adapt_channels(stem(network)[1], shape_CHW[0])
    return Rescaled(network, scale, shift, num_axes=2) if scale else network


def list_segmenters() -> list[str]:
    """Return the names of all of torchvision's segmentation networks."""
    models = torchvision().models
    return list(models.list_models(module=models.segmentation))


def heads(network: nn.Module) -> list[str]:
    """Return the names of the layers that output the logits; LR-ASPP adds two."""
    classifier = network.get_submodule("classifier")
    if isinstance(classifier, nn.Sequential):
        return [f"classifier.{len(classifier) - 1}"]
    return ["classifier.low_classifier", "classifier.high_classifier"]


def _returning_logits(type_: Any) -> type[nn.Module]:
    """Return the class with a `forward` that returns the entry `out` of its dict; parameters keep their names."""

    def forward(self: nn.Module, images_BCHW: torch.Tensor) -> torch.Tensor:
        logits_BKHW: torch.Tensor = type_.forward(self, images_BCHW)["out"]
        return logits_BKHW

    return type(f"{type_.__name__}Logits", (type_,), {"forward": forward})
