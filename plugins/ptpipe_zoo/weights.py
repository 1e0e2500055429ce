"""Pretrained weights: read a state dict, adapt it to a network.

Shape legend: O outputs, I inputs of a layer, h and w its kernel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import nn

from ptpipe import StageError
from ptpipe_torch.runtime import warnings_silenced

# DenseNet's published files have `norm.1`, but module names must no longer contain dots.
_OLD_DENSENET = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)")
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.", "aux_classifier.")
_UNITS = ("rescale.scale", "rescale.shift")
"""Of `nets.Rescaled`."""
_COUNTER = ".num_batches_tracked"
_STATISTICS = ("running_mean", "running_var")
_COMPILED = "_orig_mod."
"""What torch.compile puts in front of the names of what it wraps."""
_MAX_WRAPPERS = 3
_OTHER_CLASSES = (
    "argparse.Namespace",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "WindowsPath")),
    *(f"numpy.{module}.multiarray.scalar" for module in ("core", "_core")),
    "numpy.dtype",
)
"""What scripts save beside the weights, as their options and best accuracy: read as `_Unread`, never imported."""
_SAFE_GLOBALS = Lock()
"""torch has one list of them for all threads."""
_REFUSED_CLASS = re.compile(r"Unsupported global: GLOBAL (\S+)")


class _Unread:
    """Stands for an object of another class, whose content is left out."""

    def __new__(cls, *_: object) -> Self:
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        pass


def read_weights(path: Path, notice: Callable[[str], None], entry: str | None = None) -> dict[str, torch.Tensor]:
    """Read a state dict from a safetensors file, or from one of torch.save without executing pickled code.

    `notice`: receives the line about a checkpoint of which one entry is the state dict. `entry`: which one is, where
    there are several. Raises StageError if the file can't be read, or has no such state dict.
    """
    content = _content(path)
    if _is_state_dict(content) and entry is None:
        return dict(content)
    entries = content.items() if isinstance(content, Mapping) else ()
    found = {str(key): value for key, value in entries if _is_state_dict(value)}
    if entry is None and len(found) == 1:
        ((name, state),) = found.items()
        notice(f"the weights are those of the entry {name!r} of {path}")
        return dict(state)
    if entry in found:
        return dict(found[entry])
    names = " and ".join(map(repr, found))
    if _is_state_dict(content):
        reason = "it is one itself: leave `weights_entry` out"
    elif found:
        reason = f"its entries {names} are: choose one by `weights_entry`" if entry is None else f"it has {names}"
    else:
        held = "an object of another class" if isinstance(content, _Unread) else f"a {type(content).__name__}"
        reason = f"it contains {held}"
    problem = "is not a state dict;" if entry is None else f"has no state dict {entry!r}:"
    raise StageError(f"{path} {problem} {reason}")


def _content(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        stand_ins: list[Any] = [(_Unread, name) for name in _OTHER_CLASSES]
        with _SAFE_GLOBALS, warnings_silenced(), torch.serialization.safe_globals(stand_ins):  # of TorchScript
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StageError(f"can't read {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged file may raise anything in torch's unpickler
        advice = (
            "save one with torch.save(model.state_dict(), path) or safetensors. A whole model can be loaded, where you "
            "trust it, in a Python script of your own, which saves its state_dict()"
        )
        found = _REFUSED_CLASS.search(str(error))
        what = f" (it holds {found[1]})" if found else ""
        raise StageError(f"{path} is not a file of plain tensors{what}: {advice}") from error


def _is_state_dict(content: object) -> bool:
    return (
        isinstance(content, Mapping)
        and len(content) > 0
        and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in content.items())
    )


def load_weights(
    network: nn.Module, weights: Mapping[str, torch.Tensor], stems: Iterable[str], heads: Iterable[str], source: str
) -> list[str]:
    """Copy pretrained weights into the network, in place; return a line about each adaptation.

    A first layer for RGB is adapted to the network's channels. A last layer for other classes is dropped: the network
    keeps its own initialization.

    Args:
        network: changed in place.
        weights: a state dict.
        stems: names of the first layers, whose inputs are the images.
        heads: names of the last ones, whose outputs are the logits.
        source: of the weights, for errors.

    Raises StageError if any other tensor is missing, unexpected, of another shape or not finite.
    """
    own = network.state_dict()
    named = {_OLD_DENSENET.sub(r"\1\2", name): tensor for name, tensor in weights.items()}
    state, notices = unwrapped(named, own, source)
    state = {name: tensor for name, tensor in state.items() if not name.startswith(_AUXILIARY)}
    notices += [line for stem in stems for line in _fit_stem(state, own, f"{stem}.weight")]
    notices += [line for head in heads for line in _fit_head(state, own, head)]
    _load(network, state, source)
    return notices


def units_of(
    weights: Mapping[str, torch.Tensor], network: nn.Module, heads: Iterable[str], source: str
) -> dict[str, list[float]] | None:
    """Return by what the outputs of a regression's weights are scaled and shifted into the units of its targets.

    What ptpipe saved has both; weights without any were trained elsewhere, and return these units. None where the last
    layers (`heads`) are not those of the network, so that it gets others. `source` of the weights, for errors.
    """
    own = network.state_dict()
    state, _ = unwrapped(weights, own, source)
    names = [f"{head}.weight" for head in heads]
    if not all(name in state and state[name].shape == own[name].shape for name in names):
        return None
    return {
        name.rpartition(".")[2]: tensor.flatten().tolist() for name, tensor in weights.items() if name.endswith(_UNITS)
    }


def load_state(network: nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> list[str]:
    """Copy a state dict into the network it was saved from, in place; `source` names it in errors. Return notices.

    Raises StageError if any tensor is missing, unexpected, of another shape or not finite.
    """
    state, notices = unwrapped(weights, network.state_dict(), source)
    _load(network, state, source)
    return notices


def unwrapped(
    weights: Mapping[str, torch.Tensor], own: Iterable[str], source: str
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors by the names that they have without what wraps the network, and notices about the others.

    DataParallel adds `module.`, torch.compile `_orig_mod.`, and a training class (Lightning's) the attribute that the
    network is in it. `own`: the network's names. `source` of the weights, for notices. Raises StageError where several
    parts of the weights fit alike.
    """
    own = [*own]
    if not any(_COMPILED in name for name in own):
        weights = {name.replace(_COMPILED, ""): tensor for name, tensor in weights.items()}
    prefixes = {".".join(name.split(".")[:depth]) + "." for name in weights for depth in range(1, _MAX_WRAPPERS + 1)}
    num_found = {prefix: sum(prefix + name in weights for name in own) for prefix in ["", *sorted(prefixes)]}
    prefix, *others = [prefix for prefix, number in num_found.items() if number == max(num_found.values())]
    if prefix and others:
        raise StageError(f"{source} has the network more than once: {' and '.join(map(repr, (prefix, *others)))}")
    state = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    left_out = [name for name in weights if not name.startswith(prefix)]
    if not left_out:
        return state, []
    return state, [f"not loaded from {source}, being outside of {prefix!r}: {_first_few(left_out)}"]


