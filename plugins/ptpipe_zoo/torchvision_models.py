"""torchvision's classification networks, adapted to a data set's channels, image size and classes.

What its other networks need too: the first layer, one-line errors.
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
from ptpipe_torch import TensorSpec, builder
from ptpipe_torch.torchvision_compat import torchvision
from ptpipe_zoo.nets import Rescaled


@builder
def classifier(  # by keyword: the arguments of a recipe
    *,
    name: str,
    shape_CHW: Sequence[int],
    num_classes: int,
    transform_input: bool = False,
    scale: Sequence[float] = (),
    shift: Sequence[float] = (),
) -> nn.Module:
    """Build a network with random weights that returns logits (N, K), also in training mode.

    Args:
        name: as torchvision registers it.
        shape_CHW: shape of an image.
        num_classes: K.
        transform_input: rescale the images as Inception's published weights expect.
        scale: of each output, to the units of a regression's targets; empty: none.
        shift: added after it.

    Raises StageError for an unknown name, and where the network can't be built for images of this size.
    """
    models = torchvision().models
    if name not in list_classifiers():
        raise StageError(f"torchvision {torchvision().__version__} has no classification network {name!r}")
    with one_line_errors(name, shape_CHW):
        options = _options(models.get_model_builder(name), shape_CHW, transform_input)
        network: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    if isinstance(network, models.MNASNet):
        network.__class__ = _mnasnet()
    adapt_channels(stem(network)[1], shape_CHW[0])
    if not scale:
        return network
    if isinstance(network, models.SqueezeNet):
        network.classifier[2] = nn.Identity()  # a ReLU, above whose zero are only targets above their mean
    return Rescaled(network, scale, shift)


def list_classifiers() -> list[str]:
    """Return the names of all of torchvision's classification networks."""
    models = torchvision().models
    return list(models.list_models(module=models))


def weight_urls(name: str) -> dict[str, str]:
    """Return the URLs of a network's published weights by name, including `DEFAULT`."""
    weights = torchvision().models.get_model_weights(name)
    return {word: entry.url for word, entry in weights.__members__.items()}


def pretrained_arguments(name: str) -> dict[str, JSON]:
    """Return the arguments of `classifier` that preprocess the input as in training of the published weights."""
    accepted = _constructor_parameters(torchvision().models.get_model_builder(name))
    return {"transform_input": True} if "transform_input" in accepted else {}


def stem(network: nn.Module) -> tuple[str, nn.Conv2d]:
    """Return name and module of the first convolution, whose input is the image."""
    return next((name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d))


def head(network: nn.Module, num_classes: int) -> str:
    """Return the name of the layer that outputs the logits: linear, or in SqueezeNet a convolution."""
    layers = [name for name, layer in network.named_modules() if _num_outputs(layer) == num_classes]
    return str(layers[-1])


def check_images(name: str, network: nn.Module, shape_CHW: Sequence[int], outputs: TensorSpec) -> None:
    """Run the network on one image. Raises StageError if it doesn't accept images of this size."""
    with one_line_errors(name, shape_CHW), torch.inference_mode():
        logits = network.eval()(torch.zeros(1, *shape_CHW))
    assert outputs.fits(logits.shape), logits.shape


def _num_outputs(layer: nn.Module) -> int | None:
    return layer.weight.shape[0] if isinstance(layer, nn.Linear | nn.Conv2d) else None


def _constructor_parameters(build: Any) -> set[str]:
    """Return parameter names of the network's class; its builder function hides them behind **kwargs."""
    return set(inspect.signature(get_type_hints(build)["return"]).parameters)


def _options(build: Any, shape_CHW: Sequence[int], transform_input: bool) -> dict[str, Any]:
    accepted = _constructor_parameters(build)
    _, height, width = shape_CHW
    options: dict[str, Any] = {}
    if "aux_logits" in accepted:  # otherwise they return a tuple in training mode
        options |= {"aux_logits": False, "init_weights": True, "transform_input": transform_input}
    if "image_size" in accepted:
        if height != width:
            raise ValueError("it accepts square images only")
        options["image_size"] = height
    if "input_size" in accepted:
        options["input_size"] = (height, width)
    return options


def adapt_channels(layer: nn.Conv2d, channels: int) -> None:
    """Replace the weights for another number of input channels, preserving the variance of the outputs."""
    if layer.in_channels == channels:
        return
    outputs, inputs, *kernel = layer.weight.shape
    std = layer.weight.detach().std() * math.sqrt(inputs / channels)
    layer.weight = nn.Parameter(torch.randn(outputs, channels, *kernel) * std)
    layer.in_channels = channels


@contextmanager
def one_line_errors(name: str, shape_CHW: Sequence[int]) -> Iterator[None]:
    """Convert torchvision's errors for unsupported image sizes into a StageError of one line."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as error:
        _, height, width = shape_CHW
        reason = str(error).strip().partition("\n")[0]
        raise StageError(f"torchvision's {name} doesn't support images of {height}x{width} pixels: {reason}") from error


def _mnasnet() -> type[nn.Module]:
    """MNASNet without its custom loading hook: that needs a version number, which a safetensors file doesn't have."""

    class PlainMnasnet(torchvision().models.MNASNet):  # type: ignore[misc]  # torchvision has no types
        _load_from_state_dict = nn.Module._load_from_state_dict

    return PlainMnasnet
