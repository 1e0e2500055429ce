"""Turn operators that are called as functions, with a parameter as their weight, into layers that own it.

`F.linear(x, self.w, self.b)`, `F.conv2d(x, self.w)`, `x @ self.w + self.b`: FX quantizes them as layers only. A weight
may be a view of a parameter: transposed, or a slice of a packed one. Which elements a view has is found by taking the
same view of their positions.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import TENSOR
from ptpipe_torch.int8.tracer import Scopes

F = nn.functional

_LINEAR = ("input", "weight", "bias")
_CONVOLUTION = (*_LINEAR, "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_LINEAR, "stride", "padding", "output_padding", "groups", "dilation")
_MATMUL = ("input", "matrix")
FUNCTIONS: Mapping[Any, tuple[Sequence[str], Any]] = {
    F.linear: (_LINEAR, nn.Linear),
    **{getattr(F, f"conv{n}d"): (_CONVOLUTION, getattr(nn, f"Conv{n}d")) for n in (1, 2, 3)},
    **{getattr(F, f"conv_transpose{n}d"): (_TRANSPOSED, getattr(nn, f"ConvTranspose{n}d")) for n in (1, 2, 3)},
    **dict.fromkeys((torch.matmul, torch.mm, operator.matmul, "matmul", "mm"), (_MATMUL, nn.Linear)),
    torch.addmm: (("bias", "input", "matrix"), nn.Linear),
}
"""Parameters of each function or method, and the layer of the same kind. A `matrix` is a transposed weight."""
_ADDITIONS = (operator.add, torch.add, "add")
_VIEWS = {
    *(operator.getitem, torch.t, torch.transpose, torch.permute, torch.reshape, torch.squeeze, torch.unsqueeze),
    *(torch.flatten, torch.narrow, torch.select, torch.chunk, torch.split, torch.unbind),
    *("t", "transpose", "permute", "reshape", "view", "squeeze", "unsqueeze", "flatten", "narrow", "select", "chunk"),
    *("split", "unbind", "contiguous"),
}
_VIEW_ATTRIBUTES = ("T", "mT")


@dataclass(frozen=True)
class _View:
    """The elements of a parameter or buffer that a tensor of the network consists of."""

    target: str
    positions: Any
    """In the flattened parameter; a tensor, or several of them, of which the network takes some."""

    def is_weight(self, num_dims: int) -> bool:
        """Return whether this is one tensor of that many dimensions."""
        return isinstance(self.positions, torch.Tensor) and self.positions.dim() == num_dims

    def is_same(self, other: _View) -> bool:
        return self.target == other.target and torch.equal(self.positions, other.positions)

    def overlaps(self, other: _View) -> bool:
        return self.target == other.target and bool(torch.isin(self.positions, other.positions).any())

    def values(self, graph: GraphModule) -> nn.Parameter:
        tensor = _attribute(graph, self.target)
        with torch.no_grad():
            return nn.Parameter(tensor.flatten()[self.positions], requires_grad=tensor.requires_grad)


_Views: TypeAlias = dict[Node, _View]


@dataclass(frozen=True)
class _Call:
    """A function with a weight that a layer can own."""

    node: Node
    layer_type: Any
    weight: _View
    bias: _View | None
    options: dict[str, Any]
    addition: Node | None = None
    """Of the bias, where it is an operator of its own."""

    @property
    def tensors(self) -> list[_View]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def is_alike(self, other: _Call) -> bool:
        """Return whether one layer can serve both."""
        if (self.layer_type, self.options) != (other.layer_type, other.options):
            return False
        is_as_long = len(self.tensors) == len(other.tensors)
        return is_as_long and all(map(_View.is_same, self.tensors, other.tensors))

    def conflicts(self, other: _Call) -> bool:
        """Return whether an element of a parameter would belong to two layers."""
        overlaps = (one.overlaps(two) for one in self.tensors for two in other.tensors)
        return not self.is_alike(other) and any(overlaps)

    @property
    def num_outputs(self) -> int:
        shape = self.weight.positions.shape
        return int(shape[1] * self.options.get("groups", 1) if _is_transposed(self.layer_type) else shape[0])

    def layer(self, graph: GraphModule) -> nn.Module:
        """Return a layer with these weights."""
        weight = self.weight.values(graph)
        if self.layer_type is nn.Linear:
            sizes: tuple[Any, ...] = (weight.shape[1], weight.shape[0])
        else:
            first, second, *kernel = weight.shape
            is_transposed = _is_transposed(self.layer_type)
            num_inputs = first if is_transposed else second * self.options.get("groups", 1)
            sizes = (num_inputs, self.num_outputs, tuple(kernel))
        layer: Any = self.layer_type(*sizes, bias=self.bias is not None, device="meta", **self.options)
        layer.weight = weight
        layer.bias = None if self.bias is None else self.bias.values(graph)
        return cast(nn.Module, layer.train(graph.training))


def use_layers(graph: GraphModule, scopes: Scopes, leaves: Sequence[str]) -> dict[str, str]:
    """Replace functions by layers that own their weights, in place. The network stays the same function.

    A layer is named after the weight (`block.w`; `block.w_0`, `block.w_1` for slices of a packed one), or after the
    module that has these tensors alone. Weights that `leaves` names, or that belong to one of them, stay as they are.

    Return why others stay too, by the name of the node: their weights are computed, or used by something else as well.
    """
    views = _views(graph)
    calls, reasons = _calls(graph, views, leaves)
    reasons |= _drop_shared(graph, calls, views)
    groups: list[list[_Call]] = []
    for call in calls:
        alike = next((group for group in groups if group[0].is_alike(call)), None)
        if alike is None:
            groups.append([call])
        else:
            alike.append(call)
    layers = [group[0].layer(graph) for group in groups]
    for target in {tensor.target for call in calls for tensor in call.tensors}:
        owner, _, name = target.rpartition(".")
        delattr(graph.get_submodule(owner), name)
    names = _names(graph, [group[0] for group in groups])
    for group, layer, (name, scope) in zip(groups, layers, names, strict=True):
        graph.add_submodule(name, layer)
        for call in group:
            _insert(graph, call, name, scopes, (scope, type(layer)))
    _erase_unused(graph, views)
    return reasons


def transposed_layers(graph: GraphModule, scopes: Scopes) -> dict[str, nn.Module]:
    """Return the transposed convolutions of a traced network by the names that `skip` takes."""
    nodes = graph.graph.find_nodes(op="call_module")
    layers = {scopes[node.name][0]: graph.get_submodule(str(node.target)) for node in nodes}
    return {name: layer for name, layer in layers.items() if _is_transposed(type(layer))}


def _views(graph: GraphModule) -> _Views:
    """Return what is a float parameter, a float buffer, or a view of one."""
    views: _Views = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            tensor = _attribute(graph, str(node.target))
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32:
                positions = torch.arange(tensor.numel(), dtype=torch.int32).reshape(tensor.shape)
                views[node] = _View(str(node.target), positions)
        elif node.args and node.args[0] in views and len(node.all_input_nodes) == 1 and is_view(node):
            source = views[node.args[0]]
            function = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
            views[node] = _View(source.target, function(source.positions, *node.args[1:], **node.kwargs))
    return views


def is_view(node: Node) -> bool:
    """Return whether each element of the result is another one of the tensor."""
    if node.target is getattr:
        return node.args[1] in _VIEW_ATTRIBUTES
    if node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in index)
    return node.op in ("call_function", "call_method") and node.target in _VIEWS


def _calls(graph: GraphModule, views: _Views, leaves: Sequence[str]) -> tuple[list[_Call], dict[str, str]]:
    """Return the functions that can become layers, and why others can't, by node."""
    calls, reasons = [], {}
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method") or node.target not in FUNCTIONS:
            continue
        call = _call(node, views)
        if call is None:
            reasons[node.name] = _reason(node, views)
        elif not any(belongs_to(tensor.target, leaves) for tensor in call.tensors):
            calls.append(call)
    return calls, {name: reason for name, reason in reasons.items() if reason}


