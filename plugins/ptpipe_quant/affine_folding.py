"""Constants that a layer's output is multiplied by, or that are added to it: part of its weight and bias in int8.

Layer scale (`x + gamma * linear(x)`), residual scaling (`x + 0.2 * conv(x)`): an operator and a rounding less. In
training a factor stays a parameter of its own: gamma is often 1e-5, and a step that is right for a weight is none for
the product of both.

Shape legend: K output channels of a layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe_quant.float_nodes import MOVES, is_layer, operators_on_constants
from ptpipe_quant.functional_weights import is_view, tensors_of_layers
from ptpipe_quant.functionalize import SHAPE, TENSOR
from ptpipe_quant.relative_precision import operators_of_relative_precision
from ptpipe_torch.int8.output_scales import OutputScale, scale_parameters

_LINEAR = (nn.Linear,)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WITH_CHANNELS_SECOND = (*_CONVOLUTIONS, *_NORMS)
OPERATORS: Mapping[Any, str] = {
    **dict.fromkeys((operator.mul, torch.mul, "mul"), "mul"),
    **dict.fromkeys((operator.truediv, torch.div, "div"), "div"),
    **dict.fromkeys((operator.add, torch.add, "add"), "add"),
    **dict.fromkeys((operator.sub, torch.sub, "sub"), "sub"),
}
_COMMUTATIVE = ("mul", "add")


@dataclass(frozen=True)
class _Scaled:
    """An operator on what a layer returns and a constant."""

    node: Node
    operator: str
    moved: Node
    """What the layer returns, its elements in their places."""
    layer: Node
    moves: list[Node]
    """From `layer` to `moved`."""
    constant: torch.Tensor


def fold_affine(graph: GraphModule) -> None:
    """Fold such operators, in place; the function stays the same, but for roundings of float32.

    What `relative_precision` leaves float stays an operator: `log(x + eps)` says there that x is needed exactly.
    """
    for node in foldable(graph):
        scaled = _scaled(graph, node)
        constant_K = None if scaled is None else _by_channel(graph, scaled)
        if scaled is not None and constant_K is not None:
            _FOLDS[scaled.operator](graph.get_submodule(str(scaled.layer.target)), constant_K)
            node.replace_all_uses_with(scaled.moved)
            _erase(graph, node)


def take_output_scales(graph: GraphModule) -> dict[str, OutputScale]:
    """Remove products of what layers return and a number or a parameter, in place; return these by layer.

    One for each layer, or the layer that the batch norm behind it is fused with.
    """
    scales: dict[str, OutputScale] = {}
    for node in foldable(graph):
        scaled = _scaled(graph, node)
        layer = None if scaled is None or _is_fused(graph, node) else _fused_layer(graph, scaled.layer)
        if scaled is None or layer is None or layer in scales:
            continue
        if (scale := _output_scale(graph, scaled)) is not None:
            scales[layer] = scale
            node.replace_all_uses_with(scaled.moved)
            _erase(graph, node)
    if scales:
        graph.recompile()
    return scales


def foldable(graph: GraphModule) -> list[Node]:
    """Return the nodes that rounding may replace, in order: what `relative_precision` leaves float stays as it is."""
    left = set(operators_of_relative_precision(graph, set(operators_on_constants(graph))))
    return [node for node in graph.graph.nodes if node not in left]


def _is_fused(graph: GraphModule, node: Node) -> bool:
    """Return whether a layer would be fused with what is behind a product, if there were none."""
    fused = (nn.ReLU, nn.modules.batchnorm._BatchNorm)
    return any(is_layer(graph, user, *fused) for user in node.users)


def _fused_layer(graph: GraphModule, call: Node) -> str | None:
    """Return the name of a layer, or of the one that a batch norm is fused with; None if there is none."""
    if not is_layer(graph, call, *_NORMS):
        return str(call.target)
    before = call.all_input_nodes[0]
    is_fused = is_layer(graph, before, *_LINEAR, *_CONVOLUTIONS) and len(before.users) == 1
    return str(before.target) if is_fused else None


def _output_scale(graph: GraphModule, scaled: _Scaled) -> OutputScale | None:
    """Return what a product multiplies a layer's output by; None where it can't stay a parameter of its own."""
    if scaled.operator not in ("mul", "div"):
        return None
    value: Any = next(value for value in scaled.node.args if value is not scaled.moved)
    if not isinstance(value, Node):
        return float(value if scaled.operator == "mul" else 1 / value)
    while value.op != "get_attr":
        (value,) = value.all_input_nodes
    parameter, place_K = Interpreter(graph).fetch_attr(str(value.target)), _places(graph, scaled)
    # Views keep the order of elements along one axis.
    if scaled.operator == "div" or place_K is None or sum(size > 1 for size in parameter.shape) > 1:
        return None
    is_in_order = parameter.numel() == 1 or torch.equal(place_K, torch.arange(parameter.numel()))
    return (str(value.target), parameter) if isinstance(parameter, nn.Parameter) and is_in_order else None


def _erase(graph: GraphModule, node: Node) -> None:
    """Erase an operator, what only it reads, and parameters that nothing is left of: they would be observed."""
    sources = node.all_input_nodes
    graph.graph.erase_node(node)
    for source in (source for source in sources if not source.users):
        _erase(graph, source)
    path, _, attribute = str(node.target).rpartition(".")
    if node.op == "get_attr" and not any(
        other.target == node.target for other in graph.graph.find_nodes(op="get_attr")
    ):
        owner = graph.get_submodule(path)
        if getattr(owner, attribute) not in tensors_of_layers(graph):
            delattr(owner, attribute)


def _scaled(graph: GraphModule, node: Node) -> _Scaled | None:
    name = OPERATORS.get(node.target) if node.op in ("call_function", "call_method") else None
    if name is None or len(node.args) != 2 or node.kwargs:
        return None
    orders = (node.args, node.args[::-1]) if name in _COMMUTATIVE else (node.args,)
    for tensor, other in orders:
        constant = _constant(graph, other)
        if isinstance(tensor, Node) and constant is not None and (path := _path(graph, tensor)):
            layer, *moves = path
            return _Scaled(node, name, tensor, layer, moves, constant)
    return None


def _path(graph: GraphModule, moved: Node) -> list[Node]:
    """Return the layer that a tensor comes from, and what moves its elements; nothing if there is no such layer."""
    path = [moved]
    while len(path[0].users) == 1:
        node = path[0]
        if node.op == "call_module":
            layer = graph.get_submodule(str(node.target))
            if type(layer) in (*_LINEAR, *_WITH_CHANNELS_SECOND):
                return path if getattr(layer, "weight", None) is not None else []
            is_move = isinstance(layer, nn.Identity)
        else:
            is_move = node.target in MOVES
        if not is_move or len(node.all_input_nodes) != 1:
            return []
        path.insert(0, node.all_input_nodes[0])
    return []


def _constant(graph: GraphModule, value: Any) -> torch.Tensor | None:
    """Return a number, or what is computed from parameters and buffers alone, as a tensor."""
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    if not isinstance(value, Node) or TENSOR not in value.meta:
        return None
    needed, waiting = {value}, [value]
    while waiting:
        node = waiting.pop()
        if node.op != "get_attr" and not (len(node.all_input_nodes) == 1 and is_view(node)):
            return None
        needed |= set(node.all_input_nodes)
        waiting += node.all_input_nodes
    runner = Interpreter(graph)
    with torch.no_grad():
        for node in (node for node in graph.graph.nodes if node in needed):
            runner.env[node] = runner.run_node(node)
    constant = runner.env[value]
    return constant.detach() if isinstance(constant, torch.Tensor) and constant.is_floating_point() else None


def _by_channel(graph: GraphModule, scaled: _Scaled) -> torch.Tensor | None:
    """Return the constant of each channel; None where elements of one channel have several."""
    place_K = _places(graph, scaled)
    weight: Any = graph.get_submodule(str(scaled.layer.target)).weight
    return None if place_K is None else scaled.constant.to(weight.dtype).flatten()[place_K]


def _places(graph: GraphModule, scaled: _Scaled) -> torch.Tensor | None:
    """Return which element of the constant each channel has; None where elements of one channel have several.

    Which they have is asked, not their values: a graph is rebuilt for weights that are yet to be loaded.
    """
    layer: Any = graph.get_submodule(str(scaled.layer.target))
    num_channels, constant = len(layer.weight), scaled.constant
    if SHAPE not in scaled.layer.meta or SHAPE not in scaled.moved.meta:
        return None
    if constant.numel() == 1:
        fits = constant.dim() <= len(scaled.moved.meta[SHAPE])
        return torch.zeros(num_channels, dtype=torch.long) if fits else None
    channels = _moved_channels(graph, scaled, num_channels)
    try:
        places = torch.arange(constant.numel()).view(constant.shape).expand(channels.shape)
    except RuntimeError:  # the product is larger than the layer's output
        return None
    place_K = places.new_zeros(num_channels)
    place_K[channels.flatten()] = places.flatten()
    return place_K if torch.equal(place_K[channels], places) else None


def _moved_channels(graph: GraphModule, scaled: _Scaled, num_channels: int) -> torch.Tensor:
    """Return the channel that each element of `scaled.moved` is of."""
    shape, layer = scaled.layer.meta[SHAPE], graph.get_submodule(str(scaled.layer.target))
    axis = len(shape) - 1 if type(layer) in _LINEAR else 1
    sizes = [num_channels if index == axis else 1 for index in range(len(shape))]
    runner = Interpreter(graph)
    channels = torch.arange(num_channels).view(sizes).expand(shape)
    runner.env[scaled.layer] = channels
    for move in scaled.moves:
        channels = runner.env[move] = runner.run_node(move)
    return channels


def _add(layer: Any, constant_K: torch.Tensor) -> None:
    before_K = constant_K.new_zeros(len(constant_K)) if layer.bias is None else layer.bias.detach()
    layer.bias = nn.Parameter(before_K + constant_K)


_FOLDS: Mapping[str, Callable[[Any, torch.Tensor], None]] = {
    "mul": scale_parameters,
    "div": lambda layer, constant_K: scale_parameters(layer, 1 / constant_K),
    "add": _add,
    "sub": lambda layer, constant_K: _add(layer, -constant_K),
}
