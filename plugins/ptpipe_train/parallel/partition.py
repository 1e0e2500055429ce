"""Partition of a network into pipeline stages: where it can be split, and where the stages are balanced.

A pipeline stage maps one tensor to one tensor. What is computed of the network's input alone, without parameters, such
as a mask that hides padding in every layer, is not sent: each stage that uses it computes it from the input. A stage
shares its layers, under their names, with the whole network, so observers and fake quantization stay in place and the
state dict of the whole network stays valid.
"""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ptpipe import StageError
from ptpipe_torch.model.forward_arguments import has_kept_default
from ptpipe_torch.traced_autocast import AutocastTracer, has_autocast_regions, remove_autocast_regions
from ptpipe_torch.traced_gradients import NO_GRAD, GradientRecorder, GradientTracer
from ptpipe_train.evaluation import state_restored
from ptpipe_train.parallel.trace_state import trace_stateless

_REPETITIONS = 3
_VIEWING_LAYERS = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.PixelShuffle)
_VIEWS = frozenset({
    "chunk", "contiguous", "detach", "diagonal", "dropout", "expand", "expand_as", "flatten", "getitem", "movedim",
    "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "t", "transpose", "unbind", "unflatten",
    "unfold", "unsqueeze", "view", "view_as",
})  # fmt: skip


@dataclass(frozen=True)
class SplitPoint:
    """A point where a network can be split: later nodes need the value of this one, and the network's input at most."""

    node: fx.Node
    next_layer: str
    """Name of the layer or operator that follows."""


@dataclass(frozen=True)
class TracedNetwork:
    """A network as an FX graph with all its split points, between which are its smallest pieces."""

    module: nn.Module
    graph: fx.Graph
    split_points: tuple[SplitPoint, ...]
    input_values: frozenset[fx.Node]
    """What each piece can compute from the network's input."""

    def piece(self, first: int, end: int) -> fx.GraphModule:
        """Return the smallest pieces `first` to `end` (exclusive) as one network; see `takes_network_input`."""
        source = self.split_points[first - 1].node if first else None
        target = self.split_points[end - 1].node if end <= len(self.split_points) else None
        return _subgraph(self, source, target)

    @property
    def num_pieces(self) -> int:
        """Number of smallest pieces."""
        return len(self.split_points) + 1


def takes_network_input(piece: fx.GraphModule) -> bool:
    """Return whether a piece takes the input of the whole network behind the value of the piece before it."""
    return len(piece.graph.find_nodes(op="placeholder")) > 1


class _Tracer(AutocastTracer, GradientTracer):
    def __init__(self) -> None:
        super().__init__()
        self.gradients = GradientRecorder(lambda _function: False)  # all autograd functions are recorded as they are

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Training callbacks must stay modules, or nothing could call them.
        return hasattr(m, "on_progress") or super().is_leaf_module(m, module_qualified_name)

    def _proxy_placeholder(self, name: str, concrete_args: Any, sig: inspect.Signature, fn: Any) -> Any:
        if has_kept_default(sig, name, num_inputs=1):
            return sig.parameters[name].default
        return super()._proxy_placeholder(name, concrete_args, sig, fn)


def _trace(module: nn.Module) -> fx.Graph:
    return _Tracer().trace(module)


def trace_network(module: nn.Module, *, uses_autocast: bool = False) -> TracedNetwork:
    """Trace the network and find its split points.

    Raise StageError where its forward pass can't be traced, draws random numbers or changes attributes while it is,
    returns anything but a tensor, switches off the gradients of parameters, or autocast where that is used.
    """
    try:
        graph = module.graph if isinstance(module, fx.GraphModule) else trace_stateless(module, _trace)
    except StageError:
        raise
    except Exception as error:  # tracing runs the network's own code on proxies
        raise StageError(
            f"the network can't be split into pipeline stages: its control flow depends on values ({error}); "
            "use mode ddp"
        ) from error
    if not isinstance(graph.output_node().args[0], fx.Node):
        raise StageError(
            "the network can't be split into pipeline stages: it returns its output inside a dict, a list or a tuple; "
            "return the tensor itself, or use mode ddp"
        )
    if not isinstance(module, fx.GraphModule) and (node := _without_gradients(module, graph)) is not None:
        raise StageError(
            f"the network can't be split into pipeline stages: its forward pass computes {node} without gradients "
            "(torch.no_grad), which tracing doesn't preserve; use mode ddp, or freeze"
        )
    if uses_autocast and has_autocast_regions(graph):
        raise StageError(
            "the network can't be split into pipeline stages: a part of its forward pass switches autocast off, which "
            "pieces of it don't; use mode ddp, or precision fp32"
        )
    remove_autocast_regions(graph)
    input_values = _input_values(module, graph)
    return TracedNetwork(module, graph, tuple(_split_points(module, list(graph.nodes), input_values)), input_values)


