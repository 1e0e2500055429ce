"""Compare the gradients of a network prepared for training, with nothing rounded, with those of the user's network.

A graph has the operators of a forward pass, and the derivatives of these. What a network does to its gradients besides
(hooks, modes) may be missing, and training would be another one without a word.

Compared are gradients of a random sum of the outputs, for parameters that both networks have with the same values, and
for inputs: their root mean square difference. The rounding of sums in another order makes some 1e-6, a missing part of
a gradient usually more than a half; a tenth is allowed. Gradients of less than a thousandth of the largest one may be
zeros that rounding made (of a bias in front of a batch norm), so that they count as if they were as large. Where more
is found, the same is asked of the user's network in float64, with several roundings of its weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import Context, StageError
from ptpipe_quant.prepared_parity import (
    OWN_ROUNDINGS,
    Inputs,
    evenly_sampled,
    float_forward,
    float_weights,
    in_mode,
    rounded_otherwise,
)
from ptpipe_torch.errors import first_line
from ptpipe_torch.model.example_inputs import copies
from ptpipe_torch.model.outputs import tensors_of

Samples: TypeAlias = Mapping[str, torch.Tensor]

TOLERANCE = 0.1
_FLOOR = 1e-3
_NOT_KEPT = {
    "fx": "Not kept are hooks on gradients and torch.set_grad_enabled (torch.no_grad is)",
    "export": "Not kept are torch.no_grad, hooks on gradients and backward passes of autograd functions (route: fx "
    "keeps the first and the last)",
}
"""What a graph does not have, by `route`."""


@dataclass(frozen=True)
class _Gradients:
    """Some values of each gradient, by the name of its parameter or input, and of the parameters and inputs."""

    gradients: Samples
    leaves: Samples


def check_gradients(
    ctx: Context, prepared: GraphModule, inputs: Inputs, build: Callable[[], nn.Module], *, train: bool, route: str
) -> None:
    """Check that a prepared network, which is left as it was, has the gradients of the one that `build` builds.

    `train`: compare in train mode, else in eval mode, in which a network may switch gradients off. `route`: by which it
    was traced. Raises StageError with the parameter whose gradient differs most, and where there are no gradients.
    """
    compute = functools.partial(_gradients, train=train)
    try:
        with float_weights(prepared):
            found = compute(prepared, inputs)
    except RuntimeError as error:
        raise StageError(f"{ctx.kind}: this network can't be trained: {first_line(error)}") from error
    try:
        expected = compute(build(), inputs)
    except RuntimeError as error:  # of an operator in place, which the graph does not have
        reason = first_line(error).partition(": ")[0]
        ctx.notice(f"gradients are not compared, since only the prepared network can be trained ({reason})")
        return
    differences = _differences(expected, found, may_be_off=not train)
    beyond = {name: difference for name, difference in differences.items() if not difference <= TOLERANCE}
    if beyond:
        for other in rounded_otherwise(build(), inputs, compute):
            own = _differences(expected, replace(other, leaves=expected.leaves), may_be_off=not train)
            beyond = {name: value for name, value in beyond.items() if not value <= OWN_ROUNDINGS * own[name]}
    if beyond:
        raise StageError(_message(ctx.kind, expected, found, beyond, route))
    ctx.metric(gradient_difference=max(differences.values(), default=0.0))


def _gradients(network: nn.Module, inputs: Inputs, *, train: bool) -> _Gradients:
    random = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        given = [value.requires_grad_(value.is_floating_point()) for value in copies(inputs)]
        leaves = dict(network.named_parameters()) | {f"input {number}": value for number, value in enumerate(given)}
        with in_mode(network, train=train):
            outputs = [output for output in tensors_of(float_forward(network)(*copies(given))) if output.requires_grad]
            weights = [torch.randn(output.shape, generator=random) for output in outputs]
            if outputs:
                torch.autograd.backward(outputs, weights)
    gradients = {name: evenly_sampled(leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None}
    network.zero_grad()
    return _Gradients(gradients, {name: evenly_sampled(leaf.detach()) for name, leaf in leaves.items()})


def _differences(expected: _Gradients, found: _Gradients, *, may_be_off: bool) -> dict[str, float]:
    """Return the relative difference of each gradient that both networks have for the same values.

    `may_be_off`: leave those out of which nothing is expected.
    """
    floor = _FLOOR * max(map(_root_mean_square, expected.gradients.values()), default=0.0)
    differences, zero = {}, torch.zeros(())
    for name, values in found.leaves.items():
        if name not in expected.leaves or not torch.equal(values, expected.leaves[name]):
            continue
        if may_be_off and name not in expected.gradients:
            continue
        own, other = expected.gradients.get(name, zero), found.gradients.get(name, zero)
        is_finite = own.isfinite() & other.isfinite()  # a root of zero has no finite gradient
        difference = _root_mean_square((other - own)[is_finite])
        if not torch.equal(own.isfinite().expand_as(is_finite), other.isfinite().expand_as(is_finite)):
            difference = math.inf
        scale = max(_root_mean_square(own), floor)
        differences[name] = difference / scale if scale else math.inf if difference else 0.0
    return differences


def _root_mean_square(values: torch.Tensor) -> float:
    """Return that of the finite values, or 0 if there are none."""
    finite = values[values.isfinite()].double()
    return finite.square().mean().sqrt().item() if finite.numel() else 0.0


def _message(kind: str, expected: _Gradients, found: _Gradients, beyond: Mapping[str, float], route: str) -> str:
    name = max(beyond, key=beyond.__getitem__)
    if name not in expected.gradients:
        difference = "has a gradient in the prepared network, and none in the model"
    elif name not in found.gradients:
        difference = "has a gradient in the model, and none in the prepared network"
    else:
        difference = f"has another gradient in the prepared network than in the model (by {beyond[name]:.0%})"
    others = f"; so do {len(beyond) - 1} more" if len(beyond) > 1 else ""
    return (
        f"{kind}: training would differ: {name} {difference}{others}. {_NOT_KEPT[route]}. Put what changes gradients "
        "into a submodule, and leave it float (skip)"
    )
