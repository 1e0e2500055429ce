"""torchvision's classification networks, fitted to a data set's images and classes.

Shape legend: C channels, H height, W width of an image; K classes; O outputs of a layer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_type_hints

import torch
from torch import nn

from ptpipe import JSON, StageError
from ptpipe_torch import builder
from ptpipe_torch.torchvision_compat import torchvision


@builder
def classifier(*, name: str, shape_CHW: Sequence[int], num_classes: int, transform_input: bool = False) -> nn.Module:
    """Build a network that returns plain logits (N, K), in training too, with random weights.

    `transform_input`: rescale images as Inception's published weights want it. Raises StageError for an unknown
    name, and where the network can't be built for images of this size.
    """
    models = torchvision().models
    if name not in names():
        raise StageError(f"torchvision {torchvision().__version__} has no classification network {name!r}")
    with _explained(name, shape_CHW):
        options = _options(models.get_model_builder(name), shape_CHW, transform_input)
        network: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    if isinstance(network, models.MNASNet):
        network.__class__ = _mnasnet()
    _take_channels(stem(network)[1], shape_CHW[0])
    return network


def names() -> list[str]:
    """Names of all of torchvision's classification networks."""
    models = torchvision().models
    return list(models.list_models(module=models))


def published(name: str) -> dict[str, str]:
    """Addresses of the network's published weights by name, `DEFAULT` among them."""
    weights = torchvision().models.get_model_weights(name)
    return {word: entry.url for word, entry in weights.__members__.items()}


def published_input(name: str) -> dict[str, JSON]:
    """Arguments of `classifier` that make a network treat its input as when its published weights were trained."""
    takes = _constructor(torchvision().models.get_model_builder(name))
    return {"transform_input": True} if "transform_input" in takes else {}


def stem(network: nn.Module) -> tuple[str, nn.Conv2d]:
    """The name and layer that sees the image."""
    return next((name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d))


def head(network: nn.Module, num_classes: int) -> str:
    """The name of the layer that gives the logits: linear, or in SqueezeNet a convolution."""
    layers = [name for name, layer in network.named_modules() if _num_outputs(layer) == num_classes]
    return str(layers[-1])


def check_images(name: str, network: nn.Module, shape_CHW: Sequence[int], num_classes: int) -> None:
    """Send one image through. Raises StageError where the network can't take images of this size."""
    with _explained(name, shape_CHW), torch.inference_mode():
        logits_NK = network.eval()(torch.zeros(1, *shape_CHW))
    assert logits_NK.shape == (1, num_classes), logits_NK.shape


def _num_outputs(layer: nn.Module) -> int | None:
    return layer.weight.shape[0] if isinstance(layer, nn.Linear | nn.Conv2d) else None


def _constructor(build: Any) -> set[str]:
    """Names of what the network's own constructor takes; the builder function hides them behind **kwargs."""
    return set(inspect.signature(get_type_hints(build)["return"]).parameters)


def _options(build: Any, shape_CHW: Sequence[int], transform_input: bool) -> dict[str, Any]:
    takes = _constructor(build)
    _, height, width = shape_CHW
    options: dict[str, Any] = {}
    if "aux_logits" in takes:  # else they return a tuple in training
        options |= {"aux_logits": False, "init_weights": True, "transform_input": transform_input}
    if "image_size" in takes:
        if height != width:
            raise ValueError("it takes square images only")
        options["image_size"] = height
    if "input_size" in takes:
        options["input_size"] = (height, width)
    return options


def _take_channels(layer: nn.Conv2d, channels: int) -> None:
    """Make the layer take images of that many channels, with new weights that keep the spread of its outputs."""
    if layer.in_channels == channels:
        return
    outputs, inputs, *kernel = layer.weight.shape
    spread = layer.weight.detach().std() * math.sqrt(inputs / channels)
    layer.weight = nn.Parameter(torch.randn(outputs, channels, *kernel) * spread)
    layer.in_channels = channels


@contextmanager
def _explained(name: str, shape_CHW: Sequence[int]) -> Iterator[None]:
    """Turn what torchvision raises for images of a wrong size into a StageError of one line."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as error:
        _, height, width = shape_CHW
        reason = str(error).strip().partition("\n")[0]
        raise StageError(f"torchvision's {name} can't take images of {height}x{width} pixels: {reason}") from error


def _mnasnet() -> type[nn.Module]:
    """MNASNet without its own way of loading: it asks for a version number, which a tensor file doesn't carry."""

    class PlainMnasnet(torchvision().models.MNASNet):  # type: ignore[misc]  # torchvision has no types
        _load_from_state_dict = nn.Module._load_from_state_dict

    return PlainMnasnet