def refuse_not_finite(network: nn.Module, source: str) -> None:
    """Raise StageError where a parameter or a norm's statistics have NaN, or a parameter to train infinite values.

    Other buffers may have either, and frozen parameters infinity, as masks do. `source`: of the weights, for errors.
    """
    buffers = (pair for pair in network.named_buffers() if pair[0].endswith(_STATISTICS))
    for name, tensor in (*network.named_parameters(), *buffers):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # Unlike isfinite(), the ends take no memory for each value; they are NaN where one is.
        smallest, largest = (float(end) for end in torch.aminmax(tensor.detach()))
        found = "NaN" if math.isnan(smallest) else "infinite values" if math.isinf(largest - smallest) else ""
        if found == "NaN" or (found and tensor.requires_grad):
            remedy = "take weights from before their training diverged"
            raise StageError(f"{source}: {name} has {found}, with which no network computes anything; {remedy}")


def _load(network: nn.Module, state: dict[str, torch.Tensor], source: str) -> None:
    own = network.state_dict()
    for name in own:
        if name.endswith(_COUNTER):  # missing in older files
            state.setdefault(name, own[name])
    problems = _problems(state, own)
    if problems:
        raise StageError(f"{source} doesn't match the network: {'; '.join(problems)}")
    network.load_state_dict(state)
    refuse_not_finite(network, source)


def _fit_stem(state: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor], name: str) -> list[str]:
    given_OIhw, own_OIhw = state.get(name), own.get(name)
    if given_OIhw is None or own_OIhw is None or given_OIhw.shape[1:2] != (3,) or own_OIhw.shape[1] == 3:
        return []
    channels = own_OIhw.shape[1]
    if channels == 1:  # a gray image has three equal channels: the outputs stay the same
        state[name] = given_OIhw.sum(1, keepdim=True)
    else:  # RGBRG..., scaled to preserve the sum over the inputs approximately
        state[name] = given_OIhw.repeat(1, math.ceil(channels / 3), 1, 1)[:, :channels] * (3 / channels)
    return [f"the weights' first layer has 3 input channels: adapted to {channels}"]


def _fit_head(state: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor], layer: str) -> list[str]:
    given, wanted = state.get(f"{layer}.weight"), own.get(f"{layer}.weight")
    if given is None or wanted is None or given.shape[1:] != wanted.shape[1:] or given.shape[0] == wanted.shape[0]:
        return []
    state |= {name: own[name] for name in (f"{layer}.weight", f"{layer}.bias") if name in own}
    return [f"the weights' last layer ({layer}) has {given.shape[0]} classes: reinitialized for {wanted.shape[0]}"]


def _problems(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> list[str]:
    shapes = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    groups = (
        ("missing", [name for name in own if name not in state]),
        ("unexpected", [name for name in state if name not in own]),
        ("of another shape", shapes),
    )
    return [f"{len(names)} {what}: {_first_few(names)}" for what, names in groups if names]


def _first_few(names: Iterable[str], maximum: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:maximum]) + (", ..." if len(names) > maximum else "")
