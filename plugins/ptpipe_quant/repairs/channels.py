"""Layers of a traced network whose channels can be scaled without changing what the network computes.

An edge is a layer, what its output passes through, and the layers that take it. If everything in between returns scaled
values for scaled inputs (s > 0), dividing a channel of the first layer by s and multiplying the weights of that channel
in the others by s changes nothing. Source: M. Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
Correction, ICCV 2019, section 4.1.

Shape legend: C channels of an edge; O output, I input channels of a layer, G its groups; R features of each channel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.functionalize import TENSOR
from ptpipe_quant.layer_forms import TokenNorm
from ptpipe_torch.int8.fx import pad_with_input

F = nn.functional

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity)
_POOLING = tuple(
    getattr(nn, f"{name}{dimensions}d")
    for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
    for dimensions in (1, 2, 3)
)
_POOLING_FUNCTIONS = tuple(
    getattr(F, f"{name}{dimensions}d")
    for name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
    for dimensions in (1, 2, 3)
)


@dataclass(frozen=True)
class Layer:
    """A layer with weights, of one call in the graph, and the batch norm behind it."""

    name: str
    module: Any
    """A convolution, linear layer, layer norm, or attention with one matrix for queries, keys and values."""
    node: Node
    """The last one: of the batch norm if there is one."""
    norm_name: str = ""
    norm: Any = None

    @property
    def weight_name(self) -> str:
        """Name of the weight that is applied to the input."""
        return "in_proj_weight" if isinstance(self.module, nn.MultiheadAttention) else "weight"

    @property
    def weight(self) -> torch.Tensor:
        """The weight that is applied to the input."""
        weight: torch.Tensor = getattr(self.module, self.weight_name)
        return weight

    @property
    def num_groups(self) -> int:
        """Number of groups of channels that the layer keeps apart."""
        return int(getattr(self.module, "groups", 1))

    def changed_parameters(self) -> list[str]:
        """Return the names of all parameters that scaling may change."""
        names = [f"{self.name}.{self.weight_name}"]
        if isinstance(getattr(self.module, "bias", None), torch.Tensor):
            names.append(f"{self.name}.bias")
        if self.norm is not None:
            names += [f"{self.norm_name}.{name}" for name in ("weight", "bias", "running_mean")]
        return names

    def folded_weight(self) -> torch.Tensor:
        """Return the weight with the batch norm folded in, O x I / G x ..."""
        folded: torch.Tensor = self.weight if self.norm is None else self.weight * self._folded_factor()
        return folded

    def _folded_factor(self) -> torch.Tensor:
        factor_O: torch.Tensor = self.norm.weight / torch.sqrt(self.norm.running_var + self.norm.eps)
        return factor_O.reshape(-1, *(1 for _ in self.weight.shape[1:]))

    def output_ranges(self) -> torch.Tensor:
        """Return the largest folded weight of each output channel, O."""
        return self.folded_weight().abs().flatten(1).amax(1)

    def input_ranges(self) -> torch.Tensor:
        """Return the largest folded weight of each input channel, I."""
        weight = self.folded_weight().abs()
        grouped = weight.reshape(self.num_groups, -1, weight.shape[1], weight[0, 0].numel())
        return grouped.amax((1, 3)).flatten()

    def divide_outputs(self, scale_O: torch.Tensor) -> None:
        """Divide each output channel by a number, in place."""
        last = self.module if self.norm is None else self.norm
        last.weight.div_(scale_O.reshape(-1, *(1 for _ in last.weight.shape[1:])))
        if last.bias is not None:
            last.bias.div_(scale_O)

    def multiply_inputs(self, scale_I: torch.Tensor) -> None:
        """Multiply the weights of each input channel, in place."""
        weight = self.weight
        groups, others = self.num_groups, [1 for _ in weight.shape[2:]]
        grouped = weight.view(groups, -1, *weight.shape[1:])
        grouped.mul_(scale_I.reshape(groups, 1, -1, *others))


@dataclass
class Edge:
    """A layer, and the layers that take its output and nothing else does."""

    producer: Layer
    consumers: list[Layer] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)
    """For each consumer, how many of its input features come from one channel: more than one behind flattened maps."""
    path: list[Node] = field(default_factory=list)
    """What lies in between."""

    def input_ranges(self) -> torch.Tensor:
        """Return the largest weight that any consumer applies to each channel, C."""
        ranges = [
            layer.input_ranges().reshape(-1, repeat).amax(1)
            for layer, repeat in zip(self.consumers, self.repeats, strict=True)
        ]
        return torch.stack(ranges).amax(0)

    def scale(self, scale_C: torch.Tensor) -> None:
        """Divide the producer's channels, and multiply the consumers', in place."""
        self.producer.divide_outputs(scale_C)
        for layer, repeat in zip(self.consumers, self.repeats, strict=True):
            layer.multiply_inputs(scale_C.repeat_interleave(repeat))

    def changed_parameters(self) -> list[str]:
        """Return the names of all parameters that scaling may change."""
        return [name for layer in (self.producer, *self.consumers) for name in layer.changed_parameters()]


class NotScalableError(Exception):
    """A layer's channels can't be scaled; the message says why."""


class EdgeFinder:
    """Finds the edges of a traced network. `own_names`: tensors of the user's network that may change."""

    def __init__(self, graph: GraphModule, own_names: set[str]) -> None:
        self._graph, self._own_names = graph, own_names
        called = [node for node in graph.graph.nodes if node.op == "call_module"]
        self._uses = Counter(
            id(parameter) for node in called for parameter in graph.get_submodule(str(node.target)).parameters()
        )
        for node in graph.graph.find_nodes(op="get_attr"):
            self._uses[id(_attribute(graph, str(node.target)))] += 1

    def edges(self, *producers: type[nn.Module]) -> tuple[list[Edge], dict[str, str]]:
        """Return the edges behind layers of these types, and for each of the other layers why it has none."""
        edges, refused = [], {}
        for node in self._graph.graph.nodes:
            if isinstance(self._module(node), producers):
                try:
                    edges.append(self._edge(self.layer(node)))
                except NotScalableError as error:
                    refused[str(node.target)] = str(error)
        return edges, refused

    def layer(self, node: Node) -> Layer:
        """Return the layer that a node calls, with its batch norm. Raises NotScalableError."""
        module: Any = self._module(node)
        layer = Layer(str(node.target), module, node)
        users = list(node.users)
        if len(users) == 1 and isinstance(norm := self._module(users[0]), _NORMS):
            if isinstance(norm, TokenNorm):
                raise NotScalableError(f"{users[0].target} normalizes tokens, not its outputs")
            layer = Layer(layer.name, module, users[0], str(users[0].target), norm)
        for name in layer.changed_parameters():
            if name not in self._own_names or self._uses[id(_attribute(self._graph, name))] > 1:
                raise NotScalableError(f"{name} is to be skipped, shared, or computed from other parameters")
        return layer

    def _edge(self, producer: Layer) -> Edge:
        is_map = isinstance(producer.module, CONVOLUTIONS)
        if isinstance(producer.module, nn.LayerNorm) and len(producer.module.normalized_shape) != 1:
            raise NotScalableError("it normalizes several axes")
        num_channels = len((producer.module if producer.norm is None else producer.norm).weight)
        edge = Edge(producer)
        waiting: list[tuple[Node, bool]] = [(producer.node, is_map)]
        while waiting:
            node, is_map = waiting.pop()
            for user in node.users:
                if (consumer := self._consumer(user, node, is_map=is_map)) is not None:
                    edge.consumers.append(consumer)
                    edge.repeats.append(_num_inputs(consumer) // num_channels)
                elif not _reads_shape(user):
                    waiting.append((user, self._passed(user, node, is_map=is_map)))
                    edge.path.append(user)
        if not edge.consumers:
            raise NotScalableError("it is the last layer")
        return edge

    def _consumer(self, user: Node, source: Node, *, is_map: bool) -> Layer | None:
        module = self._module(user)
        if isinstance(module, nn.MultiheadAttention):
            if user.all_input_nodes != [source] or list(user.args[:3]) != [source] * 3 or module.in_proj_weight is None:
                raise NotScalableError(f"{user.target} takes more than its output")
        elif not isinstance(module, (*CONVOLUTIONS, nn.Linear)):
            return None
        if isinstance(module, CONVOLUTIONS) != is_map:
            raise NotScalableError(f"{user.target} takes it along another axis")
        return self.layer(user)

    def _passed(self, user: Node, source: Node, *, is_map: bool) -> bool:
        """Return whether channels are still the second axis behind a node. Raises NotScalableError."""
        layer = self._module(user)
        if user.all_input_nodes and user.args and user.args[0] is source:
            if isinstance(layer, _ELEMENTWISE):
                return is_map
            if is_map and (isinstance(layer, _POOLING) or user.target in _POOLING_FUNCTIONS):
                return is_map
            if is_map and _pads(user):
                return is_map
            if is_map and _flattens(user):
                return False
        what = f"{user.target} ({type(layer).__name__})" if layer is not None else _function_name(user)
        raise NotScalableError(f"its output goes to {what}")

    def _module(self, node: Node) -> nn.Module | None:
        return self._graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def unscalable_text(refused: dict[str, str], limit: int = 5) -> str:
    """Return names and reasons, the first few of them."""
    if not refused:
        return "the network has none"
    shown = [f"{name} ({reason})" for name, reason in list(refused.items())[:limit]]
    return ", ".join(shown) + (f" and {len(refused) - limit} more" if len(refused) > limit else "")


def _attribute(graph: GraphModule, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(graph.get_submodule(owner), attribute, None)


def _num_inputs(layer: Layer) -> int:
    return int(layer.weight.shape[1]) * layer.num_groups


def _reads_shape(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.target is getattr and node.args[1:2] in (("shape",), ("ndim",))


def _pads(node: Node) -> bool:
    if node.target is F.pad:
        arguments = [*node.args[2:], *node.kwargs.values()]
        return all(value in ("constant", 0, 0.0, None) for value in arguments) and len(node.args) > 1
    return node.target is pad_with_input


def _flattens(node: Node) -> bool:
    """Return whether a node turns maps (N, C, ...) into features (N, C * ...)."""
    arguments: Sequence[Any] = node.args[1:]
    if node.target is torch.flatten or (node.op == "call_method" and node.target == "flatten"):
        named = dict(zip(("start_dim", "end_dim"), arguments, strict=False)) | dict(node.kwargs)
        is_all = named.get("end_dim", -1) == -1
        return bool(named.get("start_dim", 0) == 1 and is_all)
    if node.op != "call_method" or node.target != "reshape" or len(arguments) != 2 or arguments[1] != -1:
        return False
    size = arguments[0]
    return isinstance(size, Node) and size.target == "size" and size.args[1:] == (0,) and bool(_num_dims(node) == 2)


def _num_dims(node: Node) -> int:
    return int(node.meta.get(TENSOR, (None, 0))[1])


def _function_name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target)) if node.op != "output" else "the network's output"


def all_layers(edges: Sequence[Edge]) -> Iterator[Layer]:
    """Yield each layer of the edges once, in order."""
    yield from {layer.name: layer for edge in edges for layer in (edge.producer, *edge.consumers)}.values()
