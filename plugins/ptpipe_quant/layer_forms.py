"""Replace layers by equal ones that FX quantization can fuse, or that it leaves alone.

Shape legend: K output channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook
from torch.nn.utils.weight_norm import WeightNorm

F = nn.functional

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_REMOVERS: dict[type, Any] = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}


class BatchStatisticsNorm(nn.Module):
    """Batch normalization by the batch's statistics, in eval mode too: it can be neither folded nor int8."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize activations of shape (N, K, ...)."""
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)


def reparametrized_layers(module: nn.Module) -> list[str]:
    """Return the names of layers whose weights are computed from other parameters: weight norm, spectral norm."""
    return [
        name
        for name, layer in module.named_modules()
        if parametrize.is_parametrized(layer) or any(type(hook) in _REMOVERS for hook in _hooks(layer))
    ]


def store_weights(module: nn.Module) -> None:
    """Store, in place, the weights of reparametrized layers as plain parameters; observers and int8 layers take these.

    Training then changes the weights themselves.
    """
    for layer in list(module.modules()):
        for hook in _hooks(layer):
            if type(hook) in _REMOVERS:
                _REMOVERS[type(hook)](layer, hook.name)
                _drop_loading_hooks(layer)
        if parametrize.is_parametrized(layer):
            _store_parametrized(layer)


def use_foldable_batch_norms(graph: GraphModule) -> None:
    """Replace batch norms that FX would fail on: without running statistics, or without gamma and beta."""
    for node in graph.graph.nodes:
        layer = _layer(graph, node)
        if type(layer) not in _BATCH_NORMS:
            continue
        if layer.running_mean is None:
            graph.set_submodule(str(node.target), BatchStatisticsNorm(layer))
        elif layer.weight is None:
            layer.affine = True
            layer.weight = nn.Parameter(torch.ones_like(layer.running_var), requires_grad=False)
            layer.bias = nn.Parameter(torch.zeros_like(layer.running_mean), requires_grad=False)


def fold_into_transposed(graph: GraphModule) -> list[str]:
    """Fold each batch norm behind a transposed convolution into its weights: torch has no QAT layer for the pair.

    Return the names of these batch norms.
    """
    names = []
    for node in list(graph.graph.nodes):
        source = node.args[0] if node.args else None
        if type(norm := _layer(graph, node)) not in _BATCH_NORMS or not isinstance(source, Node):
            continue
        if isinstance(layer := _layer(graph, source), TRANSPOSED) and len(source.users) == 1:
            folded = nn.utils.fuse_conv_bn_eval(layer.eval(), norm.eval(), transpose=True)
            graph.set_submodule(str(source.target), folded)
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
            names.append(str(node.target))
    return names


def _layer(graph: GraphModule, node: Node) -> Any:
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


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
