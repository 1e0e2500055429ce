"""Operators of an exported program written as those that torch's ONNX exporter has a form for.

The exporter's own decomposition does the same, but traces the whole network again: half of an export.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ptpipe_torch.torch_export import insert_call

_TRANSPOSED = {
    torch.ops.aten.conv_transpose1d.default: 1,
    torch.ops.aten.conv_transpose2d.input: 2,
    torch.ops.aten.conv_transpose3d.input: 3,
}
"""With their numbers of spatial axes."""
_NEW_TENSOR = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        *((f"conv{number}d", "default") for number in (1, 2, 3)),
        *((f"conv{number}d", "padding") for number in (1, 2, 3)),
        *((name, "default") for name in ("batch_norm", "group_norm", "instance_norm", "layer_norm", "linear")),
    )
) | {*_TRANSPOSED}
"""Composite operators that return a tensor of their own. Others may return their input."""
_VIEWS = (torch.ops.aten._unsafe_view.default,)
"""That share memory with their input, which their schemas don't say."""
_DROPOUTS = tuple(
    getattr(torch.ops.aten, f"{name}{suffix}").default
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for suffix in ("", "_")
)


_CONVERSIONS = (torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout, torch.ops.aten.to.device)
_ASSERTION = torch.ops.aten._assert_tensor_metadata.default


def decompose(program: ExportedProgram) -> None:
    """Write operators in place, batch norms with fixed statistics and the like otherwise, in place.

    Operators in place stay where something may share memory with the tensor that they change: then all is left to the
    exporter. Dropouts in eval mode are left out: they return their input itself, which the exporter does not know.
    """
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if node.target in _DROPOUTS]:
        if not node.args[2]:
            _leave_out(node)
    places = {node: place for place, node in enumerate(graph.nodes)}
    calls = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    for node in calls:
        if node.target._schema.is_mutable:
            _write_out_of_place(node, places)
    if not any(node.target._schema.is_mutable for node in calls):
        for node in calls:
            _write_with_form(node)
    program.graph_module.recompile()


def _leave_out(node: Node) -> None:
    """Let what reads the operator's result read its first argument. Outputs are known by name: their operators stay."""
    if all(user.op != "output" for user in node.users):
        source: Any = node.args[0]
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def _write_with_form(node: Node) -> None:
    """Write an operator as one that has a form, where it is one of those above."""
    if node.target is torch.ops.aten.batch_norm.default:
        _fix_statistics(node)
    elif node.target in _TRANSPOSED:
        _write_convolution(node)
    elif node.target in _CONVERSIONS:
        _convert(node)
    elif node.target is _ASSERTION:
        node.graph.erase_node(node)


def _write_out_of_place(node: Node, places: dict[Node, int]) -> None:
    """Replace an operator in place by the one that returns a new tensor, if nothing else has the one it changes."""
    changed, function = node.args[0] if node.args else None, _out_of_place(node.target)
    if not isinstance(changed, Node) or function is None or not _is_new(changed):
        return
    others = [user for user in changed.users if user is not node]
    # Outputs are known by name, too.
    if not all((places[user] > places[node] and user.op != "output") or _is_new(user) for user in others):
        return
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    if function(*args, **kwargs).dtype is not changed.meta["val"].dtype:  # in place, a result is rounded to it
        return
    node.target = function
    for user in others:
        if places[user] > places[node]:
            user.replace_input_with(changed, node)


def _out_of_place(target: Any) -> Any:
    """Return `relu` of `relu_`, where it changes its first argument alone, and there is such a function of the same.

    That of `pow_`, of this name and overload, takes the arguments in another order.
    """
    first, *others = target._schema.arguments
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    function = getattr(packet, target._overloadname, None)
    if not name.endswith("_") or function is None or any(of.alias_info for of in others) or not first.is_write:
        return None
    schema = function._schema
    same = [(of.name, str(of.type)) for of in schema.arguments] == [(of.name, str(of.type)) for of in (first, *others)]
    return (
        function if same and not schema.is_mutable and [str(of.type) for of in schema.returns] == ["Tensor"] else None
    )


def _is_new(node: Node) -> bool:
    """Return whether an operator's result shares no memory with any other tensor."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or any(of.alias_info for of in target._schema.returns):
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return target in _NEW_TENSOR or (target not in _VIEWS and not target.has_kernel_for_dispatch_key(composite))


def _fix_statistics(node: Node) -> None:
    """Replace a batch norm by the operator of its eval mode, which returns two empty tensors beside its result."""
    args: Any = node.args
    source, weight, bias, mean, variance, is_training, momentum, epsilon, _ = args
    if is_training or mean is None or variance is None or node.meta["val"].dtype is not torch.float32:
        return
    with node.graph.inserting_before(node):
        fixed = insert_call(
            node.graph,
            torch.ops.aten._native_batch_norm_legit_no_training.default,
            *(source, weight, bias, mean, variance, momentum, epsilon),
        )
    fixed.meta = {**node.meta, "val": fixed.meta["val"]}
    node.target, node.args = operator.getitem, (fixed, 0)


def _write_convolution(node: Node) -> None:
    """Replace a transposed convolution by the general operator."""
    target: Any = node.target
    num_axes = _TRANSPOSED[target]
    if node.meta["val"].dim() != num_axes + 2:  # of one sample without its axis
        return
    defaults: list[Any] = [None, [1] * num_axes, [0] * num_axes, [0] * num_axes, 1, [1] * num_axes]
    source, weight, *given = node.args
    bias, stride, padding, output_padding, groups, dilation = given + defaults[len(given) :]
    node.target = torch.ops.aten.convolution.default
    node.args = (source, weight, bias, stride, padding, dilation, True, output_padding, groups)


def _convert(node: Node) -> None:
    """Replace a conversion by that of the type alone, which is all that a file has."""
    source: Any = node.args[0]
    dtype = node.meta["val"].dtype
    if source.meta["val"].dtype is dtype:
        _leave_out(node)
    else:
        node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, (source,), {"dtype": dtype}
