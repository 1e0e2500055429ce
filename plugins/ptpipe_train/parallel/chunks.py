"""Cutting a network into chunks that follow one another: where it can be cut, and where it should be.

A chunk takes one tensor and gives one. Its layers are the very objects of the whole network, under the same names, so
that reporters and fake quantization go along and the state dict of the whole stays true.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from ptpipe import StageError
from ptpipe_train.evaluation import left_as_it_was

_REPETITIONS = 3
_VIEWING_LAYERS = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.PixelShuffle)
_VIEWS = frozenset({
    "chunk", "contiguous", "detach", "diagonal", "dropout", "expand", "expand_as", "flatten", "getitem", "movedim",
    "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "t", "transpose", "unbind", "unflatten",
    "unfold", "unsqueeze", "view", "view_as",
})  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """A place where a network can be cut: behind this node nothing but its value is needed."""

    node: fx.Node
    begins: str
    """The layer or operator that comes next."""


@dataclass(frozen=True)
class Cuttable:
    """A network as a graph with the places where it can be cut, and so the smallest pieces."""

    module: nn.Module
    graph: fx.Graph
    cuts: tuple[Cut, ...]

    def piece(self, first: int, end: int) -> fx.GraphModule:
        """The smallest pieces from `first` to before `end`, as one network from a tensor to a tensor."""
        source = self.cuts[first - 1].node if first else None
        target = self.cuts[end - 1].node if end <= len(self.cuts) else None
        return _subgraph(self.module, self.graph, source, target)

    @property
    def num_pieces(self) -> int:
        """Smallest pieces."""
        return len(self.cuts) + 1


class _Tracer(fx.Tracer):  # type: ignore[misc]  # torch comes without types
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hasattr(m, "on_progress") or bool(super().is_leaf_module(m, module_qualified_name))


def find_cuts(module: nn.Module) -> Cuttable:
    """Trace the network and find where it can be cut. Raises StageError where its forward can't be traced."""
    before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    try:
        graph = module.graph if isinstance(module, fx.GraphModule) else _Tracer().trace(module)
    except Exception as error:  # tracing runs the network's own code on stand-ins
        raise StageError(
            f"the network can't be cut into chunks: its forward pass depends on values ({error}); use mode ddp"
        ) from error
    for name, buffer in module.named_buffers():
        if name not in before or buffer is not before[name][0] or buffer._version != before[name][1]:
            raise StageError(
                f"the network can't be cut into chunks: its forward pass itself changes {name}, which a cut network "
                "would not; use mode ddp"
            )
    return Cuttable(module, graph, tuple(_cuts(module, list(graph.nodes))))


def _cuts(module: nn.Module, nodes: list[fx.Node]) -> Iterator[Cut]:
    position = {node: number for number, node in enumerate(nodes)}
    last_use = {
        node: max((position[user] for user in node.users), default=-1) for node in nodes if node.op != "get_attr"
    }
    uses = [_owned(module, node) for node in nodes]
    for number, node in enumerate(nodes[:-2]):
        live = [other for other in nodes[: number + 1] if last_use.get(other, -1) > number]
        if live != [node] or node.op in ("placeholder", "get_attr"):
            continue
        before, behind = set[int]().union(*uses[: number + 1]), set[int]().union(*uses[number + 1 :])
        following = next(other for other in nodes[number + 1 :] if other.op != "get_attr")
        if before and behind and not before & behind and _is_tensor(node) and not _is_changed(module, node):
            yield Cut(node, str(following.target) if following.op == "call_module" else following.name)


