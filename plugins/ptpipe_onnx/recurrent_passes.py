"""Graph pass that makes LSTM and GRU layers of a float graph dynamically quantized.

torch quantizes the input of such a layer at run time, over all of its steps, and the hidden state at each step, over
the batch. ONNX Runtime's `DynamicQuantizeLSTM` does the same. It has no such operator for a GRU, whose steps are
therefore a Scan of DynamicQuantizeLinear and MatMulInteger. ONNX's GRU operator in float is faster than that up to some
number of features; such a layer's weights are stored as int8 and computed with in float.

Shape legend: L steps, B samples, I inputs, S features of the state, G rows of all gates: 4 S or 3 S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.dynamic_passes import Operands, add_operands, insert_product
from ptpipe_onnx.graph import (
    add_initializer,
    constant,
    insert_node,
    int_attribute,
    nodes,
    remove_unused,
    replace,
    source,
)
from ptpipe_onnx.recurrent_operators import GATE_ORDERS
from ptpipe_onnx.weights import take_weight
from ptpipe_torch.int8.layers import QuantizedWeight

MIN_GRU_FEATURES = 512
"""From which number of features on the steps of a GRU are faster in integers, in ONNX Runtime 1.32."""
_IS_FASTER = f"ONNX Runtime has no integer GRU, and its float one is faster with less than {MIN_GRU_FEATURES} features"
_LSTM_DOMAIN = "com.microsoft"
_Insert: TypeAlias = Callable[..., ir.Node]


def quantize_recurrent_layers(model: ir.Model, weights: Mapping[str, QuantizedWeight]) -> dict[str, str]:
    """Make the layers of these weights multiply integers, in place; return why others don't, by their first weight.

    `weights`: in torch's order of gates, by the names of the float ones in the graph.
    """
    converters = {"LSTM": _lstm_weight, "GRU": _gru_operands}
    found = {
        node: tuple(str(source(node, index).name) for index in (1, 2))
        for node in nodes(model.graph, *converters)
        if source(node, 1).name in weights
    }
    left_float = [node for node in found if node.op_type == "GRU" and _num_features(node) < MIN_GRU_FEATURES]
    reasons = {found.pop(node)[0]: _IS_FASTER for node in left_float}
    operands: dict[str, Any] = {}
    for node, names in found.items():  # a layer may be called several times
        for name in names:
            if name not in operands:
                take_weight(model.graph, name)
                ordered = _reordered(weights[name], GATE_ORDERS[node.op_type])
                operands[name] = converters[node.op_type](model.graph, name, ordered)
    for node, names in found.items():
        (_replace_lstm if node.op_type == "LSTM" else _replace_gru)(node, *(operands[name] for name in names))
    if any(node.op_type == "LSTM" for node in found):
        model.graph.opset_imports[_LSTM_DOMAIN] = 1
    remove_unused(model)
    return reasons


def _num_features(node: ir.Node) -> int:
    return int_attribute(node, "hidden_size", (0,))[0]


def _reordered(weight: QuantizedWeight, order: tuple[int, ...]) -> QuantizedWeight:
    def moved(values: Any) -> Any:
        parts = np.split(values, len(order))
        return np.concatenate([parts[place] for place in order])

    integers, scales, zero_points = moved(weight.integers), weight.scales, weight.zero_points
    if weight.per_channel:
        scales, zero_points = moved(scales), moved(zero_points)
    return QuantizedWeight(integers, scales, zero_points)


def _lstm_weight(graph: ir.Graph, name: str, weight: QuantizedWeight) -> tuple[ir.Value, ir.Value, ir.Value]:
    shape = (1, -1) if weight.per_channel else (1,)
    return (
        add_initializer(graph, name, weight.integers.T[np.newaxis]),
        add_initializer(graph, f"{name}.scale", weight.scales.reshape(shape)),
        add_initializer(graph, f"{name}.zero_point", weight.zero_points.reshape(shape)),
    )


def _gru_operands(graph: ir.Graph, name: str, weight: QuantizedWeight) -> Operands:
    return add_operands(graph, name, weight.transposed())


def _replace_lstm(node: ir.Node, inputs: tuple[ir.Value, ...], hidden: tuple[ir.Value, ...]) -> None:
    x, _, _, *rest = node.inputs
    rest = [*rest, *[None] * (5 - len(rest))]  # bias, lengths, hidden state, cell state, peepholes
    attributes = {name: node.attributes[name].value for name in ("direction", "hidden_size")}
    operands = [x, inputs[0], hidden[0], *rest, *inputs[1:], *hidden[1:]]
    assert node.graph is not None
    quantized = ir.node("DynamicQuantizeLSTM", operands, attributes, domain=_LSTM_DOMAIN, num_outputs=3)
    node.graph.insert_before(node, quantized)
    for former, output in zip(node.outputs, quantized.outputs, strict=False):
        replace(former, output)


def _replace_gru(node: ir.Node, inputs: Operands, hidden: Operands) -> None:
    """Replace a GRU (`linear_before_reset`: 1) by a product over all steps, and a Scan."""
    insert, graph, size = partial(insert_node, node), node.graph, _num_features(node)
    assert isinstance(graph, ir.Graph)
    x_LBI, biases = source(node), constant(node.inputs[3])
    assert biases is not None, node
    name = str(inputs[0].name).replace(".weight_ih", "")
    of_x, of_hidden = (
        add_initializer(graph, f"{name}.bias_{kind}", bias_G)
        for kind, bias_G in zip(("ih", "hh"), np.split(biases[0], 2), strict=True)
    )
    x_LBG = insert("Add", [insert_product(insert, x_LBI, inputs), of_x]).outputs[0]
    sizes = [_integers(graph, "gate_sizes", each) for each in ([2 * size, size], [size, size])]
    body = _step(size, hidden, of_hidden, sizes)
    backwards = int(node.attributes["direction"].value == "reverse")
    initial_BS = _initial_state(insert, node, graph, size)
    directions = {"scan_input_directions": [backwards], "scan_output_directions": [backwards]}
    scan = insert("Scan", [initial_BS, x_LBG], num_outputs=2, body=body, num_scan_inputs=1, **directions)
    last_BS, y_LBS = scan.outputs
    # The last state is absent where nothing reads it.
    for former, result, axis in zip(node.outputs, (y_LBS, last_BS), (1, 0), strict=False):
        replace(former, insert("Unsqueeze", [result, _integers(graph, "axis", [axis])]).outputs[0])


def _initial_state(insert: _Insert, node: ir.Node, graph: ir.Graph, size: int) -> ir.Value:
    if len(node.inputs) > 5 and node.inputs[5] is not None:
        return insert("Squeeze", [node.inputs[5], _integers(graph, "axis", [0])]).outputs[0]
    num_samples = insert("Shape", [node.inputs[0]], start=1, end=2).outputs[0]
    num_features = _integers(graph, "num_features", [size])
    shape = insert("Concat", [num_samples, num_features], axis=0).outputs[0]
    return insert("ConstantOfShape", [shape]).outputs[0]


def _integers(graph: ir.Graph, name: str, values: Sequence[int]) -> ir.Value:
    return add_initializer(graph, name, np.array(values, np.int64))


def _step(size: int, hidden: Operands, bias: ir.Value, sizes: Sequence[ir.Value]) -> ir.Graph:
    """Return the graph of one step: of the hidden state and the product with the input, gates in the order z, r, h.

    `sizes`: of the first two gates and the third, and of the first two.
    """
    content: list[ir.Node] = []

    def insert(op_type: str, inputs: Any, num_outputs: int = 1, **attributes: Any) -> ir.Node:
        content.append(ir.node(op_type, inputs, attributes, num_outputs=num_outputs))
        return content[-1]

    def computed(op_type: str, *inputs: ir.Value) -> ir.Value:
        return insert(op_type, inputs).outputs[0]

    def split(gates: ir.Value, widths: ir.Value) -> Sequence[ir.Value]:
        return insert("Split", [gates, widths], 2, axis=-1).outputs

    h_BS, x_BG = (
        ir.Value(name=name, shape=ir.Shape([None, width]), type=ir.TensorType(ir.DataType.FLOAT))
        for name, width in (("hidden", size), ("inputs", 3 * size))
    )
    h_BG = computed("Add", insert_product(insert, h_BS, hidden), bias)
    (h_zr, h_n), (x_zr, x_n) = (split(gates, sizes[0]) for gates in (h_BG, x_BG))
    z, r = split(computed("Sigmoid", computed("Add", x_zr, h_zr)), sizes[1])
    new = computed("Tanh", computed("Add", x_n, computed("Mul", r, h_n)))
    after_BS = computed("Add", computed("Mul", computed("Sub", h_BS, new), z), new)
    outputs = [after_BS, computed("Identity", after_BS)]
    for value in outputs:
        value.shape, value.type = h_BS.shape, h_BS.type
    return ir.Graph([h_BS, x_BG], outputs, nodes=content, name="step")
