"""Names of quantized tensors: a file's integers have the names of the reference network's quantize nodes.

The comparison layer by layer finds a file's tensors by these names. A name alone proves nothing: a tensor under a
wrong one differs from what the reference network computes, and the file is refused.
"""

from __future__ import annotations

import onnx_ir as ir
from torch.fx import GraphModule, Node

from ptpipe import StageError
from ptpipe_onnx.graph import nodes
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


def grid_of(quantize: Node) -> Grid:
    """Return scale, zero point and type of a quantize node of a reference network."""
    _, scale, zero_point, _, _, dtype = quantize.args
    return Grid.from_torch(scale, zero_point, dtype)


def quantize_node_name(value: ir.Value) -> str:
    """Return the name of the quantize node that a file's tensor of integers belongs to.

    Tensors on the way to one (before its clip, say) have its name and a suffix behind a dot.
    """
    return str(value.name).partition(".")[0]
