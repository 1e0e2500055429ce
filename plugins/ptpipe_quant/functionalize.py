"""Replace in-place operators of a traced network by ones that return a new tensor.

Observers, fake quantization and int8 operators break the link between a tensor and its views and other names, so what
an in-place operator does to them would be lost. Which tensors it changes is found by running the graph once: torch
counts the changes of each tensor, and tensors of one storage share memory.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from ptpipe import StageError
from ptpipe_torch.int8.tracer import IN_PLACE_OPERATORS, SOURCE_LINE
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.model.signature import TensorSpec

F = nn.functional

TENSOR = "tensor"
"""Key of `Node.meta`: dtype and number of dimensions of a node that computes a tensor."""
SEVERAL = "several"
"""Key of `Node.meta`: the number of parts of a node that computes a tuple or another container, else 0."""
SHAPE = "shape"
"""Key of `Node.meta`: shape of that tensor, for batches of some size."""

_BATCH_SIZE = 2
_ASSIGNING = ("copy_", "fill_", "zero_")


def functionalize(graph: GraphModule, inputs: Sequence[TensorSpec]) -> None:
    """Make all in-place operators out of place, in place of the graph; later uses of what they changed use the result.

    Also records dtype, number of dimensions and shape of each tensor, as `TENSOR` and `SHAPE`. Raises StageError, with
    the line, for an in-place operator whose effect others see and that has no such form, and for a network that fails
    on inputs of these shapes.
    """
    _separate_updates(graph)
    # Tensors of inference mode, in which a stored network may be built, count no changes.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        _Run(graph, zeros(inputs, _BATCH_SIZE)).functionalize()


class ChangedViewError(StageError):
    """A node changes a tensor in place that later nodes use under another name or as a view."""

    def __init__(self, node: Node) -> None:
        super().__init__(
            f"{_place(node)}changes a tensor in place that later operations use under another name or as a view; write "
            "it out of place, e.g. y = relu(x) for relu_(x), x = x + y for x += y"
        )
        self.node = node


def set_items(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Return a copy of `x` in which `x[index]` is `value`."""
    x = x.clone()
    x[index] = value
    return x


def _separate_updates(graph: GraphModule) -> None:
    """Let `x[i] += y` add out of place before it writes to `x[i]`, in place of the graph: it adds to a view of `x`."""
    for write in graph.graph.find_nodes(op="call_function", target=operator.setitem):
        updated = write.args[2]
        if not isinstance(updated, Node) or updated.target not in IN_PLACE_OPERATORS:
            continue
        part: Any = updated.args[0]
        is_same_part = part.target is operator.getitem and part.args == write.args[:2]
        if is_same_part and list(part.users) == [updated] and list(updated.users) == [write]:
            updated.target = IN_PLACE_OPERATORS[updated.target]


