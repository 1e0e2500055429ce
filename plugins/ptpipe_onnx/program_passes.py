"""Passes over an exported program: what torch's ONNX exporter translates wrongly or not at all, written otherwise."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import Node

from ptpipe_torch.torch_export import insert_call


def write_translatable(program: ExportedProgram) -> None:
    """Write what the exporter can't translate in other forms, in place."""
    _copy_repeated_outputs(program)
    _give_attention_heads(program)
    _subtract_from_floats(program)
    _write_global_averages_out(program)
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
            spec.arg = TensorArgument(name=values[index].name)
    end.args = (tuple(values),)


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
