"""Rewrite the spellings of one operator into the one that FX quantization knows. The function stays the same."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import SEVERAL, SHAPE, TENSOR
from ptpipe_torch.int8.fx import pad_with_input
from ptpipe_torch.int8.tracer import ONLY_IN_TRAINING, Scopes
from ptpipe_torch.traced_gradients import RETURNS_INPUT

F = nn.functional

Replacement: TypeAlias = "nn.Module | Callable[..., Any]"

_RELU_FUNCTIONS = (torch.relu, torch.relu_, F.relu, F.relu_)
_RELU_METHODS = ("relu", "relu_")
_DROPOUT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUT_FUNCTIONS: Mapping[Any, type[nn.Module]] = {
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}
# As functions, their int8 forms take arguments in another order.
_ACTIVATIONS: Mapping[Any, tuple[Any, ...]] = {
    F.elu: (nn.ELU, "alpha"),
    F.hardswish: (nn.Hardswish,),
    F.leaky_relu: (nn.LeakyReLU, "negative_slope"),
}
_CONVERSIONS: Mapping[str, tuple[Any, ...]] = {"float": (), "to": (torch.float32,), "type": (torch.float32,)}
"""Methods that return float32 tensors unchanged, and their arguments."""
_RESHAPING = {"view": "reshape", "view_as": "reshape_as"}
_PADDING_LAYERS = {
    getattr(nn, f"{name}Pad{dimensions}d"): mode
    for name, mode in (("Reflection", "reflect"), ("Replication", "replicate"), ("Circular", "circular"))
    for dimensions in (1, 2, 3)
}
JOINS = (torch.cat, torch.concat, torch.concatenate)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# In the order of the functions' parameters; those written in C++, and some others, have no signature to read.
_LEADING_PARAMETERS = (("input", "tensors", "self"), ("other", "weight", "mat2", "tensor2"))


class StochasticDepth(nn.Module):
    """torchvision's function of that name as a module, for training."""

    def __init__(self, function: Callable[..., torch.Tensor], p: float, mode: str) -> None:
        super().__init__()
        self.function, self.p, self.mode = function, p, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Set the residual branch of random samples (mode `row`) or of the whole batch to zero."""
        return self.function(x, self.p, self.mode, training=self.training)


class ToFloat32(nn.Module):
    """`Tensor.float` as a module, for training with autocast, where the input may have another dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same values as float32."""
        return x.float()


class _Applied(nn.Module):
    """A function of one tensor and constants as a module, for training."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._function: Any = node.target
        self._constants, self._named = node.args[1:], node.kwargs

    def forward(self, x: torch.Tensor) -> Any:
        return self._function(x, *self._constants, **self._named)


def pass_inputs_by_position(graph: GraphModule) -> None:
    """Turn keyword arguments of layers and functions into positional ones: FX looks for tensors there alone."""
    for node in graph.graph.nodes:
        if node.op == "call_module":
            _pass_by_position(node, graph.get_submodule(str(node.target)).forward)
        elif node.op == "call_function" and node.kwargs:
            _pass_by_position(node, node.target)


def _pass_by_position(node: Node, function: Any) -> None:
    try:
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except ValueError:
        parameters = []
    by_position = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    names: Sequence[Sequence[str]] = [(parameter.name,) for parameter in by_position] or _LEADING_PARAMETERS
    args, kwargs = list(node.args), dict(node.kwargs)
    for alternatives in names[len(args) :]:
        given = [name for name in alternatives if name in kwargs]
        if not given:
            break
        args.append(kwargs.pop(given[0]))
    node.args, node.kwargs = tuple(args), kwargs


def normalize(graph: GraphModule, scopes: Scopes, *, for_training: bool) -> None:
    """Replace each node that has a form with an int8 operator or a fusion, in place.

    `for_training`: conversions to float32 take place in training, where autocast may have made them necessary.
    """
    normalizer = _Normalizer(graph, scopes, for_training)
    for node in list(graph.graph.nodes):
        normalizer.normalize(node)