def _call(node: Node, views: _Views) -> _Call | None:
    layer_type = FUNCTIONS[node.target][1]
    given = arguments_of(node)
    x, matrix, bias = given.pop("input", None), given.pop("matrix", None), given.pop("bias", None)
    weight = views.get(given.pop("weight", None) if matrix is None else matrix)
    is_float = isinstance(x, Node) and x not in views and x.meta.get(TENSOR, (None,))[0] is torch.float32
    num_dims = 2 if layer_type is nn.Linear else int(layer_type.__name__[-2]) + 2
    are_numbers = all(source is x or source in views for source in node.all_input_nodes)
    if not is_float or not are_numbers or weight is None or not weight.is_weight(num_dims):
        return None
    if layer_type is nn.Linear and given:  # `alpha` and `beta` of addmm
        return None
    if matrix is not None:
        weight = _View(weight.target, weight.positions.T)
    call = _Call(node, layer_type, weight, None, given)
    if bias is None:
        return _with_addition(call, views)
    return replace(call, bias=views[bias]) if _is_bias(views.get(bias), call) else None


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of a function or method by the names that `FUNCTIONS` gives them."""
    return {**dict(zip(FUNCTIONS[node.target][0], node.args, strict=False)), **node.kwargs}


def _with_addition(call: _Call, views: _Views) -> _Call:
    """Return the call with the bias that is added behind it, if there is one."""
    users = list(call.node.users)
    if len(users) != 1 or users[0].target not in _ADDITIONS or len(users[0].args) != 2 or users[0].kwargs:
        return call
    (bias,) = [operand for operand in users[0].args if operand is not call.node] or [None]
    is_last = call.layer_type is nn.Linear  # the axis that the addition broadcasts along
    if is_last and isinstance(bias, Node) and _is_bias(views.get(bias), call):
        return replace(call, bias=views[bias], addition=users[0])
    return call


def _is_bias(view: _View | None, call: _Call) -> bool:
    return view is not None and view.is_weight(1) and view.positions.numel() == call.num_outputs


def _reason(node: Node, views: _Views) -> str:
    if FUNCTIONS[node.target][0] is not _MATMUL:
        return "its weight or bias is computed in the forward pass"
    is_weighted = any(source in views for source in node.all_input_nodes)
    return "its parameter is not a matrix that the activations are multiplied by from the left" if is_weighted else ""


def _drop_shared(graph: GraphModule, calls: list[_Call], views: _Views) -> dict[str, str]:
    """Remove calls whose tensors are used by something else, in place; return why, by node."""
    reasons = {}
    while dropped := list(_shared(graph, calls, views)):
        for call, target in dropped:
            if call in calls:
                calls.remove(call)
                reasons[call.node.name] = f"{target} is used by something else as well"
    return reasons


def _shared(graph: GraphModule, calls: Sequence[_Call], views: _Views) -> Iterator[tuple[_Call, str]]:
    """Yield calls with a parameter that something else uses, too."""
    readers = {reader for call in calls for reader in (call.node, call.addition)} | set(views)
    others = {view.target for node, view in views.items() if not readers.issuperset(node.users)}
    in_layers = tensors_of_layers(graph)
    for call in calls:
        for tensor in call.tensors:
            if tensor.target in others or _attribute(graph, tensor.target) in in_layers:
                yield call, tensor.target
    for one, two in combinations(calls, 2):
        if one.conflicts(two):
            yield from ((call, call.weight.target) for call in (one, two))


def tensors_of_layers(graph: GraphModule) -> set[torch.Tensor]:
    """Return the parameters and buffers of the layers that a graph calls."""
    called = (graph.get_submodule(str(node.target)) for node in graph.graph.find_nodes(op="call_module"))
    return {tensor for layer in called for tensor in (*layer.parameters(), *layer.buffers())}


def belongs_to(tensor: str, layers: Sequence[str]) -> bool:
    """Return whether a parameter or buffer is one of these, or belongs to one of these layers."""
    return f"{tensor}.".startswith(tuple(f"{layer}." for layer in layers))


def _names(graph: GraphModule, calls: Sequence[_Call]) -> Iterator[tuple[str, str]]:
    """Yield the name of each call's layer, and the name that `skip` takes for it."""
    owners = Counter(_owner(call) for call in calls)
    weights = Counter(call.weight.target for call in calls)
    numbers = Counter[str]()
    for call in calls:
        owner, weight = _owner(call), call.weight.target
        rest = graph.get_submodule(owner)
        if owner and owners[owner] == 1 and not any((rest._parameters, rest._buffers, rest._modules)):
            yield owner, owner
        elif weights[weight] == 1:
            yield weight, weight
        else:
            yield f"{weight}_{numbers[weight]}", weight
            numbers[weight] += 1


def _insert(graph: GraphModule, call: _Call, name: str, scopes: Scopes, scope: tuple[str, Any]) -> None:
    last = call.node if call.addition is None else call.addition
    with graph.graph.inserting_before(last):
        new = graph.graph.call_module(name, (arguments_of(call.node)["input"],))
    scopes[new.name] = scope
    new.meta.update(call.node.meta)
    last.replace_all_uses_with(new)
    for node in dict.fromkeys((last, call.node)):
        graph.graph.erase_node(node)


def _erase_unused(graph: GraphModule, views: _Views) -> None:
    for node in reversed(views):
        if not node.users:
            graph.graph.erase_node(node)


def _owner(call: _Call) -> str:
    return call.weight.target.rpartition(".")[0]


def _attribute(graph: GraphModule, target: str) -> Any:
    return operator.attrgetter(target)(graph)


def _is_transposed(type_: type[nn.Module]) -> bool:
    return issubclass(type_, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
