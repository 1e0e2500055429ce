"""Trained weights from a file or a published address, fitted to a network.

Shape legend: O outputs, I inputs of a layer, h and w its kernel.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import torch
from safetensors.torch import load_file
from torch import nn

from ptpipe import Context, StageError
from ptpipe_zoo.classifiers import head, stem

_TIMEOUT_S = 10.0
_BLOCK_BYTES = 1 << 20
# DenseNet's published files write `norm.1`, which a module name can't contain any more.
_OLD_DENSENET = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)")
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
_COUNTER = ".num_batches_tracked"


def download(url: str, ctx: Context) -> Path:
    """Fetch a published file into torch's own cache, unless it is there. Raises StageError without a network."""
    name = Path(urlsplit(url).path).name
    file = Path(torch.hub.get_dir()) / "checkpoints" / name
    if file.exists():
        return file
    partial = file.with_name(f"{name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        digest = _copy(url, partial, ctx)
        published = re.search(r"-([0-9a-f]{8,})\.", name)  # torch.hub's way: the name holds the digest's start
        if published and not digest.startswith(published[1]):
            raise StageError(f"{url} gave a file with SHA-256 {digest[:12]}..., not {published[1]}...: try again")
        partial.replace(file)
    except (OSError, HTTPException) as error:
        raise StageError(f"can't fetch {url} ({error}): name a local file with weights_file") from error
    finally:
        partial.unlink(missing_ok=True)
    return file


def _copy(url: str, path: Path, ctx: Context) -> str:
    digest, done = hashlib.sha256(), 0
    with urlopen(url, timeout=_TIMEOUT_S) as response, path.open("wb") as out:  # noqa: S310  # torchvision's own addresses
        total = int(response.headers.get("Content-Length") or 0) or None
        while block := response.read(_BLOCK_BYTES):
            out.write(block)
            digest.update(block)
            done += len(block)
            ctx.progress(done, total, "bytes")
    return digest.hexdigest()


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a state dict from a safetensors file, or from one of torch.save, without running anything in it.

    Raises StageError where the file can't be read or is not a state dict.
    """
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StageError(f"can't read {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged file may raise anything in torch's unpickler
        advice = "write one with torch.save(model.state_dict(), path) or safetensors"
        raise StageError(f"{path} is not a file of tensors alone: {advice}") from error
    if _is_state(content):
        return dict(content)
    inner = [str(key) for key, value in content.items() if _is_state(value)] if isinstance(content, Mapping) else []
    found = f"its entry {inner[0]!r} is one: save that alone" if inner else f"it holds a {type(content).__name__}"
    raise StageError(f"{path} is not a state dict; {found}")


def _is_state(content: object) -> bool:
    return (
        isinstance(content, Mapping)
        and len(content) > 0
        and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in content.items())
    )


def load_weights(network: nn.Module, weights: Mapping[str, torch.Tensor], num_classes: int, source: str) -> list[str]:
    """Copy trained weights into the network, in place; say what was changed to make them fit.

    A first layer for RGB is made to take the network's channels. A last layer for other classes is left out: the
    network's own stays. Raises StageError where anything else is missing, unknown or of another shape.
    """
    own = network.state_dict()
    state = _renamed(weights)
    notices = [*_fit_stem(state, own, f"{stem(network)[0]}.weight"), *_fit_head(state, own, head(network, num_classes))]
    for name in own:
        if name.endswith(_COUNTER):  # older files lack it
            state.setdefault(name, own[name])
    problems = _problems(state, own)
    if problems:
        raise StageError(f"{source} doesn't fit the network: {'; '.join(problems)}")
    network.load_state_dict(state)
    return notices


def _renamed(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = "module." if all(name.startswith("module.") for name in weights) else ""  # saved from DataParallel
    named = {_OLD_DENSENET.sub(r"\1\2", name.removeprefix(prefix)): tensor for name, tensor in weights.items()}
    return {name: tensor for name, tensor in named.items() if not name.startswith(_AUXILIARY)}


def _fit_stem(state: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor], name: str) -> list[str]:
    given_OIhw, wanted_OIhw = state.get(name), own[name]
    if given_OIhw is None or given_OIhw.shape[1:2] != (3,) or wanted_OIhw.shape[1] == 3:
        return []
    channels = wanted_OIhw.shape[1]
    if channels == 1:  # a grey image is one whose three channels are equal
        state[name] = given_OIhw.sum(1, keepdim=True)
    else:  # RGBRG..., so scaled that the sum over the inputs stays about the same
        state[name] = given_OIhw.repeat(1, math.ceil(channels / 3), 1, 1)[:, :channels] * (3 / channels)
    return [f"the weights' first layer is for 3 channels: made to take {channels}"]


def _fit_head(state: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor], layer: str) -> list[str]:
    given, wanted = state.get(f"{layer}.weight"), own[f"{layer}.weight"]
    if given is None or given.shape[1:] != wanted.shape[1:] or given.shape[0] == wanted.shape[0]:
        return []
    state |= {name: own[name] for name in (f"{layer}.weight", f"{layer}.bias") if name in own}
    return [
        f"the weights' last layer ({layer}) is for {given.shape[0]} classes: it starts afresh for {wanted.shape[0]}"
    ]


def _problems(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> list[str]:
    shapes = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    groups = (
        ("missing", [name for name in own if name not in state]),
        ("unknown", [name for name in state if name not in own]),
        ("of another shape", shapes),
    )
    return [f"{len(names)} {what}: {_some(names)}" for what, names in groups if names]


def _some(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
