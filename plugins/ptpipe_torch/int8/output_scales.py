"""What the output of a layer is multiplied by, which the int8 layer has in its weight and bias.

In training it stays a parameter, with a name and a gradient of its own, that an operator behind the layer takes:
`multiply_outputs`. Conversion folds it.

Shape legend: K output channels of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule, Node

OutputScale: TypeAlias = float | tuple[str, nn.Parameter]
"""A number, or a parameter of one value, or one for each output channel, with its name."""


def multiply_outputs(y: torch.Tensor, scale: torch.Tensor | float, axis: int) -> torch.Tensor:
    """Multiply the output of a layer by a number, or by one for each channel. `axis`: of the channels."""
    if isinstance(scale, torch.Tensor):
        scale = scale.reshape([-1 if index == axis % y.dim() else 1 for index in range(y.dim())])
    return y * scale


def insert_output_scales(prepared: GraphModule, scales: Mapping[str, OutputScale]) -> None:
    """Multiply what layers return, in place. `scales`: by the names of the layers, each of which is called once."""
    for layer_call in prepared.graph.find_nodes(op="call_module"):
        scale = scales.get(str(layer_call.target))
        if scale is None:
            continue
        value: Any = scale
        if isinstance(scale, tuple):
            _set_parameter(prepared, *scale)
            with prepared.graph.inserting_before(layer_call):
                value = prepared.graph.get_attr(scale[0])
        axis = -1 if isinstance(prepared.get_submodule(str(layer_call.target)), nn.Linear) else 1
        with prepared.graph.inserting_after(layer_call):
            product = prepared.graph.call_function(multiply_outputs, (layer_call, value, axis))
        layer_call.replace_all_uses_with(product, delete_user_cb=lambda user, product=product: user is not product)
    if scales:
        prepared.recompile()


def scaled_layers(prepared: GraphModule) -> dict[Node, Node]:
    """Return the products of `insert_output_scales`, by the nodes that call the layers."""
    products = prepared.graph.find_nodes(op="call_function", target=multiply_outputs)
    return {product.all_input_nodes[0]: product for product in products}


def fold_output_scales(prepared: GraphModule) -> None:
    """Multiply weights and biases in place of outputs, in place."""
    products = scaled_layers(prepared)
    for layer, scale in output_scales(prepared).items():
        scale_parameters(_last_part(layer), scale)
    for layer_call, product in products.items():
        replace_product(prepared, layer_call, product)
    if products:
        prepared.recompile()


def _last_part(layer: Any) -> nn.Module:
    """Return the batch norm of a layer that is fused with one, else the layer."""
    if hasattr(layer, "bn"):  # for QAT
        norm: nn.Module = layer.bn
        return norm
    part: nn.Module = layer[-1] if isinstance(layer, nn.Sequential) else layer
    return part


def output_scales(prepared: GraphModule) -> dict[nn.Module, torch.Tensor]:
    """Return by what layers are multiplied, one value or one for each output channel."""
    scales = {}
    for layer_call, product in scaled_layers(prepared).items():
        scale: Any = product.args[1]
        value = prepared.get_parameter(str(scale.target)) if isinstance(scale, Node) else torch.tensor(scale)
        scales[prepared.get_submodule(str(layer_call.target))] = value.detach()
    return scales


def replace_product(prepared: GraphModule, layer_call: Node, product: Node) -> None:
    """Let the readers of a product of `insert_output_scales` read what the layer returns."""
    scale = product.args[1]
    product.replace_all_uses_with(layer_call)
    prepared.graph.erase_node(product)
    if isinstance(scale, Node) and not scale.users:
        prepared.graph.erase_node(scale)


def scale_parameters(layer: Any, scale: torch.Tensor) -> None:
    """Multiply weight and bias of a layer by one value, or one for each output, in place; others may share them."""
    weight, bias_K = layer.weight, layer.bias
    layer.weight = nn.Parameter(scaled_weight(weight.detach(), scale), requires_grad=weight.requires_grad)
    if bias_K is not None:
        layer.bias = nn.Parameter(bias_K.detach() * scale.reshape(-1), requires_grad=bias_K.requires_grad)


def scaled_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a weight times one value, or one for each output."""
    return weight * scale.reshape(-1, *(1 for _ in weight.shape[1:]))


def _set_parameter(network: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Let a network have a parameter of this name, whose owner may be gone."""
    *path, own = name.split(".")
    for part in path:
        if not hasattr(network, part):
            network.add_module(part, nn.Module())
        network = network.get_submodule(part)
    network.register_parameter(own, parameter)
