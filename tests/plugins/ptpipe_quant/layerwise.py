"""Compare an int8 network with the fake-quantized network that it was converted from, layer by layer.

A comparison of the outputs alone can't tell a wrong layer from the roundings of all layers before it, which depend on
the processor's order of summation. So here each int8 layer gets the inputs that the fake-quantized network has at that
place. They are on the grid of the int8 tensor, so quantizing them is exact, and what is left is one layer's rounding:
at most one step of its output.

Shape legend: N images, D inputs of the last layer, K classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from ptpipe_quant.int8_graph import drop_redundant_clamps
from ptpipe_torch import Model
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.int8.observers import is_observer


class _Recorder(Interpreter):
    """Records the output of every node."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n.name] = super().run_node(n)
        return self.values[n.name]


class _LayerByLayer(Interpreter):
    """Runs an int8 graph; every quantized output is compared with, then replaced by, the fake-quantized network's."""

    def __init__(self, converted: GraphModule, prepared: GraphModule, values: dict[str, torch.Tensor]) -> None:
        super().__init__(converted)
        self._prepared, self._values = prepared, values
        self._nodes = {node.name: node for node in prepared.graph.nodes}
        self._sources: dict[Node, Node] = {}  # from a node of the int8 graph to that of the prepared one
        self.steps: dict[str, torch.Tensor] = {}  # difference of each layer in steps of its output

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        source = self._source(n)
        if source is None:
            return result
        self._sources[n] = source
        observer = self._observer(source)
        if observer is None or not isinstance(result, torch.Tensor) or not result.is_quantized:
            return result
        fake_quant: Any = self._prepared.get_submodule(str(observer.target))
        scale, zero_point = fake_quant.scale.item(), int(fake_quant.zero_point.item())
        expected = self._values[observer.name]
        # int8 operators saturate at 255, fake quantization at 127 if the range is reduced.
        found = result.dequantize().clamp(max=(fake_quant.quant_max - zero_point) * scale)
        is_same_grid = (result.q_scale(), result.q_zero_point()) == (scale, zero_point)
        self.steps[n.name] = (found - expected).abs() / scale if is_same_grid else torch.full_like(expected, torch.inf)
        with deprecations_silenced():
            return torch.quantize_per_tensor(expected, scale, zero_point, result.dtype)

    def _source(self, n: Node) -> Node | None:
        if n.name in self._nodes:
            return self._nodes[n.name]
        inputs = [self._sources[node] for node in n.all_input_nodes if node in self._sources]
        if len(inputs) < 2:  # quantize, dequantize: the same tensor as their input
            return inputs[0] if inputs else None
        # Fused functions (add and ReLU) have another name: follow their inputs to the next observed node.
        users = [set((self._observer(node) or node).users) for node in inputs]
        (source,) = set.intersection(*users)
        while self._observer(source) is None:
            (source,) = source.users
        return source

    def _observer(self, source: Node) -> Node | None:
        for user in source.users:
            if user.op == "call_module" and is_observer(self._prepared.get_submodule(str(user.target))):
                return user
        return None


def differences(
    int8: Model, images_NCHW: torch.Tensor, converted: GraphModule | None = None
) -> dict[str, torch.Tensor]:
    """Return the difference of each int8 layer from its fake-quantized form, in steps of its output.

    It is infinite if their outputs have different scales or zero points. `converted`: the int8 network, if it is not
    the model's own.
    """
    with quantized_engine(int8.recipe.backend), torch.no_grad():
        prepared, values = _fake_quantized(int8, images_NCHW)
        comparison = _LayerByLayer(converted or int8.build(), prepared, values)
        comparison.run(images_NCHW)
    return comparison.steps


def output_steps(int8: Model, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the difference of the two networks' logits, and a bound of it, in steps; both of shape (N, K).

    The last layer, whose inputs differ by d, is linear: in float its outputs differ by at most |W| d. Rounding two
    numbers adds up to a step to their difference, and the int8 layer may be a step from its fake-quantized form.
    """
    with quantized_engine(int8.recipe.backend), torch.no_grad():
        prepared, values = _fake_quantized(int8, images_NCHW)
        converted = int8.build()
        own = _Recorder(converted)
        logits_NK = own.run(images_NCHW)
        layers = [node for node in converted.graph.nodes if node.op == "call_module" and node.name in values]
        last = [node for node in layers if has_int8_weights(converted.get_submodule(str(node.target)))][-1]
        layer: Any = converted.get_submodule(str(last.target))
        (twin,) = (node for node in prepared.graph.nodes if node.name == last.name)
        inputs_ND = own.values[last.all_input_nodes[0].name].dequantize()
        difference_ND = (inputs_ND - values[twin.all_input_nodes[0].name]).abs()
        bound_NK = difference_ND @ layer.weight().dequantize().abs().T / layer.scale + 2
        return (logits_NK - values["output"]).abs() / layer.scale, bound_NK


def _fake_quantized(int8: Model, images_NCHW: torch.Tensor) -> tuple[GraphModule, dict[str, torch.Tensor]]:
    prepared = int8.build_prepared()
    assert isinstance(prepared, GraphModule)
    drop_redundant_clamps(prepared)  # as conversion does
    recorder = _Recorder(prepared)
    recorder.run(images_NCHW)
    return prepared, recorder.values
