"""Graph pass that writes GELU and SiLU as ONNX Runtime looks for them (1.32), which then runs one operator for each.

GELU is x (1 + erf(x / sqrt(2))) / 2, or an approximation by tanh; SiLU is x sigmoid(x) (D. Hendrycks and K. Gimpel,
Gaussian Error Linear Units, 2016, section 2). Opset 18 has no operator of either. They have no integer kernel either:
int8 networks compute them in float, between a DequantizeLinear and a QuantizeLinear.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ptpipe_onnx.barriers import insert_barrier
from ptpipe_onnx.graph import constant, first_consumer, nodes, only_consumer, producer

_OPERATORS = ("Add", "Div", "Erf", "Mul", "Pow", "Tanh")


def write_fusable_activations(graph: ir.Graph) -> None:
    """Rewrite the operators of each GELU and SiLU, in place. Its values stay the same to the bit."""
    for gate in nodes(graph, "Erf", "Sigmoid", "Tanh"):
        _halve_input(gate)
        _read_one_tensor(gate)


def _halve_input(gate: ir.Node) -> None:
    """Write x (0.5 (1 + erf(...))), as torch exports it, as (0.5 x) (1 + erf(...)).

    Both are the same product times a power of two, which rounds nothing.
    """
    total = only_consumer(gate.outputs[0], "Add")
    halved = None if total is None else only_consumer(total.outputs[0], "Mul")
    product = None if halved is None else only_consumer(halved.outputs[0], "Mul")
    if total is None or halved is None or product is None or not any(map(_is_half, halved.inputs)):
        return
    x = next((value for value in product.inputs if value is not halved.outputs[0]), None)
    if x is not None and any(x in node.inputs for node in _operators_before([gate])):
        halved.replace_input_with(list(halved.inputs).index(total.outputs[0]), x)
        product.replace_input_with(list(product.inputs).index(x), total.outputs[0])


def _is_half(value: ir.Value | None) -> bool:
    content = constant(value)
    return content is not None and content.size == 1 and content.item() == 0.5


def _read_one_tensor(gate: ir.Node) -> None:
    """Put an optimization barrier behind a DequantizeLinear that is read as x.

    ONNX Runtime gives each reader of a DequantizeLinear one of its own, and then finds no x that is read twice.
    """
    behind, last = list[ir.Node](), gate
    while len(behind) < 3 and (node := only_consumer(last.outputs[0], "Add", "Mul")) is not None:
        last = node
        behind.append(node)
    parts = _operators_before([gate, *behind])
    read = dict.fromkeys(value for node in parts for value in node.inputs if value is not None)
    for dequantize in [node for value in read if (node := producer(value, "DequantizeLinear")) is not None]:
        x = dequantize.outputs[0]
        readers = [(node, index) for node, index in x.uses() if node in parts]
        if len(readers) > 1:
            behind_barrier = insert_barrier(dequantize, first_consumer(x))
            for node, index in readers:
                node.replace_input_with(index, behind_barrier)


def _operators_before(last: Sequence[ir.Node]) -> list[ir.Node]:
    """Return these nodes and those in front of them, up to operators that no GELU or SiLU consists of."""
    found = list(last)
    for node in found:  # grows
        before = (producer(value, *_OPERATORS) for value in node.inputs)
        found += [other for other in dict.fromkeys(before) if other is not None and other not in found]
    return found
