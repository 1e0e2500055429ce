"""Graph passes before ONNX Runtime's quantizer: operators that a file spells out, written as one, or left float.

The quantizer rounds what each operator returns. Of what a HardSwish, a GELU or a layer norm consists of, that costs
accuracy and time, as each part runs on its own: in float a runtime makes one kernel of them.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import ModelProto, version_converter
from onnx_ir.passes import common

from ptpipe_onnx.branches import merge_branches
from ptpipe_onnx.graph import (
    bias_of,
    constant,
    nodes,
    only_consumer,
    other_input,
    producer,
    remove_unused,
    replace,
    set_parameter,
    source,
)

_OPSET = 18
"""That the rules of onnxscript are written for."""
_GATES = ("Erf", "Tanh")
_PARTS = ("Add", "Div", "Mul", "Pow")
"""Operators that a GELU consists of beside its gate."""
_STATISTICS = ("Add", "Div", "Expand", "Max", "Mul", "Pow", "ReduceMean", "ReduceSum", "Reshape", "Sub")
"""Operators that means and variances consist of."""
_MAX_PARTS = 6
"""In front of a gate."""


def write_whole_operators(content: ModelProto) -> ModelProto:
    """Return a file of one operator for each HardSwish, layer norm and convolution of several branches.

    Scalars around convolutions are part of them.
    """
    own = max((of.version for of in content.opset_import if of.domain in ("", "ai.onnx")), default=_OPSET)
    if own < _OPSET:
        content = version_converter.convert_version(content, _OPSET)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(content))
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _apply_rules(model)
    _fold_scalars(model.graph)
    merge_branches(model.graph)
    remove_unused(model)
    content = onnx.shape_inference.infer_shapes(ir.to_proto(model))
    stored = {tensor.name for tensor in content.graph.initializer}
    kept = [value for value in content.graph.value_info if value.name not in stored]  # whose shape may change
    del content.graph.value_info[:]
    content.graph.value_info.extend(kept)
    return content


def _apply_rules(model: ir.Model) -> None:
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.common import fuse_hardswish_rules
    from onnxscript.rewriter.rules.fusion._layer_norm import layer_normalization_rules

    for rules in (list(fuse_hardswish_rules()), layer_normalization_rules):
        rewriter.RewritePass(rules)(model)


def _fold_scalars(graph: ir.Graph) -> None:
    """Fold products with numbers, and additions of numbers, into the convolution in front of them.

    Learned scales and shifts of a whole tensor, as in PP-LCNet, which ONNX Runtime folds only if they have four axes.
    """
    for convolution in nodes(graph, "Conv"):
        while (behind := only_consumer(convolution.outputs[0], "Mul", "Add")) is not None:
            number = constant(other_input(behind, convolution.outputs[0]))
            weight, bias_O = constant(convolution.inputs[1]), bias_of(convolution)
            if number is None or weight is None or bias_O is None or number.size != 1 or number.ndim > weight.ndim:
                break
            if behind.op_type == "Mul":
                set_parameter(convolution, 2, bias_O * number.reshape(()))  # while the weight has its name
                set_parameter(convolution, 1, weight * number.reshape(()))
            else:
                set_parameter(convolution, 2, bias_O + number.reshape(()))
            replace(behind.outputs[0], convolution.outputs[0])
            graph.remove(behind, safe=True)


def float_parts(content: ModelProto) -> list[str]:
    """Return the names of the nodes that GELUs and normalizations consist of, and of additions of a product's bias."""
    graph = ir.from_proto(content).graph
    parts = [part for gate in nodes(graph, *_GATES) for part in _gelu_parts(gate)]
    parts += [part for root in nodes(graph, "Sqrt") for part in _normalization_parts(root)]
    parts += nodes(graph, "LayerNormalization")
    parts += [add for product in nodes(graph, "MatMul") if (add := _bias_behind(product)) is not None]
    return [str(node.name) for node in dict.fromkeys(parts)]


def _bias_behind(product: ir.Node) -> ir.Node | None:
    """Return the addition of a constant vector to a product with constant weights."""
    add = only_consumer(product.outputs[0], "Add")
    if add is None or constant(source(product, 1)) is None:
        return None
    bias = constant(other_input(add, product.outputs[0]))
    return add if bias is not None and bias.ndim == 1 else None


def _normalization_parts(root: ir.Node) -> list[ir.Node]:
    """Return the nodes that compute a deviation or a norm, up to the product with what it divides; none for others.

    Eight bits leave nothing of squares and their means: a norm of other forms than the rules know is spelled out.
    """
    before, wanted = [root], [source(root)]
    while wanted:
        node = producer(wanted.pop(), *_STATISTICS)
        if node is not None and node not in before:
            before.append(node)
            is_square = node.op_type == "Pow" or (node.op_type == "Mul" and len(set(node.inputs)) == 1)
            wanted += [] if is_square else [value for value in node.inputs if value is not None]
    if not any(node.op_type.startswith("Reduce") for node in before):
        return []
    behind = [root]
    while (node := only_consumer(behind[-1].outputs[0], "Reciprocal", "Mul", "Div")) is not None:
        behind.append(node)
        if len(node.inputs) == 2 and _only_variable(node) is None:
            break
    return [*before, *behind[1:]]


def _gelu_parts(gate: ir.Node) -> list[ir.Node]:
    """Return the nodes of the GELU that a node is the Erf or Tanh of; none if it is of something else.

    x (1 + erf(x / sqrt(2))) / 2, or x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, halved in any place.
    """
    total = only_consumer(gate.outputs[0], "Add")
    if total is None:
        return []
    behind, halves, operands = [total], list[ir.Node](), list[ir.Value]()
    while len(behind) < 3 and (product := only_consumer(behind[-1].outputs[0], "Mul")) is not None:
        other = other_input(product, behind[-1].outputs[0])
        behind.append(product)
        operands += [other] if constant(other) is None else []
        half = producer(other, "Mul", "Div")
        if half is not None and (halved := _only_variable(half)) is not None:
            halves.append(half)
            operands.append(halved)
    for x in operands:
        if (before := _parts_before(gate, x)) is not None:
            return [*before, gate, *behind, *(half for half in halves if x in half.inputs)]
    return []


def _parts_before(gate: ir.Node, x: ir.Value) -> list[ir.Node] | None:
    """Return the nodes that compute a gate's input from x alone; None if it depends on anything else."""
    parts, wanted = list[ir.Node](), list(gate.inputs)
    while wanted:
        value = wanted.pop()
        if value is x or constant(value) is not None:
            continue
        node = producer(value, *_PARTS)
        if node is None or len(parts) == _MAX_PARTS:
            return None
        parts.append(node)
        wanted += node.inputs
    return parts


def _only_variable(node: ir.Node) -> ir.Value | None:
    """Return the input of a node that is not constant, if all others are."""
    variables = [value for value in node.inputs if value is not None and constant(value) is None]
    return variables[0] if len(variables) == 1 < len(node.inputs) else None