def _without_gradients(module: nn.Module, graph: fx.Graph) -> fx.Node | None:
    """Return the first node that would have a gradient, were it not for `torch.no_grad`."""
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    reached = set[fx.Node]()
    for node in graph.nodes:
        if reached.isdisjoint(node.all_input_nodes) and trained.isdisjoint(_used_tensors(module, node)):
            continue
        if node.meta[NO_GRAD]:
            return node  # type: ignore[no-any-return]
        reached.add(node)
    return None


def _input_values(module: nn.Module, graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes that are functions of the network's input alone; none where one of them is modified in place."""
    found = set[fx.Node]()
    for node in graph.nodes:
        is_function = node.op in ("call_function", "call_method") and not _is_random(node) and node.all_input_nodes
        if node.op == "placeholder" or (is_function and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return frozenset() if any(_is_modified(module, node) for node in found) else frozenset(found)


def _is_random(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return any(part in name for part in ("drop", "rand", "bernoulli", "normal", "multinomial"))


def _split_points(module: nn.Module, nodes: list[fx.Node], input_values: frozenset[fx.Node]) -> Iterator[SplitPoint]:
    position = {node: number for number, node in enumerate(nodes)}
    last_use = {
        node: max((position[user] for user in node.users), default=-1) for node in nodes if node.op != "get_attr"
    }
    used = [_used_tensors(module, node) for node in nodes]
    for number, node in enumerate(nodes[:-2]):
        live = [
            other for other in nodes[: number + 1] if last_use.get(other, -1) > number and other not in input_values
        ]
        if live != [node] or node.op == "get_attr":
            continue
        before, after = set[int]().union(*used[: number + 1]), set[int]().union(*used[number + 1 :])
        following = next(other for other in nodes[number + 1 :] if other.op != "get_attr" and other not in input_values)
        # Both sides must have something to train and share nothing, and only a tensor can be sent.
        if before and after and not before & after and _is_tensor(node) and not _is_modified(module, node):
            yield SplitPoint(node, str(following.target) if following.op == "call_module" else following.name)


def _used_tensors(module: nn.Module, node: fx.Node) -> set[int]:
    """Return the ids of the parameters and buffers that a node uses."""
    used = set()
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        used |= {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    for source in node.all_input_nodes:  # all uses of a parameter share one node
        if source.op == "get_attr":
            owner, _, name = str(source.target).rpartition(".")
            used.add(id(getattr(module.get_submodule(owner), name)))
    return used


def _is_tensor(node: fx.Node) -> bool:
    """Return whether a node's value can be a tensor: no user takes an element or an attribute of it."""
    return all(user.target not in (operator.getitem, getattr) for user in node.users)


def _is_modified(module: nn.Module, node: fx.Node) -> bool:
    """Return whether a node's value, or a view of it, is modified in place, as no received tensor may be."""
    return any(
        _modifies_input(module, user) or (_returns_view(module, user) and _is_modified(module, user))
        for user in node.users
    )


def _modifies_input(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if any(value is True for value in (*node.args, node.kwargs.get("inplace"))):
        return True  # `relu(x, True)`; where True means something else, a split point is lost
    return getattr(node.target, "__name__", str(node.target)).endswith("_")


def _returns_view(module: nn.Module, node: fx.Node) -> bool:
    """Return whether a node's value may share memory with its input."""
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), _VIEWING_LAYERS)
    return getattr(node.target, "__name__", str(node.target)) in _VIEWS


def _subgraph(network: TracedNetwork, source: fx.Node | None, target: fx.Node | None) -> fx.GraphModule:
    """Return the nodes after `source` up to `target` (None: from the input, to the output) as a network."""
    new, values = fx.Graph(), dict[fx.Node, fx.Node]()
    copied = network.input_values if source is not None else frozenset[fx.Node]()
    inside = source is None
    if source is not None:
        values[source] = new.placeholder("stage_input")
    for node in network.graph.nodes:
        if node is source:
            inside = True
            continue
        if node in copied and node.op == "placeholder":
            values[node] = new.placeholder(f"network_{node.target}")
        elif node.op == "get_attr" or inside or node in copied:
            values[node] = new.node_copy(node, lambda old: values[old])
        if node is target:
            new.output(values[target])
            break
    unused = {values[node] for node in values if node in copied or node.op == "get_attr"}
    for node in reversed(list(new.nodes)):
        if node in unused and not node.users:
            new.erase_node(node)
    return fx.GraphModule(network.module, new, class_name="PipelineStagePiece")


def measure_costs_s(network: TracedNetwork, network_input: torch.Tensor, device: torch.device) -> list[float]:
    """Return the seconds of forward and backward pass of each smallest piece, the minimum of a few runs.

    Buffers, gradients and modes of the network are restored.
    """
    costs_s, value = [], network_input
    with state_restored(network.module, training=True):
        for number in range(network.num_pieces):
            piece = network.piece(number, number + 1)
            more = (network_input,) if takes_network_input(piece) else ()
            value, cost_s = _timed(piece, (value, *more), device)
            costs_s.append(cost_s)
    network.module.zero_grad()
    return costs_s


def _timed(piece: nn.Module, inputs: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float]:
    min_s = float("inf")
    value, *more = inputs
    for _ in range(_REPETITIONS):
        _synchronize(device)
        begin_s = time.perf_counter()
        # Token ids have no gradient.
        result = piece(value.detach().requires_grad_(value.is_floating_point()), *more)
        result.backward(torch.ones_like(result))
        _synchronize(device)
        min_s = min(min_s, time.perf_counter() - begin_s)
    return result.detach(), min_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def balanced(costs_s: Sequence[float], num_parts: int) -> list[int]:
    """Return the first piece of each pipeline stage but the first, such that the most expensive one is cheapest.

    Dynamic programming over (number of pieces, number of parts): Skiena, The Algorithm Design Manual, "linear
    partition".
    """
    num = len(costs_s)
    total_s = [0.0]
    for cost_s in costs_s:
        total_s.append(total_s[-1] + cost_s)
    best = [[float("inf")] * (num_parts + 1) for _ in range(num + 1)]
    begin = [[0] * (num_parts + 1) for _ in range(num + 1)]
    best[0][0] = 0.0
    for part in range(1, num_parts + 1):
        for end in range(part, num + 1):
            for first in range(part - 1, end):
                maximum = max(best[first][part - 1], total_s[end] - total_s[first])
                if maximum < best[end][part]:
                    best[end][part], begin[end][part] = maximum, first
    firsts, end = [], num
    for part in range(num_parts, 0, -1):
        end = begin[end][part]
        firsts.append(end)
    return firsts[::-1][1:]


def named_split_points(network: TracedNetwork, names: Sequence[str]) -> list[int]:
    """Return the first piece of each pipeline stage that begins with one of these layers.

    A name of a group of layers stands for its first one. Raise StageError for a layer that can't be one.
    """
    layers = [point.next_layer for point in network.split_points]
    firsts = []
    for name in names:
        fitting = [number for number, layer in enumerate(layers) if layer == name or layer.startswith(f"{name}.")]
        if not fitting:
            raise StageError(
                f"split_at: no pipeline stage can begin with {name} (possible split points: {', '.join(layers)})"
            )
        firsts.append(fitting[0] + 1)
    if firsts != sorted(set(firsts)):
        raise StageError("split_at must name layers in the order of the network, each once")
    return firsts
