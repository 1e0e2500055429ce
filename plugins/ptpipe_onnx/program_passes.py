"""Passes over an exported program: what torch's ONNX exporter translates wrongly or not at all, written otherwise."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.fx.node import map_arg

from ptpipe_onnx.decompositions import TRANSPOSED_CONVOLUTIONS
from ptpipe_torch.torch_export import insert_call, name_outputs


def write_translatable(program: ExportedProgram) -> None:
    """Write what the exporter can't translate in other forms, in place."""
    _copy_repeated_outputs(program)
    _give_attention_heads(program)
    _subtract_from_floats(program)
    _write_global_averages_out(program)
    _write_views_as_views(program)
    _expand_copied(program)
    _floor_negative_sizes(program)
    _crop_transposed_convolutions(program)
    program.graph_module.recompile()


def _copy_repeated_outputs(program: ExportedProgram) -> None:
    """Return copies of inputs and of earlier outputs, in place: the exporter gives each tensor one name."""
    graph = program.graph_module.graph
    (end,) = graph.find_nodes(op="output")
    values = list(end.args[0])
    for index, (value, spec) in enumerate(zip(values, program.graph_signature.output_specs, strict=True)):
        is_repeated = isinstance(value, Node) and (value.op == "placeholder" or value in values[:index])
        if spec.kind is OutputKind.USER_OUTPUT and is_repeated:
            with graph.inserting_before(end):
                values[index] = insert_call(graph, torch.ops.aten.clone.default, value)
    end.args = (tuple(values),)
    name_outputs(program)


def _give_attention_heads(program: ExportedProgram) -> None:
    """Insert an axis of one head, in place, around attention over (N, L, D): the exporter takes (N, H, L, D) only."""
    aten, graph = torch.ops.aten, program.graph_module.graph
    for attention in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        if attention.meta["val"].dim() != 3:
            continue
        with graph.inserting_before(attention):
            for value in attention.all_input_nodes:  # the mask may have two axes, (L, S), which broadcast
                if value.meta["val"].dim() == 3:
                    attention.replace_input_with(value, insert_call(graph, aten.unsqueeze.default, value, 1))
        readers = list(attention.users)
        attention.meta["val"] = attention.meta["val"].unsqueeze(1)
        with graph.inserting_after(attention):
            without_head = insert_call(graph, aten.squeeze.dim, attention, 1)
        for reader in readers:
            reader.replace_input_with(attention, without_head)


def _write_global_averages_out(program: ExportedProgram) -> None:
    """Replace adaptive average pooling to one pixel by the mean that it is, in place, as its decomposition does."""
    aten, graph = torch.ops.aten, program.graph_module.graph
    for pool in graph.find_nodes(op="call_function", target=aten.adaptive_avg_pool2d.default):
        source, size = pool.args
        if list(size) == [1, 1]:
            pool.target, pool.args = aten.mean.dim, (source, [-1, -2], True)


def _subtract_from_floats(program: ExportedProgram) -> None:
    """Convert integers that are subtracted from a float (`1.0 - mask`) first, in place: the exporter fails there."""
    aten, graph = torch.ops.aten, program.graph_module.graph
    for difference in graph.find_nodes(op="call_function", target=aten.rsub.Scalar):
        value, minuend = difference.args[:2]
        if isinstance(minuend, float) and not value.meta["val"].dtype.is_floating_point:
            with graph.inserting_before(difference):
                difference.replace_input_with(
                    value, insert_call(graph, aten.to.dtype, value, difference.meta["val"].dtype)
                )


