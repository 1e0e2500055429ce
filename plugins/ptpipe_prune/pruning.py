"""Implementation of the prune stages.

S. Han et al., Learning both Weights and Connections for Efficient Neural Networks, arXiv 1506.02626 (magnitude);
A. Mishra et al., Accelerating Sparse Deep Neural Networks, arXiv 2104.08378 (n of m).
Shape legend: O output channels, I input channels (of a group), G groups of m inputs, M weights of such a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from ptpipe import JSON, Context, StageError, nearest
from ptpipe_prune.config import MagnitudeConfig, NMConfig, PruneConfig
from ptpipe_torch import Model

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


def magnitude(config: MagnitudeConfig, ctx: Context, model: Model) -> Model:
    """Implement `prune.magnitude`."""
    network = _float_network(ctx, model)
    layers = _layers(network, config, ctx)
    weights = {name: layer.weight.detach() for name, layer in layers.items()}
    groups = [list(weights.values())] if config.scope == "global" else [[weight] for weight in weights.values()]
    for group in groups:
        _prune_smallest(group, config.amount)
    for name, weight in weights.items():
        if not weight.any():
            raise StageError(
                f"{ctx.kind}: {name} would keep no weight: choose a smaller amount, scope layer, or keep the layer "
                f"dense (skip: [{name}])"
            )
    return _pruned(model, network, weights, ctx)


def n_m(config: NMConfig, ctx: Context, model: Model) -> Model:
    """Implement `prune.n_m`."""
    network = _float_network(ctx, model)
    layers = _layers(network, config, ctx)
    divisible = {name: layer for name, layer in layers.items() if _inputs_last(layer).shape[-1] % config.m == 0}
    if not divisible:
        raise StageError(f"{ctx.kind}: no layer has a number of input channels that is a multiple of {config.m}")
    for layer in divisible.values():
        _prune_groups(_inputs_last(layer), config.n, config.m)
    ctx.metric(dense_layers=list[JSON](name for name in layers if name not in divisible))
    return _pruned(model, network, {name: layer.weight.detach() for name, layer in divisible.items()}, ctx)


def _float_network(ctx: Context, model: Model) -> nn.Module:
    if model.recipe.backend is not None or model.recipe.convert:
        raise StageError(f"{ctx.kind} needs a float model, and got {model.format}: put it before the quant stages")
    return model.build()


def _layers(network: nn.Module, config: PruneConfig, ctx: Context) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers to prune, by name. Raises StageError for a pattern that matches none, and where none is left.

    A weight that another kind of layer uses too (a table of embeddings) stays as it is.
    """
    named = {name: layer for name, layer in network.named_modules() if name}
    users: dict[int, set[bool]] = {}
    for layer in named.values():
        for parameter in layer.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(isinstance(layer, _LAYERS))
    skipped = set(_skipped(named, config.skip, ctx))
    layers = {
        name: layer
        for name, layer in named.items()
        if isinstance(layer, _LAYERS) and name not in skipped and users.get(id(layer.weight)) == {True}
    }
    if not layers:
        raise StageError(f"{ctx.kind}: no convolution or linear layer is left to prune (skip: {list(config.skip)})")
    return layers  # type: ignore[return-value]  # all have a weight, which is what is asked of them


def _skipped(named: Mapping[str, nn.Module], patterns: Sequence[str], ctx: Context) -> Iterator[str]:
    """Yield the names of the layers that a pattern matches, and of those inside them."""
    for pattern in patterns:
        found = [name for name, layer in named.items() if fnmatchcase(name, pattern) or type(layer).__name__ == pattern]
        if not found:
            close = nearest(pattern, [*named, *{type(layer).__name__ for layer in named.values()}])
            hint = f" (did you mean {close!r}?)" if close else ""
            raise StageError(f"{ctx.kind}: skip: no layer's name or type matches {pattern!r}{hint}")
        for outer in found:
            yield from (name for name in named if f"{name}.".startswith(f"{outer}."))


def _prune_smallest(weights: Sequence[torch.Tensor], amount: float) -> None:
    """Set that fraction of all these weights, rounded down, to zero, in place; of equal ones the first."""
    sizes = torch.cat([weight.abs().flatten() for weight in weights])
    keeps = torch.ones_like(sizes, dtype=torch.bool)
    keeps[sizes.argsort(stable=True)[: int(amount * len(sizes))]] = False
    for weight, keep in zip(weights, torch.split(keeps, [weight.numel() for weight in weights]), strict=True):
        weight.mul_(keep.view(weight.shape))


def _inputs_last(layer: nn.Linear | nn.Conv2d) -> torch.Tensor:
    """Return a layer's weight as a view whose last axis is I."""
    return layer.weight.detach().movedim(0 if isinstance(layer, _TRANSPOSED) else 1, -1)


def _prune_groups(weight: torch.Tensor, n: int, m: int) -> None:
    """Set all but the n largest of every m weights along the last axis to zero, in place; of equal ones the first."""
    sizes_GM = weight.abs().reshape(-1, m)
    kept_GN = sizes_GM.argsort(dim=1, descending=True, stable=True)[:, :n]
    keeps_GM = torch.zeros_like(sizes_GM, dtype=torch.bool).scatter_(1, kept_GN, True)
    weight.mul_(keeps_GM.view(weight.shape))


def _pruned(model: Model, network: nn.Module, weights: Mapping[str, torch.Tensor], ctx: Context) -> Model:
    num_zeros = {name: int((weight == 0).sum()) for name, weight in weights.items()}
    num_weights = sum(weight.numel() for weight in weights.values())
    ctx.metric(
        sparsity=round(sum(num_zeros.values()) / num_weights, 4),
        num_weights=num_weights,
        num_zeros=sum(num_zeros.values()),
        sparsity_of_layers={name: round(num / weights[name].numel(), 4) for name, num in num_zeros.items()},
    )
    return Model.from_module(replace(model.recipe, is_sparse=True), network)
