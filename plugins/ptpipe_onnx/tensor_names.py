"""Names of tensors: a file's integers have the names of the reference network's quantize nodes.

The comparison layer by layer finds a file's tensors by these names. A name alone proves nothing: a tensor under a
wrong one differs from what the reference network computes, and the file is refused.
"""

from __future__ import annotations

import onnx_ir as ir
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe import StageError
from ptpipe_onnx.graph import nodes, source
from ptpipe_onnx.grid import Grid
from ptpipe_torch.int8.layer_parity import quantize_nodes


def name_quantized_tensors(model: ir.Model, reference: GraphModule) -> None:
    """Name the output of each QuantizeLinear after its quantize node, in place; exporting keeps their order.

    Raises StageError if the exporter added or dropped any.
    """
    quantizes, written = quantize_nodes(reference), nodes(model.graph, "QuantizeLinear")
    if [grid_of(node) for node in quantizes] != [Grid.of(node) for node in written]:
        raise StageError(
            f"the exporter wrote {len(written)} QuantizeLinear for {len(quantizes)} int8 tensors, or others: this "
            "network's int8 form can't be exported"
        )
    for node, quantize in zip(written, quantizes, strict=True):
        node.outputs[0].name = quantize.name


def name_transposed_weights(graph: ir.Graph) -> None:
    """Name the transposes of weights after these, in place: they are stored, and layers are called by their weights."""
    named: set[str] = set()
    for node in nodes(graph, "Transpose"):
        weight = source(node)
        if weight.is_initializer() and weight.name not in named and not node.outputs[0].is_graph_output():
            named.add(str(weight.name))
            node.outputs[0].name = f"{weight.name}.transposed"


def grid_of(quantize: Node) -> Grid:
    """Return scale, zero point and type of a quantize node of a reference network."""
    _, scale, zero_point, _, _, dtype = quantize.args
    return Grid.from_torch(scale, zero_point, dtype)


def fused_layer_names(reference: GraphModule) -> dict[str, str]:
    """Return the names of layers that are fused with what follows, by those of their first parts: `conv.0`: `conv`."""
    calls = reference.graph.find_nodes(op="call_module")
    targets = (str(node.target) for node in calls)
    return {f"{name}.0": name for name in targets if isinstance(reference.get_submodule(name), nn.Sequential)}


def quantize_node_name(value: ir.Value) -> str:
    """Return the name of the quantize node that a file's tensor of integers belongs to.

    Tensors on the way to one (before its clip, say) have its name and a suffix behind a dot.
    """
    return str(value.name).partition(".")[0]
