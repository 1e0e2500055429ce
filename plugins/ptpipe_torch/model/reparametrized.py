"""Layers whose weights are computed from other parameters: weight norm, spectral norm, masks, parametrizations."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook
from torch.nn.utils.weight_norm import WeightNorm

_REMOVERS: dict[type, Any] = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}


def reparametrized_layers(module: nn.Module) -> list[str]:
    """Return the names of layers whose weights are computed from other parameters: weight norm, spectral norm."""
    return [
        name
        for name, layer in module.named_modules()
        if parametrize.is_parametrized(layer) or any(type(hook) in _REMOVERS for hook in _hooks(layer))
    ]


def remove_parametrizations(module: nn.Module) -> list[str]:
    """Store, in place, the weights of reparametrized layers as plain parameters, which observers and int8 layers take.

    Training then changes the weights themselves. Return the names of those that `torch.nn.utils.prune` masked.
    """
    masked = []
    for path, layer in list(module.named_modules()):
        for hook in _hooks(layer):
            if type(hook) in _REMOVERS:
                _REMOVERS[type(hook)](layer, hook.name)
                _drop_loading_hooks(layer)
            elif isinstance(hook, prune.BasePruningMethod):
                prune.remove(layer, hook._tensor_name)  # type: ignore[no-untyped-call]
                masked.append(f"{path}.{hook._tensor_name}".lstrip("."))
        if parametrize.is_parametrized(layer):
            _store_parametrized(layer)
    return masked


def _drop_loading_hooks(layer: nn.Module) -> None:
    # torch leaves one, wrapped, that asks a state dict for the parameters that are gone.
    for key, hook in list(layer._load_state_dict_pre_hooks.items()):
        if isinstance(getattr(hook, "hook", hook), SpectralNormLoadStateDictPreHook):
            del layer._load_state_dict_pre_hooks[key]


def _store_parametrized(layer: Any) -> None:
    # torch's function for this changes the class of the layer, which all copies of the layer have too.
    weights = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}
    plain_type = parametrize.type_before_parametrizations(layer)
    del layer._modules["parametrizations"]
    layer.__class__ = plain_type
    for name, weight in weights.items():
        layer.register_parameter(name, nn.Parameter(weight))


def _hooks(layer: nn.Module) -> list[Any]:
    return list(layer._forward_pre_hooks.values())
