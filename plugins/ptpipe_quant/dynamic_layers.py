"""Which linear layers `quant.dynamic` can quantize, and a comparison of those that it did.

An int8 layer is called like the float one, but has no float weight and runs no hooks. Whether a network needs more of a
layer than calls is found out by running it with stand-ins in the place of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe_quant.prepared_parity import probe_inputs
from ptpipe_quant.trace import float_modules
from ptpipe_torch import Model
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.layers import DynamicLinear, dynamic_linear_error, replace_layers
from ptpipe_torch.model.example_inputs import copies
from ptpipe_torch.model.outputs import named_outputs, tensors_of
from ptpipe_torch.runtime import seeded

_TOLERANCE = 1e-4
"""Of the largest output: torch has fused operators for whole encoder layers, which round differently."""
_NUM_SAMPLES = 2
_UNUSED = "the network does not call it in eval mode"


@dataclass(frozen=True)
class FloatRun:
    """Probe inputs, and what the float network returns for them."""

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]

    @classmethod
    def of(cls, model: Model, kind: str) -> FloatRun:
        """Run the float network. Raises StageError if it can't be run or does not return what its signature says."""
        module = model.build()
        try:
            inputs = [tensor[:_NUM_SAMPLES] for tensor in probe_inputs(module, model.signature.inputs)]
            returned = _call(module, inputs)
        except Exception as error:  # a network may raise anything
            raise StageError(f"{kind}: this network can't run: {_reason(error)}") from error
        named_outputs(returned, model.signature.outputs)
        return cls(inputs, tensors_of(returned))

    def is_reproduced_by(self, network: nn.Module) -> bool:
        """Return whether another network returns the same, to float tolerance."""
        try:
            outputs = tensors_of(_call(network, self.inputs))
        except Exception:  # noqa: BLE001  # a network may raise anything
            return False
        return len(outputs) == len(self.outputs) and all(map(_is_close, outputs, self.outputs))


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = _TOLERANCE * expected.nan_to_num().abs().max().item()
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)


def dynamic_linears(model: Model, skip: Sequence[str], run: FloatRun, ctx: Context) -> list[str]:
    """Return the linear layers, by all of their names, that can become int8; log why the others can't."""
    layers = _linears(model.build(), skip)
    reasons = {names: reason for names, layer in layers.items() if (reason := _peculiarity(layer))}
    candidates = [names for names in layers if names not in reasons]
    while candidates:
        works, found = _try(model, candidates, run)
        reasons |= found
        candidates = [names for names in candidates if names not in found]
        if works and not found:
            break
        if not found:  # no layer shows why: the network asks for its type, or for all parameters
            candidates, refused = _one_by_one(model, candidates, run)
            reasons |= dict.fromkeys(refused, "the network computes something else when its type is another")
            break
    for names, reason in reasons.items():
        ctx.log(f"{' = '.join(names)} stays float: {reason}")
    return [name for names in candidates for name in names]


def check_dynamic_linears(model: Model, inputs: Sequence[torch.Tensor], kind: str) -> None:
    """Compare each dynamically quantized layer with its formula in float64, on the inputs that the layer gets.

    Raises StageError, naming the layer, for a difference that is more than rounding.
    """
    with quantized_engine(model.recipe.backend), deprecations_silenced():
        module = model.build()
        for name, layer in module.named_modules():
            if isinstance(layer, DynamicLinear):
                layer.register_forward_hook(_check(name, f"{kind} ({model.recipe.backend})"), with_kwargs=True)
        _call(module, inputs)


def idle_patterns(module: nn.Module, skip: Sequence[str], *types: type[nn.Module]) -> list[str]:
    """Return the patterns of `skip` that keep no layer of these types float."""
    return [
        pattern
        for pattern in skip
        if not any(type(layer) in types for part in float_modules(module, [pattern]) for layer in part.modules())
    ]


def _check(name: str, kind: str) -> Any:
    def check(layer: nn.Module, inputs: tuple[torch.Tensor, ...], keywords: Any, output: torch.Tensor) -> None:
        error = dynamic_linear_error(layer, inputs[0] if inputs else keywords["input"], output)
        if error > 1:
            raise StageError(
                f"{kind}: the int8 layer {name} is {error:.3g} times further from its formula than rounding explains; "
                f"leave it float (skip: [{name}]), or set reduce_range: true"
            )

    return check


def _linears(module: nn.Module, skip: Sequence[str]) -> dict[tuple[str, ...], nn.Linear]:
    """Return the linear layers that no pattern of `skip` matches, by all of their names."""
    left_float = {layer for part in float_modules(module, skip) for layer in part.modules()}
    names: dict[nn.Linear, list[str]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if name and type(layer) is nn.Linear and layer not in left_float:
            names.setdefault(layer, []).append(name)
    return {tuple(found): layer for layer, found in names.items()}


def _peculiarity(linear: nn.Linear) -> str | None:
    """Return what a linear layer has that its int8 form would not have, or None."""
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "it has hooks (as weight_norm and spectral_norm have)"
    if "forward" in vars(linear) or not {"weight", "bias"} <= linear._parameters.keys():
        return "its weight, bias or forward function has been replaced"
    if linear.weight.dtype is not torch.float32:
        return f"its weight is {linear.weight.dtype}"
    return None


class _StandIn(nn.Module):
    """Computes what a linear layer does; notes what the network does with it that an int8 layer does not offer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.__dict__["_linear"] = linear  # not a submodule
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.reason: str | None = _UNUSED

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name that nn.Linear gives it
        if input.is_nested or input.dtype is not torch.float32 or input.dim() < 2:
            kind = "a nested tensor" if input.is_nested else f"{input.dtype} with {input.dim()} axes"
            self.reason = f"its input is {kind}"
        elif self.reason == _UNUSED:
            self.reason = None
        return nn.functional.linear(input, self._linear.weight, self._linear.bias)

    def __getattr__(self, name: str) -> Any:  # of what a module without parameters does not have
        value = getattr(self.__dict__["_linear"], name)
        self.reason = f"the network reads its {name} itself"
        return value


def _try(model: Model, candidates: Sequence[tuple[str, ...]], run: FloatRun) -> tuple[bool, dict[tuple[str, ...], str]]:
    """Run the network with stand-ins; return whether it computes the same, and why layers have to stay float."""
    network, stand_ins = model.build(), dict[nn.Module, _StandIn]()
    layers = {names: network.get_submodule(names[0]) for names in candidates}

    def stand_in(layer: Any) -> nn.Module:
        stand_ins[layer] = _StandIn(layer)
        return stand_ins[layer]

    replace_layers(network, [name for names in candidates for name in names], stand_in)
    works = run.is_reproduced_by(network)
    reasons = {names: reason for names, layer in layers.items() if (reason := stand_ins[layer].reason)}
    if not works:  # nor did it call all the others if it stopped half-way
        reasons = {names: reason for names, reason in reasons.items() if reason != _UNUSED}
    return works, reasons


def _one_by_one(
    model: Model, candidates: Sequence[tuple[str, ...]], run: FloatRun
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the layers that can be replaced together, and those that can't be in addition."""
    accepted, refused = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for names in candidates:
        works, found = _try(model, [*accepted, names], run)
        (accepted if works and not found else refused).append(names)
    return accepted, refused


def _call(network: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    with torch.inference_mode(), seeded(0):
        return network(*copies(inputs))


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
