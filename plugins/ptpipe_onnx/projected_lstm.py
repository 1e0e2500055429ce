"""An LSTM whose hidden state is projected (H. Sak et al., arXiv 1402.1128), as a Scan: ONNX's LSTM has no projection.

One of 512 features, projected to 128, takes half the time of ONNX's LSTM with the product of projection and recurrence
as its recurrence, and one of 1024 a fifth (ONNX Runtime 1.32, 100 steps, one thread). That has more weights, too.

Shape legend: L steps, B samples, I inputs, S features of the cell, P of the projected state, G rows of all gates: 4 S.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir


def translated(  # noqa: PLR0913  # those of the operator
    x: Any, weight: Any, recurrence: Any, bias: Any, projection: Any, hidden: Any, cell: Any, reverse: bool
) -> Any:
    """Return what the exporter makes of the operator: its steps, and the last states."""
    from onnxscript import opset18 as op

    first = op.Constant(value_ints=[0])
    num_projected, num_features = projection.shape
    of_x, of_hidden = op.Split(op.Squeeze(bias, first), axis=0, num_outputs=2)
    gates_LBG = op.Add(op.MatMul(x, _transposed(weight)), op.Add(of_x, of_hidden))
    if hidden is None:
        num_samples = op.Shape(x, start=1, end=2)
        initial = [
            op.ConstantOfShape(op.Concat(num_samples, op.Constant(value_ints=[size]), axis=0))
            for size in (num_projected, num_features)
        ]
    else:
        initial = [op.Squeeze(state, first) for state in (hidden, cell)]
    weights = _transposed(recurrence), op.Transpose(projection, perm=[1, 0])
    directions = {"scan_input_directions": [int(reverse)], "scan_output_directions": [int(reverse)]}
    body = _step(weights, num_features, num_projected)
    scan: ir.Node = op.Scan(*initial, gates_LBG, body=body, num_scan_inputs=1, **directions).producer()
    scan.resize_outputs(3)  # torch's exporter knows of one
    last_BP, cell_BS, y_LBP = scan.outputs
    return y_LBP, op.Unsqueeze(last_BP, first), op.Unsqueeze(cell_BS, first)


def _transposed(weight: Any) -> Any:
    from onnxscript import opset18 as op

    return op.Transpose(op.Squeeze(weight, op.Constant(value_ints=[0])), perm=[1, 0])


def _step(weights: tuple[Any, Any], num_features: int, num_projected: int) -> ir.Graph:
    """Return the graph of one step: of both states, and of the gates' product with the input, in the order i, o, f, c.

    `weights`: values of the graph around it, by which states are multiplied from the right.
    """
    recurrence_PG, projection_SP = weights
    tape = ir.tape.Tape()

    def value(name: str, width: int) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape([None, width]), type=ir.TensorType(ir.DataType.FLOAT))

    def sizes(*numbers: int) -> ir.Value:
        return tape.op("Constant", [], {"value_ints": numbers})

    states = hidden_BP, cell_BS = value("hidden", num_projected), value("cell", num_features)
    x_BG = value("gates", 4 * num_features)
    gates_BG = tape.op("Add", [x_BG, tape.op("MatMul", [hidden_BP, recurrence_PG])])
    between, new = tape.op_multi_out(
        "Split", [gates_BG, sizes(3 * num_features, num_features)], {"axis": 1}, num_outputs=2
    )
    parts = [tape.op("Sigmoid", [between]), sizes(*[num_features] * 3)]
    into, shown, kept = tape.op_multi_out("Split", parts, {"axis": 1}, num_outputs=3)
    new = tape.op("Mul", [into, tape.op("Tanh", [new])])
    after_BS = tape.op("Add", [tape.op("Mul", [kept, cell_BS]), new])
    after_BP = tape.op("MatMul", [tape.op("Mul", [shown, tape.op("Tanh", [after_BS])]), projection_SP])
    outputs = [after_BP, after_BS, tape.op("Identity", [after_BP])]
    for output, state in zip(outputs, (*states, hidden_BP), strict=True):
        output.shape, output.type = state.shape, state.type
    return ir.Graph([*states, x_BG], outputs, nodes=tape.nodes, name="step")
