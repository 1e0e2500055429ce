"""Which weights of a network are pruned: those of convolutions and linear layers, the smallest first.

S. Han et al., Learning both Weights and Connections for Efficient Neural Networks, arXiv 1506.02626.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ptpipe import StageError, nearest

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


def prunable_layers(network: nn.Module, skip: Sequence[str], place: str) -> dict[str, Any]:
    """Return the layers with weights to prune, by name, also of a network that was prepared for int8.

    A weight that another kind of layer uses too (a table of embeddings) stays as it is. `skip`: names (`layer4.*`) or
    types (`Linear`) to leave dense; `place`: what messages begin with. Raises StageError for a pattern that matches
    none, and where no layer is left.
    """
    named = {name: layer for name, layer in network.named_modules() if name}
    users: dict[int, set[bool]] = {}
    for layer in named.values():
        for parameter in layer.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(_is_prunable(layer))
    skipped = set(_skipped(named, skip, place))
    layers: dict[str, Any] = {name: layer for name, layer in named.items() if _is_prunable(layer)}
    found = {
        name: layer for name, layer in layers.items() if name not in skipped and users.get(id(layer.weight)) == {True}
    }
    if not found:
        raise StageError(f"{place}: no convolution or linear layer is left to prune (skip: {list(skip)})")
    return found


def dense_layers(network: nn.Module, skip: Sequence[str], place: str) -> list[str]:
    """Return the names of layers whose weights can't be set to zero, of those that `skip` does not name.

    A parametrization or weight norm computes them, or they are the projections inside of attention.
    """
    named = {name: layer for name, layer in network.named_modules() if name}
    skipped = set(_skipped(named, skip, place))
    return [
        name
        for name, layer in named.items()
        if name not in skipped
        and (
            isinstance(layer, nn.MultiheadAttention)
            or (_is_prunable(layer) and not isinstance(layer.weight, nn.Parameter))
        )
    ]


def largest(weights: Sequence[torch.Tensor], amount: float) -> list[torch.Tensor]:
    """Return masks of what is kept where that fraction of all these weights is pruned: the smallest, in magnitude.

    The number of those is rounded down; of equal ones the first are pruned.
    """
    magnitudes = torch.cat([weight.abs().flatten() for weight in weights])
    keeps = torch.ones_like(magnitudes, dtype=torch.bool)
    keeps[magnitudes.argsort(stable=True)[: int(amount * len(magnitudes))]] = False
    parts = torch.split(keeps, [weight.numel() for weight in weights])
    return [keep.view(weight.shape) for weight, keep in zip(weights, parts, strict=True)]


def _is_prunable(layer: nn.Module) -> bool:
    # Layers that fake-quantize their weights may be of other types; this is torch's name for what does it.
    return isinstance(layer, _LAYERS) or hasattr(layer, "weight_fake_quant")


def _skipped(named: Mapping[str, nn.Module], patterns: Sequence[str], place: str) -> Iterator[str]:
    """Yield the names of the layers that a pattern matches, and of those inside them."""
    for pattern in patterns:
        found = [name for name, layer in named.items() if fnmatchcase(name, pattern) or type(layer).__name__ == pattern]
        if not found:
            close = nearest(pattern, [*named, *{type(layer).__name__ for layer in named.values()}])
            hint = f" (did you mean {close!r}?)" if close else ""
            raise StageError(f"{place}: skip: no layer's name or type matches {pattern!r}{hint}")
        for outer in found:
            yield from (name for name in named if f"{name}.".startswith(f"{outer}."))