def _owned(module: nn.Module, node: fx.Node) -> set[int]:
    """Identities of the parameters and buffers that a node uses."""
    owned = set()
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        owned |= {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    for source in node.all_input_nodes:  # one node stands for all uses of a parameter
        if source.op == "get_attr":
            owner, _, name = str(source.target).rpartition(".")
            owned.add(id(getattr(module.get_submodule(owner), name)))
    return owned


def _is_tensor(node: fx.Node) -> bool:
    """Whether a node's value may be one: of several values a part is taken."""
    return all(user.target not in (operator.getitem, getattr) for user in node.users)


def _is_changed(module: nn.Module, node: fx.Node) -> bool:
    """Whether what a node gives is changed in place, there or farther on: a chunk's input can't be."""
    return any(
        _changes_input(module, user) or (_hands_on(module, user) and _is_changed(module, user)) for user in node.users
    )


def _changes_input(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if any(value is True for value in (*node.args, node.kwargs.get("inplace"))):
        return True  # `relu(x, True)`; where True means something else, a cut is lost
    return getattr(node.target, "__name__", str(node.target)).endswith("_")


def _hands_on(module: nn.Module, node: fx.Node) -> bool:
    """Whether a node may give the very memory that it receives."""
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), _VIEWING_LAYERS)
    return getattr(node.target, "__name__", str(node.target)) in _VIEWS


def _subgraph(module: nn.Module, graph: fx.Graph, source: fx.Node | None, target: fx.Node | None) -> fx.GraphModule:
    """The nodes behind `source` up to `target` (None: from the input, to the output)."""
    new, values = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = source is None
    if source is not None:
        values[source] = new.placeholder("x")
    for node in graph.nodes:
        if node is source:
            inside = True
            continue
        if node.op == "get_attr" or inside:
            values[node] = new.node_copy(node, lambda old: values[old])
        if node is target:
            new.output(values[target])
            break
    for node in reversed(list(new.nodes)):
        if node.op == "get_attr" and not node.users:
            new.erase_node(node)
    return fx.GraphModule(module, new, class_name="Chunk")


def measured_costs_s(network: Cuttable, images_NCHW: torch.Tensor, device: torch.device) -> list[float]:
    """Seconds of forward and backward of each smallest piece, the least of some tries; leaves no trace in it."""
    costs_s = []
    with left_as_it_was(network.module, training=True):
        value = images_NCHW
        for number in range(network.num_pieces):
            piece = network.piece(number, number + 1)
            value, cost_s = _timed(piece, value, device)
            costs_s.append(cost_s)
    network.module.zero_grad()
    return costs_s


def _timed(piece: nn.Module, value: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, float]:
    least_s = float("inf")
    for _ in range(_REPETITIONS):
        _wait(device)
        begin_s = time.perf_counter()
        result = piece(value.detach().requires_grad_())
        result.backward(torch.ones_like(result))
        _wait(device)
        least_s = min(least_s, time.perf_counter() - begin_s)
    return result.detach(), least_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def balanced(costs_s: Sequence[float], num_chunks: int) -> list[int]:
    """Where to cut so that the dearest chunk is as cheap as can be: the first piece of each chunk but the first.

    Dynamic programming over (pieces so far, chunks so far): Skiena, The Algorithm Design Manual, "linear partition".
    """
    num = len(costs_s)
    until = [0.0]
    for cost_s in costs_s:
        until.append(until[-1] + cost_s)
    best = [[float("inf")] * (num_chunks + 1) for _ in range(num + 1)]
    begin = [[0] * (num_chunks + 1) for _ in range(num + 1)]
    best[0][0] = 0.0
    for chunk in range(1, num_chunks + 1):
        for end in range(chunk, num + 1):
            for first in range(chunk - 1, end):
                dearest = max(best[first][chunk - 1], until[end] - until[first])
                if dearest < best[end][chunk]:
                    best[end][chunk], begin[end][chunk] = dearest, first
    firsts, end = [], num
    for chunk in range(num_chunks, 0, -1):
        end = begin[end][chunk]
        firsts.append(end)
    return firsts[::-1][1:]


def named_cuts(network: Cuttable, names: Sequence[str]) -> list[int]:
    """Where chunks begin that the user named. Raises StageError for a name that no chunk can begin with."""
    begins = [cut.begins for cut in network.cuts]
    firsts = []
    for name in names:
        fitting = [number for number, begin in enumerate(begins) if begin == name or begin.startswith(f"{name}.")]
        if not fitting:
            raise StageError(f"split_at: no chunk can begin with {name} (it can with: {', '.join(begins)})")
        firsts.append(fitting[0] + 1)
    if firsts != sorted(set(firsts)):
        raise StageError("split_at must name layers in the order of the network, each once")
    return firsts