class _Run(Interpreter):
    """Runs a graph with its in-place operators, which are replaced one by one behind the run."""

    def __init__(self, graph: GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.args_iter = iter(inputs)
        self._shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        self._nodes = list(graph.graph.nodes)
        self._positions = {node: position for position, node in enumerate(self._nodes)}
        self._in_place_layers: list[Any] = []  # changed at the end: the run needs them as they are

    def functionalize(self) -> None:
        """Run all nodes."""
        for node in self._nodes:
            if node.op == "output":
                break
            versions = [(tensor, tensor._version) for value in self.env.values() for tensor in _tensors(value)]
            self._assign(node)
            self.env[node] = self._value(node)
            changed = [tensor for tensor, version in versions if tensor._version != version]
            self._replace(node, changed)
            value = self.env[node]
            if isinstance(value, torch.Tensor):
                node.meta |= {TENSOR: (value.dtype, value.dim()), SHAPE: tuple(value.shape)}
            node.meta[SEVERAL] = len(value) if isinstance(value, tuple | list | dict) else 0
            self.env = {key: value for key, value in self.env.items() if self._is_used_after(key, node)}
        for layer in self._in_place_layers:
            layer.inplace = False

    def _assign(self, node: Node) -> None:
        """Let `x[i].copy_(y)` be `x[i] = y`, and likewise `fill_` and `zero_`, where nothing else reads that part."""
        part: Any = node.args[0] if node.op == "call_method" and node.target in _ASSIGNING else None
        if not isinstance(part, Node) or part.target is not operator.getitem:
            return
        (whole, index), given = part.args, node.args[1:] or ([0] if node.target == "zero_" else [])
        is_alone = not node.users and list(part.users) == [node]
        if is_alone and given and _share_memory(self.env.get(whole), self.env[part]):  # type: ignore[arg-type]
            node.op, node.target = "call_function", operator.setitem
            node.args, node.kwargs = (whole, index, given[0]), {}

    def _value(self, node: Node) -> Any:
        try:
            return self.run_node(node)
        except Exception as error:  # a network may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            message = f"{_place(node)}fails on inputs of shape {self._shapes}: {reason}"
            raise StageError(message) from error

    def _replace(self, node: Node, changed: Sequence[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage()._cdata for tensor in changed}
        target = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        written = self.env.get(target) if target is not None else None
        if not isinstance(written, torch.Tensor) or written.untyped_storage()._cdata not in storages:
            written = None
        is_functional = self._make_functional(node, is_changing=bool(changed))
        if node.target is set_items:
            self.env[node] = written
        for other in list(self.env) if changed else ():
            if other is node or not self._is_used_after(other, node) or not self._sees(other, written, storages):
                continue
            value = self.env[other]
            if not is_functional or not _is_same(value, written) or not _is_same(self.env[node], written):
                raise ChangedViewError(node)
            other.replace_all_uses_with(node, delete_user_cb=lambda user: self._comes_after(user, node))

    def _sees(self, other: Node, written: torch.Tensor | None, storages: set[int]) -> bool:
        """Return whether a node's value shares memory with what was written; with all of a storage for None."""
        for tensor in _tensors(self.env[other]):
            if tensor.untyped_storage()._cdata not in storages:
                continue
            if written is None or not _share_memory(tensor, written):
                return True
            if _overlaps(tensor, written):
                return True
        return False

    def _make_functional(self, node: Node, *, is_changing: bool) -> bool:
        """Replace an in-place operator by its out-of-place form; return whether it has one."""
        target: Any = node.target
        if node.op == "call_module":
            layer: Any = self.submodules[target]
            if not getattr(layer, "inplace", False):
                return False
            self._in_place_layers.append(layer)
            return True
        if target is operator.setitem:
            node.target = set_items
        elif target in IN_PLACE_OPERATORS:
            node.target = IN_PLACE_OPERATORS[target]
        elif node.op == "call_method":
            return is_changing and _use_method(node)
        elif node.op == "call_function":
            return is_changing and _use_function(node)
        return True

    def _is_used_after(self, node: Node, current: Node) -> bool:
        return any(self._comes_after(user, current) for user in node.users)

    def _comes_after(self, user: Node, current: Node) -> bool:
        return self._positions[user] > self._positions[current]


def _use_method(node: Node) -> bool:
    name = str(node.target).removesuffix("_")
    if name == node.target or not hasattr(torch.Tensor, name):
        return False
    if name in ("add", "mul") and not node.kwargs:  # the functions have an int8 form, the methods don't
        node.op, node.target = "call_function", getattr(torch, name)
    else:
        node.target = name
    return True


def _use_function(node: Node) -> bool:
    target: Any = node.target
    name = getattr(target, "__name__", "")
    if name.endswith("_") and (function := getattr(F, name[:-1], getattr(torch, name[:-1], None))) is not None:
        node.target = function
        return True
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # written in C++, without a signature
        return False
    if bound.arguments.get("inplace") is not True:
        return False
    del bound.arguments["inplace"]  # int8 forms don't take it
    node.args, node.kwargs = bound.args, bound.kwargs
    return True


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_inference())


def _is_same(value: Any, written: torch.Tensor | None) -> bool:
    """Return whether a value is the written tensor, under whatever name."""
    return (
        written is not None
        and _share_memory(value, written)
        and value.dtype == written.dtype
        and (value.storage_offset(), value.shape, value.stride())
        == (written.storage_offset(), written.shape, written.stride())
    )


def _share_memory(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _overlaps(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage and dtype have an element in common."""
    if one.dtype != other.dtype:
        return True
    is_written = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    is_written.as_strided(other.shape, other.stride(), other.storage_offset()).fill_(True)
    return bool(is_written.as_strided(one.shape, one.stride(), one.storage_offset()).any())


def _place(node: Node) -> str:
    line = node.meta.get(SOURCE_LINE, "")
    return f"{line} " if line else "the network "
