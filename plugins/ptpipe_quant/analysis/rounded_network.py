"""A calibrated network in which the rounding of every weight and every activation can be switched on and off.

It is the reference network of the int8 one (`ptpipe_torch.int8.fx.reference_network`): what is rounded there, is here.
With everything off it is the float network, batch norms folded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe_quant.repaired import float_tensor
from ptpipe_torch.int8.decomposed import DEQUANTIZE, QUANTIZE
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.int8.layer_parity import layer_name, quantize_nodes, source_nodes
from ptpipe_torch.int8.layers import QuantizedWeight, folded_weight, fused_relu, int8_weight, quantized_weight
from ptpipe_torch.int8.observers import fixed_grid
from ptpipe_torch.int8.output_scales import fold_output_scales

Values = Mapping[Node, Any]
"""What each node of the graph computed."""


@dataclass(frozen=True, eq=False)
class RoundedWeight:
    """A parameter of the network: as it was, and rounded."""

    module: nn.Module
    """What has it."""
    parameter: str
    before: torch.Tensor
    quantized: QuantizedWeight | None
    """None: a bias that is corrected with the layer's rounding."""
    after: torch.Tensor
    is_learned: bool = False
    """Whether it may be rounded to either of the two integers beside it, not to the nearest alone."""

    def use(self, *, rounded: bool) -> None:
        """Put one of the two into the network."""
        value = self.after if rounded else self.before
        setattr(self.module, self.parameter, nn.Parameter(value, requires_grad=False))


@dataclass(eq=False)
class RoundedLayer:
    """A layer or operator, with what is rounded of it."""

    name: str
    """The path of a module, or a function and the module that calls it."""
    node: Node
    weights: list[RoundedWeight] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    """The nodes that round its output: one, or one for each grid."""
    passed_on: list[Node] = field(default_factory=list)
    """Nodes that find it rounded already, behind a reshape or a maximum."""


@dataclass(frozen=True)
class Rounding:
    """What to round: weights of these layers, and outputs of those."""

    weights_of: Sequence[RoundedLayer] = ()
    outputs_of: Sequence[RoundedLayer] = ()


class RoundedNetwork:
    """See the module."""

    def __init__(
        self, graph: GraphModule, layers: Sequence[RoundedLayer], fixed_grids: Collection[tuple[float, int]]
    ) -> None:
        self.graph = graph
        self.layers = layers
        self.fixed_grids = fixed_grids
        """Scale and zero point of each grid that does not come from data."""

    @classmethod
    def of(cls, prepared: GraphModule, stored: Collection[str]) -> RoundedNetwork:
        """Return the network of a prepared one with final ranges, which is consumed.

        `stored`: layers without int8 kernels, whose weights `quant.convert` rounds. The engine must be selected.
        """
        with torch.no_grad():
            fold_output_scales(prepared)
            before = {
                name: (_float_weight(layer).detach().clone(), float_tensor(layer, "weight") is not None)
                for name, layer in prepared.named_modules()
                if _has_float_weight(layer)
            }
            biases = {
                name: bias
                for name, layer in prepared.named_modules()
                if (bias := float_tensor(layer, "bias")) is not None
            }
            fixed_grids = {grid for layer in prepared.modules() if (grid := fixed_grid(layer)) is not None}
            graph, quantized = reference_network(prepared)
            weights = list(_int8_weights(graph, quantized, before))
            weights += _corrected_biases(graph, biases)
            weights += _stored_weights(graph, stored)
            return cls(graph, _layers(graph, weights), fixed_grids)

    def merge_passed_on(self, inputs: Sequence[torch.Tensor]) -> None:
        """Count operators that change no value, a reshape or a maximum, to the layer in front of them.

        They are those whose output has the grid of their input, and lies on it, for these inputs.
        """
        self._use_rounded([weight for layer in self.layers for weight in layer.weights])
        nodes = {node for layer in self.layers for node in layer.outputs}
        run = _Run(self.graph, nodes, garbage_collect_values=False)
        run.run(*inputs)
        owners = {node: layer for layer in self.layers for node in layer.outputs}
        kept = []
        for layer in self.layers:
            sources = [_source_on_same_grid(node) for node in layer.outputs]
            source = sources[0] if len(sources) == 1 and not layer.weights else None
            (output, *_) = layer.outputs or [layer.node]
            if source is None or not _is_on_grid(output, run.env):
                kept.append(layer)
                continue
            owners[output] = owners[source]
            owners[source].passed_on.append(output)
        self.layers = kept

    def run_float(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, Values]:
        """Run without rounding; return the output, and what each node computed."""
        self._use_rounded(())
        run = _Run(self.graph, (), garbage_collect_values=False)
        returned = run.run(*inputs)
        return returned, run.env

    def run_rounded(self, rounding: Rounding, values: Values) -> Any:
        """Run with this rounding; `values` are those of `run_float`, of which all is used that stays as it is."""
        rounded = [weight for layer in rounding.weights_of for weight in layer.weights]
        outputs = {node for layer in rounding.outputs_of for node in (*layer.outputs, *layer.passed_on)}
        self._use_rounded(rounded)
        changed = {layer.node for layer in rounding.weights_of if layer.weights} | outputs
        for node in self.graph.graph.nodes:
            if node.op == "output" or any(source in changed for source in node.all_input_nodes):
                changed.add(node)
        kept = {node: value for node, value in values.items() if node not in changed}
        return _Run(self.graph, outputs).run(initial_env=kept)

    def _use_rounded(self, weights: Collection[RoundedWeight]) -> None:
        for layer in self.layers:
            for weight in layer.weights:
                weight.use(rounded=weight in weights)


