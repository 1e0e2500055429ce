"""timm's networks, adapted to a data set's channels, image size and classes.

Shape legend: C channels, H height, W width of an image; K classes.
"""

from __future__ import annotations

import importlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ptpipe import JSON, Context, StageError, nearest
from ptpipe_torch import Data, FunctionRef, Model, TensorSpec, builder
from ptpipe_torch.errors import first_line
from ptpipe_torch.torchvision_compat import torchvision
from ptpipe_zoo import extras, hub, nets
from ptpipe_zoo.config import TIMM_RESERVED
from ptpipe_zoo.weights import load_weights, read_weights, units_of, unwrapped

if TYPE_CHECKING:
    from ptpipe_zoo.config import TimmConfig


@cache
def timm() -> ModuleType:
    """Import and return timm. Raises StageError where it is not installed."""
    if (reason := extras.missing_extra("timm")) is not None:
        raise StageError(reason)
    torchvision()  # timm imports it, which fails beside a CPU build of torch unless this has been called
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # older ones use torch.jit.interface
        return importlib.import_module("timm")


@builder
def timm_network(  # by keyword: the arguments of a recipe
    *,
    name: str,
    shape_CHW: Sequence[int],
    num_classes: int,
    arguments: Mapping[str, JSON],
    scale: Sequence[float] = (),
    shift: Sequence[float] = (),
) -> nn.Module:
    """Build a network with random weights that returns logits (N, K).

    Args:
        name: as timm lists it.
        shape_CHW: shape of an image; networks that are built for a size get it.
        num_classes: K.
        arguments: further ones of the network, none of `TIMM_RESERVED`.
        scale: of each output, to the units of a regression's targets; empty: none.
        shift: added after it.

    Raises StageError for an unknown name or argument, and where it can't be built for images of this size.
    """
    # A name may also be the address of a repository, and an argument a file: both would be loaded.
    if (reason := _unknown(name)) is not None:
        raise StageError(reason)
    if reserved := sorted(TIMM_RESERVED & arguments.keys()):
        raise StageError(f"timm's {name} can't be given {', '.join(reserved)}")
    channels, *sides = shape_CHW
    config = timm().get_pretrained_cfg(name)
    sizes = {"img_size": tuple(sides)} if config is not None and config.fixed_input_size else {}
    with _one_line_errors(name, shape_CHW):
        network: nn.Module = timm().create_model(
            name, num_classes=num_classes, in_chans=channels, **{**sizes, **arguments}
        )
    _separate_activations(network)
    return nets.Rescaled(network, scale, shift) if scale else network


class NormActivation(nn.Sequential):
    """timm's batch norm with an activation, as two layers, which quantization fuses with a convolution before them."""

    def __init__(self, layer: Any) -> None:
        norm = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        norm.load_state_dict(layer.state_dict())
        parts = {"norm": norm, "drop": layer.drop, "act": layer.act}
        super().__init__(OrderedDict((name, part) for name, part in parts.items() if not isinstance(part, nn.Identity)))


def _separate_activations(network: nn.Module) -> None:
    for name, layer in list(network.named_modules()):
        if type(layer) is timm().layers.BatchNormAct2d:
            network.set_submodule(name, NormActivation(layer))


def build_model(config: TimmConfig, ctx: Context, data: Data) -> Model:
    """Implement `model.timm`."""
    shape_CHW, num_classes = nets.image_classifier_sizes("model.timm", data.info)
    sizes = {"name": config.name, "shape_CHW": shape_CHW, "num_classes": num_classes}
    builder_ref = FunctionRef.to(timm_network, **sizes, arguments=config.arguments, **nets.rescaling(data.info))
    module = nets.build_seeded(builder_ref, ctx.seed)
    network = nets.unscaled(module)
    _check_images(config.name, network, shape_CHW, data.info.signature.outputs[0])
    path = Path(config.weights_file).expanduser() if config.weights_file else None
    if config.weights:
        path = hub.cached_file(repository(config))
        if path is None:
            raise StageError(f"the weights {repository(config)} were not found: a run downloads them first")
        hub.verify(path)
    if path is not None:
        layers = _layers(network, "first_conv"), _layers(network, "classifier")
        given = read_weights(path, ctx.notice, config.weights_entry)
        state, notices = unwrapped(given, network.state_dict(), str(path))
        builder_ref, module = nets.with_units(builder_ref, module, units_of(given, network, layers[1], str(path)))
        for notice in (*notices, *load_weights(network, _renamed(state, network), *layers, source=str(path))):
            ctx.notice(notice)
    return nets.make_model(builder_ref, module, data.info, ctx)


def repository(config: TimmConfig) -> str:
    """Return the Hub's repository of a network's published weights, by timm's convention."""
    return f"timm/{config.name}.{config.weights}"


def problems(config: TimmConfig) -> Iterator[str]:
    """Yield a line for each reason why the network can't be built here; download published weights."""
    if (reason := _unknown(config.name)) is not None:
        yield reason
    elif config.weights:
        full_name = f"{config.name}.{config.weights}"
        published = timm().list_pretrained(f"{config.name}.*")
        found = timm().get_pretrained_cfg(full_name) if full_name in published else None
        if found is None:
            available = ", ".join(name.partition(".")[2] for name in published) or "none"
            yield f"{config.name} has no published weights {config.weights!r}; available: {available}"
        elif found.hf_hub_id not in ("timm/", repository(config)):
            yield f"{full_name} is not published by timm but as {found.hf_hub_id}: download it, use weights_file"
        else:
            try:
                hub.fetch(repository(config))
            except StageError as error:
                yield str(error)


def _unknown(name: str) -> str | None:
    if name in timm().list_models():
        return None
    suggestion = nearest(name, extras.longest_prefix_first(name, timm().list_models()))
    hint = f" (did you mean {suggestion!r}?)" if suggestion else ""
    return f"timm {timm().__version__} has no network {name!r}{hint}"


def _renamed(state: dict[str, torch.Tensor], network: nn.Module) -> dict[str, torch.Tensor]:
    """Return timm's state dict with the names of `NormActivation`."""
    layers = {name for name, layer in network.named_modules() if isinstance(layer, NormActivation)}

    def renamed(name: str) -> str:
        layer, _, tensor = name.rpartition(".")
        return f"{layer}.norm.{tensor}" if layer in layers else name

    return {renamed(name): tensor for name, tensor in state.items()}


def _layers(network: nn.Module, role: str) -> list[str]:
    """Return the names of the layers that depend on the data: `first_conv`, `classifier`."""
    config: Any = getattr(network, "pretrained_cfg", None) or {}
    named = config.get(role) or ()
    return [named] if isinstance(named, str) else list(named)


def _check_images(name: str, network: nn.Module, shape_CHW: Sequence[int], outputs: TensorSpec) -> None:
    with _one_line_errors(name, shape_CHW), torch.inference_mode():
        logits = network.eval()(torch.zeros(1, *shape_CHW))
    if not (isinstance(logits, torch.Tensor) and outputs.fits(logits.shape)):
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise StageError(f"timm's {name}, built with these arguments, returns {found}; it must return {outputs}")


@contextmanager
def _one_line_errors(name: str, shape_CHW: Sequence[int]) -> Iterator[None]:
    """Convert timm's errors for arguments and image sizes into a StageError of one line."""
    try:
        yield
    except Exception as error:  # some 1,400 networks: each may raise anything
        _, height, width = shape_CHW
        reason = first_line(error)
        raise StageError(
            f"timm's {name} can't be built with these arguments for images of {height}x{width} pixels: {reason}"
        ) from error
