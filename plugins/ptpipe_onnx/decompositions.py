"""Operators of an exported program written as those that torch's ONNX exporter has a form for.

The exporter's own decomposition does the same, but traces the whole network again: half of an export.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from ptpipe_onnx.constant_tensors import evaluate_constants
from ptpipe_onnx.writes_in_place import is_without_effect, write_out_of_place
from ptpipe_torch.torch_export import insert_call, name_outputs

TRANSPOSED_CONVOLUTIONS = {
    torch.ops.aten.conv_transpose1d.default: 1,
    torch.ops.aten.conv_transpose2d.input: 2,
    torch.ops.aten.conv_transpose3d.input: 3,
}
"""With their numbers of spatial axes."""
_CONVERSIONS = (torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout, torch.ops.aten.to.device)
_ASSERTIONS = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_tensor_metadata.default)


def decompose(program: ExportedProgram) -> None:
    """Write operators in place, batch norms with fixed statistics and the like otherwise, in place.

    Operators in place stay where one of them changes what shares memory in other ways than are known: then all is left
    to the exporter. Dropouts in eval mode are left out: they return their input, which the exporter does not know.
    """
    evaluate_constants(program)
    is_written = write_out_of_place(program)
    nodes = list(program.graph_module.graph.nodes)
    for node in nodes:
        if is_without_effect(node):
            _leave_out(node)
        elif is_written:
            _write_with_form(node)
    program.graph_module.recompile()


def decompose_each(
    program: ExportedProgram, with_form: Collection[Any], functions: Mapping[Any, Callable[..., Any]]
) -> None:
    """Replace operators without a form by what they are made of, one by one, in place.

    What is made of others without a form stays as it is.

    Args:
        program: without operators in place.
        with_form: all operators that the exporter has a form for.
        functions: of operators that it has none for: what they are made of.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target not in with_form:
            parts = _parts_of(node, functions)
            if parts is not None and all(part.target in with_form for part in _operators(parts)):
                _replace(node, parts)
    name_outputs(program)
    program.graph_module.recompile()


def _parts_of(node: Node, functions: Mapping[Any, Callable[..., Any]]) -> GraphModule | None:
    """Return what an operator is made of, a graph that has its input nodes as inputs; None where torch can't tell."""
    target: Any = node.target
    sources = node.all_input_nodes

    def call(*values: Any) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), dict(zip(sources, values, strict=True)).__getitem__)
        return target(*args, **kwargs)

    values = [source.meta["val"] for source in sources]
    try:
        with detect_fake_mode([*values, node.meta["val"]]) or nullcontext():
            parts = make_fx(call, decomposition_table=dict(functions))(*values)
    except Exception:  # noqa: BLE001  # the exporter, which tries it next, has a message
        return None
    parts.graph.eliminate_dead_code()
    return parts


def _operators(parts: GraphModule) -> list[Node]:
    """Return all but inputs, outputs and what takes one result of several."""
    ends = ("placeholder", "output")
    return [part for part in parts.graph.nodes if part.op not in ends and part.target is not operator.getitem]


def _replace(node: Node, parts: GraphModule) -> None:
    """Replace an operator by copies of its parts."""
    graph = node.graph
    copies = dict(zip(parts.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        for part in (part for part in parts.graph.nodes if part.op == "call_function"):
            copies[part] = graph.node_copy(part, copies.__getitem__)
            copies[part].meta = {**node.meta, "val": part.meta["val"]}
    result: Any = map_arg(parts.graph.output_node().args[0], copies.__getitem__)
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


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
    elif node.target in TRANSPOSED_CONVOLUTIONS:
        _write_convolution(node)
    elif node.target in _CONVERSIONS:
        _convert(node)
    elif node.target in _ASSERTIONS:
        node.graph.erase_node(node)


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
    num_axes = TRANSPOSED_CONVOLUTIONS[target]
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