class _Run(Interpreter):
    """Runs the network with some tensors rounded; all other quantize and dequantize nodes pass theirs on."""

    def __init__(self, graph: GraphModule, rounded: Collection[Node], **options: Any) -> None:
        super().__init__(graph, **options)
        self._rounded = rounded

    def run_node(self, n: Node) -> Any:
        is_passed = n.target is QUANTIZE and n not in self._rounded
        if is_passed or (n.target is DEQUANTIZE and n.all_input_nodes[0] not in self._rounded):
            return self.env[n.all_input_nodes[0]]
        return super().run_node(n)


def _has_float_weight(layer: nn.Module) -> bool:
    return fused_relu(layer) is not None or isinstance(getattr(layer, "weight", None), torch.Tensor)


def _float_weight(layer: Any) -> torch.Tensor:
    if (before := float_tensor(layer, "weight")) is not None:
        return before
    weight: torch.Tensor = layer.weight if fused_relu(layer) is None else folded_weight(layer)
    return weight


def _int8_weights(
    graph: GraphModule, quantized: Mapping[str, QuantizedWeight], before: Mapping[str, tuple[torch.Tensor, bool]]
) -> Iterator[RoundedWeight]:
    """`before`: the float weights, and whether their rounding was learned."""
    for name, weight in quantized.items():
        path, _, parameter = name.rpartition(".")
        # A layer that is fused with ReLU is a part of its own in the reference network, but not in that for QAT.
        found, is_learned = before[path] if path in before else before[path.rpartition(".")[0]]
        module = graph.get_submodule(path)
        yield RoundedWeight(module, parameter, found, weight, torch.from_numpy(weight.dequantized()), is_learned)


def _corrected_biases(graph: GraphModule, before: Mapping[str, torch.Tensor]) -> Iterator[RoundedWeight]:
    for path, bias in before.items():
        module: Any = graph.get_submodule(path)
        yield RoundedWeight(module, "bias", bias, None, module.bias.detach().clone())


def _stored_weights(graph: GraphModule, names: Collection[str]) -> Iterator[RoundedWeight]:
    """Yield the weights of tables and recurrent layers, as `layers.round_weights` rounds them."""
    for name in names:
        module: Any = graph.get_submodule(name)
        for parameter, value in list(module._parameters.items()):
            if value is not None and parameter.startswith("weight"):
                before = value.detach().clone()
                rounded = int8_weight(before, per_channel=True, axis=0)
                quantized = quantized_weight(f"{name}.{parameter}", rounded)
                yield RoundedWeight(module, parameter, before, quantized, rounded.dequantize())


def _layers(graph: GraphModule, weights: Sequence[RoundedWeight]) -> list[RoundedLayer]:
    """Return the layers with something rounded, in the order of a forward pass."""
    found: dict[Node, RoundedLayer] = {}
    scopes = graph.meta["scopes"]
    for node in graph.graph.find_nodes(op="call_module"):
        parts = set(graph.get_submodule(str(node.target)).modules())
        own = [weight for weight in weights if weight.module in parts]
        if own:
            name = scopes.get(node.name) or str(node.target)
            found[node] = RoundedLayer(name, node, own)
    for quantize in quantize_nodes(graph):
        node = source_nodes(quantize, graph)[-1]
        layer = found.setdefault(node, RoundedLayer(layer_name(quantize, graph), node))
        layer.outputs.append(quantize)
    position = {node: number for number, node in enumerate(graph.graph.nodes)}
    return sorted(found.values(), key=lambda layer: position[layer.node])


def _source_on_same_grid(quantize: Node) -> Node | None:
    """Return the node that quantizes the only input of the operator whose output is quantized here, on this grid."""
    inputs = quantize.all_input_nodes[0].all_input_nodes
    if len(inputs) != 1 or inputs[0].target is not DEQUANTIZE:
        return None
    source = inputs[0].all_input_nodes[0]
    return source if source.args[1:] == quantize.args[1:] else None


def _is_on_grid(quantize: Node, values: Values) -> bool:
    rounded = DEQUANTIZE(values[quantize], *quantize.args[1:])
    return torch.equal(rounded, values[quantize.all_input_nodes[0]])
