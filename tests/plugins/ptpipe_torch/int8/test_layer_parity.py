"""The comparison of an int8 network with its reference by layers: it finds the faulty layer, and that one alone.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe_torch.int8 import fx
from ptpipe_torch.int8.decomposed import DEQUANTIZE, QUANTIZE
from ptpipe_torch.int8.layer_parity import NEAR_TIE, NetworkDifference, compare_layers, layer_name, quantize_nodes
from ptpipe_torch.int8.observers import static_qconfig

from ....signatures import pictures

IMAGES_NCHW = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """A residual block with a fused add and ReLU, a float softmax behind the last int8 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"first": nn.Conv2d(3, 3, 3, padding=1), "second": nn.Conv2d(3, 3, 3, padding=1)})
        self.relu, self.head = nn.ReLU(), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.block["second"](self.block["first"](x)) + x)
        return torch.softmax(self.head(y.mean([2, 3])), 1)


@pytest.fixture(scope="module")
def reference() -> GraphModule:
    torch.manual_seed(0)
    graph, scopes = fx.trace(Residual().eval(), pictures((3, 8, 8)))
    qconfig = static_qconfig("min_max", per_channel=True)
    mapping = fx.qconfig_mapping("fbgemm", qconfig, qconfig, is_qat=False)
    prepared = fx.add_observers(graph, scopes, mapping, is_qat=False)
    with torch.no_grad():
        prepared(IMAGES_NCHW)
    network, _ = fx.reference_network(prepared)
    return network


class Implementation(Interpreter):
    """The reference network as an implementation to test, with a fault in one quantized tensor."""

    def __init__(self, reference: GraphModule, faulty: str = "", fault: Any = None) -> None:
        super().__init__(reference)
        self.found: dict[str, torch.Tensor] = {}
        self.faulty, self.fault = faulty, fault

    def run_node(self, n: Node) -> Any:
        if n.target is torch.ops.quantized_decomposed.dequantize_per_tensor.default:
            (values, scale, zero_point, *_), _ = self.fetch_args_kwargs_from_env(n)
            return (values.float() - zero_point) * scale
        result = super().run_node(n)
        if n in quantize_nodes(self.module):
            if layer_name(n, self.module) == self.faulty:
                result = self.fault(result)
            self.found[n.name] = result
        return result


def compare(reference: GraphModule, faulty: str = "", fault: Any = None) -> NetworkDifference:
    tested = Implementation(reference, faulty, fault)
    with torch.no_grad():
        output = tested.run(IMAGES_NCHW)
    return compare_layers(reference, [IMAGES_NCHW], tested.found, [output])


def test_an_equal_implementation_has_no_difference(reference) -> None:
    difference = compare(reference)
    layers = ["the input x", "block.first", "block.second", "add", "mean", "head"]
    assert [layer.layer for layer in difference.layers] == layers
    assert {(layer.max_steps, layer.fraction) for layer in difference.layers} == {(0, 0)}
    assert (difference.missing, difference.output) == ([], 0)


@pytest.mark.parametrize("layer", ["the input x", "block.first", "block.second", "add", "head"])
@pytest.mark.parametrize(("fault", "steps"), [(lambda q: q.flip(0), 3), (lambda q: q - (q > 99) * 5, 4.9)])
def test_a_fault_is_found_in_its_layer_alone(reference, layer, fault, steps) -> None:
    difference = compare(reference, layer, fault)
    assert [found.layer for found in difference.layers if found.max_steps > 0] == [layer]
    assert difference.worst is not None
    assert difference.worst.layer == layer
    assert difference.worst.max_steps >= steps


@pytest.mark.parametrize(("distance", "counts"), [(0.5 * NEAR_TIE, False), (1.5 * NEAR_TIE, True)])
def test_values_rounded_to_the_other_side_of_a_tie_are_no_fraction(distance: float, counts: bool) -> None:
    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grid = (1.0, 3, 0, 255, torch.uint8)
            return DEQUANTIZE(QUANTIZE(2 * x, *grid), *grid)

    reference = torch.fx.symbolic_trace(Doubling())
    (quantize,) = quantize_nodes(reference)
    values = torch.tensor([[4.5 + distance, -2.5 - distance]])  # rounded to 5 and -3; the other side is 4 and -2
    found = torch.tensor([[7, 1]], dtype=torch.uint8)
    (layer,) = compare_layers(reference, [values / 2], {quantize.name: found}, [found.float() - 3]).layers
    assert (layer.max_steps, layer.fraction) == (1, 1.0 if counts else 0.0)


def test_a_tensor_on_another_grid_is_compared_in_steps(reference) -> None:
    difference = compare(reference, "block.first", lambda q: torch.clamp(q.float() + 0.25, 0, 300))
    first = difference.layers[1]
    assert (first.max_steps, first.fraction) == (0.25, 0)


def test_tensors_that_were_not_found_and_other_shapes(reference) -> None:
    tested = Implementation(reference)
    output = tested.run(IMAGES_NCHW)
    name = next(node.name for node in quantize_nodes(reference) if layer_name(node, reference) == "add")
    missing = {key: value for key, value in tested.found.items() if key != name}
    assert compare_layers(reference, [IMAGES_NCHW], missing, [output]).missing == ["add"]
    cut = tested.found | {name: tested.found[name][:, :2]}
    layers = compare_layers(reference, [IMAGES_NCHW], cut, [output]).layers
    assert [(layer.layer, layer.max_steps) for layer in layers if layer.max_steps > 0] == [("add", float("inf"))]


def test_the_output_is_compared_too(reference) -> None:
    tested = Implementation(reference)
    output = tested.run(IMAGES_NCHW)
    wrong = compare_layers(reference, [IMAGES_NCHW], tested.found, [output * 1.01])
    assert wrong.output == pytest.approx(0.01, rel=1e-3)
    assert compare_layers(reference, [IMAGES_NCHW], tested.found, [output[:1]]).output == float("inf")