class _Normalizer:
    """Replaces nodes one by one, keeping their scopes."""

    def __init__(self, graph: GraphModule, scopes: Scopes, for_training: bool) -> None:
        self.graph, self.scopes, self._for_training = graph, scopes, for_training

    def normalize(self, node: Node) -> None:
        """Replace a node, if there is a better form of it."""
        if node.op == "call_module":
            self._normalize_layer(node, self.graph.get_submodule(str(node.target)))
        elif (node.op == "call_method" and node.target in _RELU_METHODS) or node.target in _RELU_FUNCTIONS:
            self._replace(node, nn.ReLU())
        elif (dimensions := _mean_over_image(node)) is not None:
            self._replace_mean(node, keepdim=dimensions)
        elif _is_conversion(node) and self._for_training:
            self._replace(node, _identity_until_training(ToFloat32()))
        elif _is_conversion(node) or _is_copy(node):  # its own range would be another one
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]  # a node
            self.graph.graph.erase_node(node)
        elif node.op == "call_method" and node.target in _RESHAPING:
            self._replace_view(node)
        elif node.op == "call_function":
            self._normalize_function(node)

    def _normalize_layer(self, node: Node, layer: Any) -> None:
        if type(layer) is nn.ReLU:
            self._replace(node, nn.ReLU())
        elif type(layer) is nn.Flatten:
            self._replace(node, torch.flatten, layer.start_dim, layer.end_dim)
        elif isinstance(layer, _DROPOUT_LAYERS) or node.meta.get(ONLY_IN_TRAINING):
            self._replace(node, _disabled(layer))
        elif type(layer) in _PADDING_LAYERS:
            self._replace(node, pad_with_input, list(layer.padding), _PADDING_LAYERS[type(layer)])
        elif type(layer) in _CONVOLUTIONS:
            _use_padding_in_numbers(layer)
            if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
                self._insert_padding(node, layer)

    def _normalize_function(self, node: Node) -> None:
        arguments = _arguments(node)
        if node.target in _DROPOUT_FUNCTIONS and arguments.get("training") is False:
            # Traced in eval mode, so a training flag that is still True is deliberate: that dropout stays.
            self._replace(node, _disabled(_DROPOUT_FUNCTIONS[node.target](arguments["p"])))
        elif _name(node) == "stochastic_depth" and arguments.get("training") is False:
            function: Any = node.target
            self._replace(node, _disabled(StochasticDepth(function, arguments["p"], arguments["mode"])))
        elif getattr(node.target, RETURNS_INPUT, False) and node.all_input_nodes == list(node.args[:1]):
            self._replace(node, _identity_until_training(_Applied(node)))  # it changes nothing but gradients
        elif node.target in _ACTIVATIONS:
            layer, *names = _ACTIVATIONS[node.target]
            self._replace(node, layer(*(arguments[name] for name in names)))
        elif node.target is F.pad and arguments.get("mode", "constant") != "constant":
            self._replace(node, pad_with_input, arguments["pad"], arguments["mode"])
        elif node.target is torch.reshape and len(node.args) == 2:
            node.op, node.target = "call_method", "reshape"
        elif node.target is torch.stack and isinstance(node.args[0], Node):
            node.args = (self._parts(node.args[0], node), *node.args[1:])
        elif node.target in JOINS:
            joined: Any = node.args[0]
            tensors = self._parts(joined, node) if isinstance(joined, Node) else joined
            # Some encoders return an empty map where a decoder joins one.
            node.args = ([tensor for tensor in tensors if not _is_empty(tensor)] or joined, *node.args[1:])

    def _parts(self, several: Node, before: Node) -> list[Node]:
        """Take a tuple apart, of `torch.cat(x.split(2))`: FX would observe it as if it were a tensor."""
        parts = []
        with self.graph.graph.inserting_before(before):
            for number in range(several.meta.get(SEVERAL, 0)):
                parts.append(self.graph.graph.call_function(operator.getitem, (several, number)))
                self._describe(parts[-1], several)
        return parts

    def _insert_padding(self, node: Node, layer: Any) -> None:
        """Pad in front of a convolution: exporters and QAT know only zeros, as many on both sides, of its own."""
        source, padding = node.args[0], list(layer._reversed_padding_repeated_twice)
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        with self.graph.graph.inserting_before(node):
            padded = self.graph.graph.call_function(pad_with_input, (source, padding, mode))
        node.args = (padded, *node.args[1:])
        self._describe(padded, node)
        layer.padding_mode, layer.padding = "zeros", (0,) * len(layer.kernel_size)
        layer._reversed_padding_repeated_twice = [0] * len(padding)

    def _replace_view(self, node: Node) -> None:
        # Behind a convolution a tensor may be channels-last, of which `view` fails.
        if not any(isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values())):
            node.target = _RESHAPING[str(node.target)]

    def _replace_mean(self, node: Node, *, keepdim: bool) -> None:
        # The int8 mean fails on 1x1 maps, pooling does not.
        source = node.args[0]
        with self.graph.graph.inserting_before(node):
            pooled = self.graph.graph.call_function(F.adaptive_avg_pool2d, (source, (1, 1)))
        self._describe(pooled, node)
        if keepdim:
            node.replace_all_uses_with(pooled)
            self.graph.graph.erase_node(node)
        else:
            node.args = (pooled,)
            self._replace(node, torch.flatten, 1)

    def _replace(self, node: Node, replacement: Replacement, *arguments: Any) -> None:
        source = node.args[0]
        graph = self.graph.graph
        with graph.inserting_before(node):
            if isinstance(replacement, nn.Module):
                new = graph.call_module(self._add(node.name, replacement), (source,))
            else:
                new = graph.call_function(replacement, (source, *arguments))
        self._describe(new, node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    def _add(self, name: str, layer: nn.Module) -> str:
        while hasattr(self.graph, name):
            name += "_"
        self.graph.add_submodule(name, layer)
        return name

    def _describe(self, new: Node, node: Node) -> None:
        self.scopes[new.name] = self.scopes[node.name]
        new.meta.update(node.meta)


def _use_padding_in_numbers(layer: Any) -> None:
    """Write the padding of a convolution ("same", "valid") as numbers if it is the same on both sides."""
    before, after = layer._reversed_padding_repeated_twice[::2], layer._reversed_padding_repeated_twice[1::2]
    if isinstance(layer.padding, str) and before == after:
        layer.padding = tuple(reversed(before))


def _is_conversion(node: Node) -> bool:
    """Return whether a node converts float32 to float32."""
    if not _is_method_of_float32(node):
        return False
    if node.target == "type_as":  # what is made of sizes may be on another device
        return node.meta.get(TENSOR, (None, 0))[0] is torch.float32 and _depends_on_inputs(node.args[0])
    return tuple(node.args[1:]) == _CONVERSIONS.get(str(node.target))


def _depends_on_inputs(node: Any) -> bool:
    waiting, seen = [node], {node}
    while waiting:
        source = waiting.pop()
        if source.op == "placeholder":
            return True
        new = [before for before in source.all_input_nodes if before not in seen and TENSOR in before.meta]
        seen.update(new)
        waiting += new
    return False


def _is_copy(node: Node) -> bool:
    return _is_method_of_float32(node) and node.target == "clone" and len(node.args) == 1


def _is_method_of_float32(node: Node) -> bool:
    source = node.args[0] if node.op == "call_method" and not node.kwargs else None
    return isinstance(source, Node) and source.meta.get(TENSOR, (None, 0))[0] is torch.float32


def _is_empty(tensor: Any) -> bool:
    return 0 in tensor.meta.get(SHAPE, ())


def _mean_over_image(node: Node) -> bool | None:
    """Return `keepdim` of a mean over height and width of maps (N, C, H, W); None for all other nodes."""
    if not ((node.op == "call_method" and node.target == "mean") or node.target is torch.mean):
        return None
    source: Any = node.args[0]
    named: dict[str, Any] = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | dict(node.kwargs)
    dims = named.pop("dim", named.pop("axis", None))
    keepdim = named.pop("keepdim", named.pop("keepdims", False))
    _, num_dims = source.meta.get(TENSOR, (None, 0))
    if named or num_dims != 4 or not isinstance(dims, Sequence) or not isinstance(keepdim, bool):
        return None
    return keepdim if sorted(dim % 4 for dim in dims) == [2, 3] else None


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a function by name, defaults included; nothing for one written in C++."""
    target: Any = node.target
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    return bound.arguments


def _name(node: Node) -> str:
    # torchvision is not imported for one function.
    return getattr(node.target, "__name__", "")


def _disabled(dropout: Any) -> nn.Identity:
    if hasattr(dropout, "inplace"):
        dropout.inplace = False
    return _identity_until_training(dropout)


def _identity_until_training(layer: nn.Module) -> nn.Identity:
    """Return a layer that computes nothing, in whose place `training_graph` puts this one."""
    identity = nn.Identity()
    identity.__dict__["_for_training"] = layer  # not a submodule: no part of the graph until then
    return identity
