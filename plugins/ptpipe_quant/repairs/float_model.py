"""What the repairs of a float model have in common: trace it, write changed tensors back, prove that it is the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import Context, StageError
from ptpipe_quant.prepared_parity import TOLERANCE, Expected, relative_difference
from ptpipe_quant.trace import float_names, trace_network
from ptpipe_torch import Model
from ptpipe_torch.model.example_inputs import copies
from ptpipe_torch.model.outputs import tensors_of


def check_float(model: Model, kind: str) -> None:
    """Raise StageError for a model that is prepared or int8."""
    if model.recipe.convert or model.recipe.backend is not None:
        form = "int8" if model.recipe.convert else "prepared"
        raise StageError(
            f"{kind} got a model that is already {form} for {model.recipe.backend}; it needs a float one: put it in "
            "front of quant.prepare"
        )


def traced(model: Model, skip: Sequence[str]) -> GraphModule:
    """Trace the network of a float model, without the submodules that match `skip`; `nn.MultiheadAttention` stays one.

    Raises StageError with the line that can't be traced.
    """
    network = model.build()
    attention = (name for name, layer in network.named_modules() if isinstance(layer, nn.MultiheadAttention))
    names = dict.fromkeys([*float_names(network, skip), *attention])
    # What is changed here is written back to the float model, which computes such weights itself.
    return trace_network(network, model.signature.inputs, list(names), purpose="repair").graph


def changeable_names(model: Model, skip: Sequence[str]) -> set[str]:
    """Return the names of a model's tensors that belong to no submodule that matches `skip`."""
    left = tuple(f"{name}." for name in float_names(model.build(), skip))
    return {name for name in model.tensors if not name.startswith(left)}


def with_changed(model: Model, graph: GraphModule, names: Iterable[str]) -> Model:
    """Return the model with these tensors of its traced network."""
    network = model.build()
    state, changed = network.state_dict(), graph.state_dict()
    with torch.no_grad():
        for name in names:
            state[name].copy_(changed[name])
    return model.with_state_dict_of(network)


def function_change(ctx: Context, model: Model, repaired: Model) -> float:
    """Return by how much a float model's outputs have changed on example inputs, relative to the largest one.

    In float64 where the network can run in it, so that rounding is not amplified.
    """
    expected = Expected.of(model.build(), model.signature, train=False)
    difference = max(
        map(relative_difference, _outputs(repaired.build(), expected.inputs), expected.eval_outputs), default=0.0
    )
    if difference > TOLERANCE:
        inputs = [value.double() if value.is_floating_point() else value for value in expected.inputs]
        try:
            exact = [_outputs(each.build().double(), inputs) for each in (repaired, model)]
        except Exception:  # noqa: BLE001  # a network may be written for float32 alone
            return difference
        return max(map(relative_difference, *exact), default=0.0)
    return difference


def check_same_function(ctx: Context, model: Model, repaired: Model) -> None:
    """Report by how much the outputs have changed; raise StageError if that is more than rounding."""
    difference = function_change(ctx, model, repaired)
    ctx.metric(output_difference=difference)
    if not difference <= TOLERANCE:
        raise StageError(
            f"{ctx.kind} would change what the network computes: outputs differ by {difference:.2g} of the largest "
            "one. Leave layers that behave differently from what was traced as they are, with skip"
        )


def _outputs(network: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return tensors_of(network(*copies(inputs)))
