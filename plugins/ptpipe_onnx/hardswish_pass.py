"""Graph pass that writes HardSwish of integers as a product of integers, for which ONNX Runtime (1.32) has a kernel.

HardSwish is x times relu6(x + 3) / 6. Where 3 is a whole number of steps n on the grid of x, as `ptpipe_torch` arranges
it, the second factor is the integer of x, clipped to n steps on both sides of zero, on a grid of a sixth of the step
whose zero point is n smaller. ONNX Runtime has no integer kernel of HardSwish, and makes four passes in float.
Figures: decision 0049.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import add_initializer, constant, insert_node, nodes, only_consumer, producer, source
from ptpipe_onnx.graph import replace as replace_value
from ptpipe_onnx.grid import Grid
from ptpipe_torch.int8.hardswish_grids import BEND

_SUFFIX = ".gate"
_TOLERANCE = 1e-5
"""Of the number of steps: a scale is stored in float32, and may have been computed from a range."""


def use_integer_hardswish(graph: ir.Graph) -> None:
    """Apply the pass, in place, between DequantizeLinear and QuantizeLinear."""
    for hardswish in nodes(graph, "HardSwish"):
        if only_consumer(hardswish.outputs[0], "QuantizeLinear") is None:
            continue
        dequantize = producer(hardswish.inputs[0], "DequantizeLinear")
        grid = None if dequantize is None else Grid.of(dequantize)
        gate = None if grid is None else GateGrid.of(grid)
        if dequantize is not None and gate is not None:
            gate.multiply(dequantize, hardswish)


def use_float_hardswish(graph: ir.Graph) -> bool:
    """Undo the pass, in place; return whether there was anything. For runtimes that fuse HardSwish with a layer."""
    products = [product for product in nodes(graph, "Mul") if is_gate(producer(product.inputs[1], "DequantizeLinear"))]
    for product in products:
        hardswish = insert_node(product, "HardSwish", [source(product)])
        replace_value(product.outputs[0], hardswish.outputs[0])
        graph.remove(product, safe=True)
    return bool(products)


def is_gate(dequantize: ir.Node | None) -> bool:
    """Return whether a DequantizeLinear reads the second factor of a HardSwish."""
    return dequantize is not None and str(source(dequantize).name).endswith(_SUFFIX)


@dataclass(frozen=True)
class GateGrid:
    """The second factor of a HardSwish."""

    grid: Grid
    limits: tuple[int, int]
    """Of the integers of x."""

    @classmethod
    def of(cls, grid: Grid) -> Self | None:
        """Return that of x on this grid; None if it has none."""
        steps = BEND / float(grid.scale)
        num_steps, (lowest, highest) = round(steps), grid.limits
        zero_point = grid.zero_point - num_steps
        if abs(steps - num_steps) > _TOLERANCE * steps or zero_point < lowest:
            return None
        gate = replace(grid, scale=np.float32(grid.scale / (2 * BEND)), zero_point=zero_point)
        return cls(gate, (zero_point, min(grid.zero_point + num_steps, highest)))

    def multiply(self, dequantize: ir.Node, hardswish: ir.Node) -> None:
        """Replace a HardSwish of `dequantize` by the product."""
        graph, integers = hardswish.graph, source(dequantize)
        assert graph is not None
        low, high, zero_point = (
            add_initializer(graph, f"{integers.name}.{name}", np.array(number, self.grid.dtype))
            for name, number in zip(("low", "high", "zero_point"), (*self.limits, self.grid.zero_point), strict=True)
        )
        scale = add_initializer(graph, f"{integers.name}.scale", np.array(self.grid.scale))
        clipped = insert_node(hardswish, "Clip", [integers, low, high]).outputs[0]
        clipped.name = f"{integers.name}{_SUFFIX}"
        factor = insert_node(hardswish, "DequantizeLinear", [clipped, scale, zero_point]).outputs[0]
        product = insert_node(hardswish, "Mul", [dequantize.outputs[0], factor])
        replace_value(hardswish.outputs[0], product.outputs[0])
        graph.remove(hardswish, safe=True)

    def is_written_by(self, dequantize: ir.Node) -> bool:
        """Return whether a file computes this factor at `dequantize`."""
        clip = producer(dequantize.inputs[0], "Clip")
        bounds = [] if clip is None else [constant(value) for value in clip.inputs[1:]]
        return Grid.of(dequantize) == self.grid and bounds == list(self.limits)