def _write_views_as_views(program: ExportedProgram) -> None:
    """Replace operators that return views of their input, in place, by those that the exporter knows to do so."""
    aten, graph = torch.ops.aten, program.graph_module.graph
    for unsafe, safe in (
        (aten.unsafe_chunk.default, aten.chunk.default),
        (aten.unsafe_split.Tensor, aten.split.Tensor),
        (aten.unsafe_split_with_sizes.default, aten.split_with_sizes.default),
    ):
        for split in graph.find_nodes(op="call_function", target=unsafe):
            split.target = safe
    for einsum in graph.find_nodes(op="call_function", target=aten.einsum.default):
        equation, operands = einsum.args[:2]
        if len(operands) == 1 and (order := _permutation(equation, operands[0].meta["val"].dim())) is not None:
            einsum.target, einsum.args, einsum.kwargs = aten.permute.default, (operands[0], order), {}


def _permutation(equation: str, num_axes: int) -> list[int] | None:
    """Return the order of its operand's axes that an equation gives, where that is all that it does."""
    letters = [letter for letter in equation.partition("->")[0] if letter.isalpha()]
    if len({*letters}) < len(letters):
        return None
    sizes = range(2, num_axes + 2)
    permuted = torch.einsum(equation, torch.empty(*sizes, device="meta")).shape
    return [size - 2 for size in permuted] if sorted(permuted) == [*sizes] else None


def _expand_copied(program: ExportedProgram) -> None:
    """Give what is copied into a tensor that tensor's shape first, in place: the exporter copies it as it is."""
    aten, graph = torch.ops.aten, program.graph_module.graph
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, source = copy.args[:2]
        if target.meta["val"].shape != source.meta["val"].shape:
            with graph.inserting_before(copy):
                copy.replace_input_with(source, insert_call(graph, aten.expand_as.default, source, target))


def _floor_negative_sizes(program: ExportedProgram) -> None:
    """Divide sizes that may be negative without a rest, in place: ONNX rounds to 0, where Python rounds down."""
    graph = program.graph_module.graph
    for division in graph.find_nodes(op="call_function", target=operator.floordiv):
        size, divisor = division.args
        known: Any = size.meta["val"].node if isinstance(size, Node) else None
        if known is None or known.shape_env.bound_sympy(known.expr).lower >= 0:
            continue
        with graph.inserting_before(division):
            rest = insert_call(graph, operator.mod, size, divisor)
            division.args = (insert_call(graph, operator.sub, size, rest), divisor)


def _crop_transposed_convolutions(program: ExportedProgram) -> None:
    """Enlarge by most what is enlarged by a number that depends on sizes (`output_size`), in place, and crop it.

    ONNX's number is a constant. What is behind the last place does not change those before it.
    """
    aten, graph = torch.ops.aten, program.graph_module.graph
    for target, num_axes in TRANSPOSED_CONVOLUTIONS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            given: Any = dict(enumerate(node.args))
            wanted = given.get(5, [])
            if not any(isinstance(number, Node) for number in wanted):
                continue
            strides, dilations = (given.get(place, [1] * num_axes) for place in (3, 7))
            most = [max(stride, dilation) - 1 for stride, dilation in zip(strides, dilations, strict=True)]
            readers = list(node.users)
            node.update_arg(5, most)
            node.meta["val"] = target(*map_arg(node.args, lambda value: value.meta["val"]))
            cropped, first = node, node.meta["val"].dim() - num_axes
            with graph.inserting_before(node.next):
                for axis, (number, largest) in enumerate(zip(wanted, most, strict=True), first):
                    size = insert_call(graph, aten.sym_size.int, node, axis)
                    end = insert_call(graph, operator.add, insert_call(graph, operator.sub, size, largest), number)
                    cropped = insert_call(graph, aten.slice.Tensor, cropped, axis, 0, end)
            for reader in readers:
                reader.replace_input_with(node, cropped)
    name_outputs(program)


def read_sizes_of_pairs(program: ExportedProgram) -> None:
    """Read sizes of complex numbers, which decompositions ask for, from the pairs that files have, in place."""
    aten, graph = torch.ops.aten, program.graph_module.graph
    for size in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        source, axis = size.args
        if source.meta["val"].is_complex():
            with graph.inserting_before(size):
                pairs = insert_call(graph, aten.view_as_real.default, source)
            size.args = (pairs, axis % source.meta["val"].dim())
