"""Run a float network and its quantized form layer by layer on the same samples, and change a layer before it runs.

All batches pass one node before any passes the next, so that the input of each quantized layer is what the repaired
layers before it return, at the cost of two forward passes in all. What is alive of all batches is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe import Context, StageError
from ptpipe_quant.int8_graph import drop_redundant_clamps
from ptpipe_quant.repaired import undo_repairs
from ptpipe_quant.stages import calibrated_network
from ptpipe_torch import Model
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.int8.layers import QuantizedWeight
from ptpipe_torch.int8.observers import observer_at
from ptpipe_torch.model.example_inputs import copies

_STATIC = "prepare_static"


@dataclass(frozen=True)
class LayerPair:
    """A layer of the float network and its quantized form, which computes in float with rounded weights."""

    name: str
    """In the prepared network."""
    user_name: str
    """In the user's network."""
    float_layer: Any
    quantized_layer: Any
    relu: bool
    """Whether ReLU is fused with the layer."""
    weight: QuantizedWeight
    float_inputs: Sequence[torch.Tensor]
    """One for each batch."""
    quantized_inputs: Sequence[torch.Tensor]


class QuantizedPair:
    """A calibrated model as two networks: `float_network`, nothing rounded, and `quantized`, the int8 arithmetic.

    Raises StageError for a model that is not from quant.prepare and quant.calibrate, or whose biases are corrected.
    """

    def __init__(self, ctx: Context, model: Model) -> None:
        _check_calibrated(ctx, model)
        self.float_network = calibrated_network(model, ctx.kind)
        rounded = deepcopy(self.float_network)
        drop_redundant_clamps(rounded)  # as conversion does
        self.quantized, self.weights = reference_network(rounded)
        undo_repairs(self.float_network)

    def layers(self, batches: Sequence[Sequence[torch.Tensor]]) -> Iterator[LayerPair]:
        """Yield each int8 layer in the order of a forward pass, before it runs; the caller may change it."""
        names = [name.removesuffix(".weight") for name in self.weights]
        float_calls = _calls(self.float_network, names, batches)
        quantized_calls = _calls(self.quantized, names, batches)
        for one, other in zip(float_calls, quantized_calls, strict=True):
            assert one.name == other.name, (one.name, other.name)
            yield LayerPair(
                name=one.name,
                user_name=one.target,
                float_layer=self.float_network.get_submodule(one.name),
                quantized_layer=self.quantized.get_submodule(one.name),
                relu=one.name != one.target
                and any(map(_is_relu, self.float_network.get_submodule(one.target).children())),
                weight=self.weights[f"{one.name}.weight"],
                float_inputs=one.inputs,
                quantized_inputs=other.inputs,
            )


@dataclass(frozen=True)
class _Call:
    name: str
    target: str
    inputs: Sequence[torch.Tensor]


def _calls(network: GraphModule, names: Sequence[str], batches: Sequence[Sequence[torch.Tensor]]) -> Iterator[_Call]:
    runs = [BatchRun(network, inputs) for inputs in batches]
    for node in network.graph.nodes:
        target = str(node.target) if node.op == "call_module" else None
        name = next((name for name in (target, f"{target}.0") if name in names), None)
        if name is not None and target is not None:
            yield _Call(name, target, [run.first_input(node) for run in runs])
        for run in runs:
            run.step(node)


class BatchRun(Interpreter):
    """One batch's way through a graph, past its observers."""

    def __init__(self, network: GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__(network)
        self._network = network
        self.args_iter = iter(copies(inputs))

    def first_input(self, node: Node) -> torch.Tensor:
        """Return what a node takes, before it has run."""
        value: torch.Tensor = self.fetch_args_kwargs_from_env(node)[0][0]
        return value

    def step(self, node: Node) -> None:
        """Run the next node, and free what no other one needs."""
        if observer_at(self._network, node) is not None:
            self.env[node] = self.first_input(node)
        else:
            self.env[node] = self.run_node(node)
        for last in self.user_to_last_uses.get(node, []):
            del self.env[last]


def _is_relu(layer: nn.Module) -> bool:
    return type(layer) is nn.ReLU


def _check_calibrated(ctx: Context, model: Model) -> None:
    references = model.recipe.prepare
    is_static = bool(references) and references[-1].address.endswith(f":{_STATIC}")
    if model.recipe.convert or not is_static:
        form = "int8" if model.recipe.convert else "from quant.prepare_qat" if model.recipe.backend else "float"
        raise StageError(
            f"{ctx.kind} got a model that is {form}; it needs one from quant.prepare and quant.calibrate: put it "
            "between quant.calibrate and quant.convert"
        )
    if references[-1].arguments.get("corrected_biases"):
        raise StageError(
            f"{ctx.kind} got a model whose biases quant.bias_correct has already fitted to its rounded weights; "
            "quant.bias_correct is the last repair in front of quant.convert, and runs once"
        )
