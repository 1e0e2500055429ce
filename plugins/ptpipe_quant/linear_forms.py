"""Layers that compute what `nn.Linear` does and are of another class: GPT-2's, with a transposed weight; subclasses.

Shape legend: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.func import functional_call

LinearForm: TypeAlias = Literal["linear", "transposed"]
"""Whether a layer's weight is (O, I), as that of `nn.Linear`, or (I, O)."""

_LEADING_SHAPES = ((3,), (2, 3))
"""A layer that takes no input of three axes is not looked for: all that are known do."""


def linear_form(layer: nn.Module) -> LinearForm | None:
    """Return the form of a layer that is linear with a weight and a bias of its own; None for all others.

    It is called with random ones, whatever its own are.
    """
    if type(layer) is nn.Linear:
        return "linear"
    if type(layer).__module__.startswith("torch.") or isinstance(layer, nn.Embedding):  # known, and often large
        return None
    weight = layer._parameters.get("weight")
    has_others = layer._modules or layer._buffers or layer._parameters.keys() - {"weight", "bias"}
    if has_others or weight is None or weight.dim() != 2:
        return None
    random = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(own.shape, generator=random) for name, own in layer.named_parameters()}
    forms: dict[LinearForm, torch.Tensor] = {"linear": drawn["weight"], "transposed": drawn["weight"].t()}
    return next((form for form, weight_OI in forms.items() if _multiplies_by(layer, weight_OI, drawn)), None)


def linear_forms(module: nn.Module, names: Sequence[str]) -> dict[str, LinearForm]:
    """Return the forms of those of these layers that are linear and no `nn.Linear`, by name."""
    layers = {name: module.get_submodule(name) for name in names}
    forms = {name: linear_form(layer) for name, layer in layers.items() if type(layer) is not nn.Linear}
    return {name: form for name, form in forms.items() if form}


def as_linear(layer: nn.Module, form: LinearForm) -> nn.Linear:
    """Return the `nn.Linear` of such a layer."""
    parameters = dict(layer.named_parameters())
    weight, bias_O = parameters["weight"].detach(), parameters.get("bias")
    weight_OI = weight if form == "linear" else weight.t().contiguous()
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device="meta")
    linear.weight = nn.Parameter(weight_OI)
    linear.bias = bias_O  # type: ignore[assignment]  # None is allowed
    return linear.train(layer.training)


def _multiplies_by(layer: nn.Module, weight_OI: torch.Tensor, drawn: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a layer with the parameters `drawn` is a product with this weight, and a bias."""
    random = torch.Generator().manual_seed(1)
    inputs = [torch.randn(*leading, weight_OI.shape[1], generator=random) for leading in _LEADING_SHAPES]
    try:
        with torch.no_grad():
            for x in inputs:
                expected = nn.functional.linear(x, weight_OI, drawn.get("bias"))
                torch.testing.assert_close(
                    functional_call(layer, dict(drawn), x.clone()), expected, rtol=1e-4, atol=1e-4
                )
    except Exception:  # noqa: BLE001  # a layer may raise anything for what it does not take
        return False
    return True
