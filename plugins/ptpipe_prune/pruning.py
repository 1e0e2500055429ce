"""Implementation of the prune stages.

A. Mishra et al., Accelerating Sparse Deep Neural Networks, arXiv 2104.08378 (n of m).
Shape legend: O output channels, I input channels (of a group), G groups of m inputs, M weights of such a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ptpipe import JSON, Context, StageError
from ptpipe_prune.config import MagnitudeConfig, NMConfig
from ptpipe_torch import Model
from ptpipe_torch.pruning import TRANSPOSED, dense_layers, largest, prunable_layers

_MAX_SHOWN = 5


def magnitude(config: MagnitudeConfig, ctx: Context, model: Model) -> Model:
    """Implement `prune.magnitude`."""
    network = _float_network(ctx, model)
    layers = _layers(config, ctx, network)
    weights = {name: layer.weight.detach() for name, layer in layers.items()}
    groups = [list(weights.values())] if config.scope == "global" else [[weight] for weight in weights.values()]
    for group in groups:
        for weight, keep in zip(group, largest(group, config.amount), strict=True):
            weight.mul_(keep)
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
    layers = _layers(config, ctx, network)
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


def _layers(config: MagnitudeConfig | NMConfig, ctx: Context, network: nn.Module) -> dict[str, Any]:
    """Return the layers to prune, and give a notice of those that can't be."""
    if dense := dense_layers(network, config.skip, ctx.kind):
        shown = ", ".join(dense[:_MAX_SHOWN]) + (f" and {len(dense) - _MAX_SHOWN} more" if dense[_MAX_SHOWN:] else "")
        ctx.notice(
            f"weights of {shown} stay dense: they are computed (parametrizations, weight norm), or projections inside "
            "of attention"
        )
    return prunable_layers(network, config.skip, ctx.kind)


def _inputs_last(layer: nn.Module) -> torch.Tensor:
    """Return a layer's weight as a view whose last axis is I."""
    weight: torch.Tensor = layer.get_parameter("weight").detach()
    if isinstance(layer, TRANSPOSED):  # all groups' inputs are its first axis
        weight = weight.view(layer.groups, -1, *weight.shape[1:])
    return weight.movedim(1, -1)


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
    return Model.from_module(model.recipe.with_pruned(f"{name}.weight" for name in weights), network)
