"""What a tensor is after one of its views has changed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ptpipe_torch.torch_export import insert_call

_aten = torch.ops.aten
_LAST = 2**63 - 1


def is_known(view: Node) -> bool:
    """Return whether `write` knows this kind of view, or it is all views of a split."""
    if not isinstance(view.meta["val"], torch.Tensor):
        return view.target in _SPLITS
    return view.target in _WRITES


def write(view: Node, whole: Node, part: Node) -> Node:
    """Insert, where the graph inserts, a tensor that a view was written to.

    Args:
        view: the operator that views the tensor, as it was in the network.
        whole: the tensor before.
        part: what the view is now.
    """
    return _WRITES[view.target](view, whole, part)


def _put(whole: Node, part: Node, axis: int, start: Any, end: Any, step: Any = 1) -> Node:
    """Insert a tensor with other values from one index to before another.

    Of its parts: torch's own operator is written to a file as a lookup between two transpositions.
    """
    graph, size = whole.graph, whole.meta["val"].shape[axis]
    if start in (None, 0) and end in (None, _LAST) and step == 1:
        return part
    if not all(isinstance(number, int | None) for number in (start, end, size)) or step != 1:
        return insert_call(graph, _aten.slice_scatter.default, whole, part, axis, start, end, step)
    start, end, _ = slice(start, end).indices(size)
    parts = [part]
    if start > 0:
        parts.insert(0, insert_call(graph, _aten.slice.Tensor, whole, axis, 0, start))
    if end < size:
        parts.append(insert_call(graph, _aten.slice.Tensor, whole, axis, end, _LAST))
    return parts[0] if len(parts) == 1 else insert_call(graph, _aten.cat.default, parts, axis)


def _arguments(view: Node) -> dict[str, Any]:
    """Return an operator's arguments by name, with defaults."""
    target: Any = view.target
    names = [of.name for of in target._schema.arguments]
    defaults = {of.name: of.default_value for of in target._schema.arguments if of.has_default_value()}
    return defaults | dict(zip(names, view.args, strict=False)) | view.kwargs


def _slice(view: Node, whole: Node, part: Node) -> Node:
    given = _arguments(view)
    return _put(whole, part, *(given[name] for name in ("dim", "start", "end", "step")))


def _select(view: Node, whole: Node, part: Node) -> Node:
    given = _arguments(view)
    axis, index = given["dim"], given["index"]
    if not isinstance(index, int):
        return insert_call(whole.graph, _aten.select_scatter.default, whole, part, axis, index)
    row = insert_call(whole.graph, _aten.unsqueeze.default, part, axis % whole.meta["val"].dim())
    return _put(whole, row, axis, index, index + 1 or None)


def _part(view: Node, whole: Node, part: Node) -> Node:
    """Write one of the views of a split."""
    parts: Any = view.args[0]
    index: Any = view.args[1]
    axis = _arguments(parts)["dim"]
    if parts.target is _aten.unbind.int:
        row = insert_call(whole.graph, _aten.unsqueeze.default, part, axis % whole.meta["val"].dim())
        return _put(whole, row, axis, index, index + 1)
    sizes = [of.shape[axis] for of in parts.meta["val"]]
    start = sum(sizes[:index])
    return _put(whole, part, axis, start, start + sizes[index])


def _transpose(view: Node, whole: Node, part: Node) -> Node:
    return insert_call(whole.graph, view.target, part, *view.args[1:])


def _permute(view: Node, whole: Node, part: Node) -> Node:
    axes: Any = view.args[1]
    places = [axis % len(axes) for axis in axes]
    return insert_call(whole.graph, _aten.permute.default, part, [places.index(axis) for axis in range(len(axes))])


def _reshape(view: Node, whole: Node, part: Node) -> Node:
    graph = whole.graph
    sizes = [
        size if isinstance(size, int) else insert_call(graph, _aten.sym_size.int, whole, axis)
        for axis, size in enumerate(whole.meta["val"].shape)
    ]
    return insert_call(graph, _aten.reshape.default, part, sizes)


def _same(view: Node, whole: Node, part: Node) -> Node:
    return part


_SPLITS = frozenset(
    (_aten.chunk.default, _aten.split.Tensor, _aten.split.sizes, _aten.split_with_sizes.default, _aten.unbind.int)
)
_WRITES: dict[Any, Callable[[Node, Node, Node], Node]] = {
    operator.getitem: _part,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.permute.default: _permute,
    **dict.fromkeys((_aten.transpose.int, _aten.swapaxes.default), _transpose),
    **dict.fromkeys((_aten.alias.default, _aten.contiguous.default, _aten.detach.default), _same),
    **dict.fromkeys((_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten.to.other), _same),
    **dict.fromkeys(
        (
            *(_aten.flatten.using_ints, _aten.reshape.default, _aten.unflatten.int, _aten.unsqueeze.default),
            *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
            *(_aten.view.default, _aten.view_as.default, _aten._unsafe_view.default),
        ),
        _reshape,
    ),
}
