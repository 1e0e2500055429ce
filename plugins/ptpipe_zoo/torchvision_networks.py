"""Build the network of torchvision that a data set's task asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ptpipe_torch import DatasetInfo, FunctionRef
from ptpipe_zoo import nets, unet
from ptpipe_zoo import torchvision_models as classification
from ptpipe_zoo import torchvision_segmentation as segmentation

if TYPE_CHECKING:
    from ptpipe_zoo.config import TorchvisionConfig


@dataclass(frozen=True)
class FittedNetwork:
    """A network for a data set, and the names of the layers that depend on it, in what `nets.unscaled` returns."""

    builder_ref: FunctionRef
    module: nn.Module
    stems: list[str]
    heads: list[str]


def build(config: TorchvisionConfig, seed: int, info: DatasetInfo) -> FittedNetwork:
    """Build the network with random weights.

    Raises StageError where the data set is none of images with the network's task, or its images have a wrong size.
    """
    kind = f"model.torchvision ({config.name})"
    if config.name in segmentation.list_segmenters():
        shape_CHW, num_classes = unet.segmenter_sizes(kind, info)
        options: dict[str, Any] = {"name": config.name, "num_classes": num_classes, **nets.rescaling(info)}
        builder_ref = FunctionRef.to(segmentation.segmenter, shape_CHW=shape_CHW, **options)
        module = nets.build_seeded(builder_ref, seed)
        heads = segmentation.heads(nets.unscaled(module))
    else:
        shape_CHW, num_classes = nets.image_classifier_sizes(kind, info)
        options = {"name": config.name, "num_classes": num_classes, **nets.rescaling(info)}
        if config.weights and shape_CHW[0] == 3:
            options |= classification.pretrained_arguments(config.name)
        builder_ref = FunctionRef.to(classification.classifier, shape_CHW=shape_CHW, **options)
        module = nets.build_seeded(builder_ref, seed)
        heads = [classification.head(nets.unscaled(module), num_classes)]
    classification.check_images(config.name, module, shape_CHW, info.signature.outputs[0])
    return FittedNetwork(builder_ref, module, [classification.stem(nets.unscaled(module))[0]], heads)
