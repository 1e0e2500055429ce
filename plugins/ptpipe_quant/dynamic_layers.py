"""Which linear and recurrent layers `quant.dynamic` can quantize, and a comparison of those that it did.

An int8 layer is called like the float one, but has no float weight and runs no hooks. Whether a network needs more of a
layer than calls is found out by running it with stand-ins in the place of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ptpipe import Context, StageError
from ptpipe_quant.attention import layer_types
from ptpipe_quant.linear_forms import linear_form
from ptpipe_quant.trace import float_modules, float_names
from ptpipe_torch import Model
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.layers import DynamicLinear, dynamic_linear_error, replace_layers
from ptpipe_torch.int8.recurrent import RECURRENT_LAYERS, DynamicRecurrent, recurrent_error
from ptpipe_torch.model.example_inputs import copies, probe_inputs
from ptpipe_torch.model.outputs import named_outputs, tensors_of
from ptpipe_torch.random_outputs import refuse_random_outputs
from ptpipe_torch.runtime import seeded

Build: TypeAlias = Callable[[], nn.Module]

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
        refuse_random_outputs(module, inputs)
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
    tolerance = _TOLERANCE * expected.double().nan_to_num().abs().max().item()
    pair = found.double(), expected.double()
    return found.shape == expected.shape and torch.allclose(*pair, rtol=0, atol=tolerance, equal_nan=True)


def names_to_quantize(build: Build, skip: Sequence[str], run: FloatRun, ctx: Context) -> list[str]:
    """Return the linear and recurrent layers, by all of their names, that can become int8; log why others can't.

    `build`: builds the float network.
    """
    layers = _layers(build(), skip)
    reasons = {names: reason for names, layer in layers.items() if (reason := _peculiarity(layer))}
    candidates = [names for names in layers if names not in reasons]
    while candidates:
        works, found = _try(build, candidates, run)
        reasons |= found
        candidates = [names for names in candidates if names not in found]
        if works and not found:
            break
        if not found:  # no layer shows why: the network asks for its type, or for all parameters
            candidates, refused = _one_by_one(build, candidates, run)
            reasons |= dict.fromkeys(refused, "the network computes something else when its type is another")
            break
    for names, reason in reasons.items():
        ctx.log(f"{' = '.join(names)} stays float: {reason}")
    return [name for names in candidates for name in names]


def check_dynamic_layers(model: Model, inputs: Sequence[torch.Tensor], kind: str) -> None:
    """Compare each dynamically quantized layer with its formula in float64, on the inputs that the layer gets.

    Raises StageError, naming the layer, for a difference that is more than rounding.
    """
    with quantized_engine(model.recipe.backend), deprecations_silenced():
        module = model.build()
        for name, layer in module.named_modules():
            if isinstance(layer, DynamicLinear | DynamicRecurrent):
                layer.register_forward_hook(_check(name, f"{kind} ({model.recipe.backend})"), with_kwargs=True)
        _call(module, inputs)


def idle_patterns(module: nn.Module, skip: Sequence[str], *types: type[nn.Module]) -> list[str]:
    """Return the patterns of `skip` that keep no layer of these types, nor one that is linear, float."""
    if not skip:  # a search for linear layers calls those of a network's own classes
        return []
    names = {type_.__name__ for type_ in types}
    layers = [f"{name}." for name, type_ in layer_types(module).items() if type_ in names]
    layers += [f"{name}." for name, layer in module.named_modules() if linear_form(layer)]
    return [
        pattern
        for pattern in skip
        if not any(layer.startswith(f"{name}.") for name in float_names(module, [pattern]) for layer in layers)
    ]


def _check(name: str, kind: str) -> Any:
    def check(layer: nn.Module, arguments: tuple[Any, ...], keywords: Any, output: Any) -> None:
        if isinstance(layer, DynamicRecurrent):
            error = recurrent_error(layer, output, *arguments, **keywords)
        else:
            error = dynamic_linear_error(layer, arguments[0] if arguments else keywords["input"], output)
        if error > 1:
            raise StageError(
                f"{kind}: the int8 layer {name} is {error:.3g} times further from its formula than rounding explains; "
                f"leave it float (skip: [{name}]), or set reduce_range: true"
            )

    return check


def _layers(module: nn.Module, skip: Sequence[str]) -> dict[tuple[str, ...], nn.Module]:
    """Return the linear and recurrent layers that no pattern of `skip` matches, by all of their names."""
    left_float = {layer for part in float_modules(module, skip) for layer in part.modules()}
    names: dict[nn.Module, list[str]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if name and layer not in left_float and (isinstance(layer, nn.RNNBase) or linear_form(layer)):
            names.setdefault(layer, []).append(name)
    return {tuple(found): layer for layer, found in names.items()}


def _peculiarity(layer: Any) -> str | None:
    """Return what a layer has that its int8 form would not have, or None."""
    if isinstance(layer, nn.RNNBase) and type(layer) not in RECURRENT_LAYERS:
        is_known = type(layer) is nn.RNN
        return "torch has no int8 kernel for nn.RNN" if is_known else f"its type is {type(layer).__name__}"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has hooks (as weight_norm and spectral_norm have)"
    is_recurrent = isinstance(layer, nn.RNNBase)
    names = set[str]()  # of a layer of another class, `linear_form` has seen that it has its own
    if is_recurrent:
        names = set(layer._flat_weights_names)
    elif type(layer) is nn.Linear:
        names = {"weight", "bias"}
    if "forward" in vars(layer) or not names <= layer._parameters.keys():
        return "its weight, bias or forward function has been replaced"
    if is_recurrent and layer.proj_size:
        return f"torch has no int8 kernel for a projected state (proj_size: {layer.proj_size})"
    dtypes = {parameter.dtype for parameter in layer.parameters()} - {torch.float32}
    return f"its weight is {dtypes.pop()}" if dtypes else None


class _StandIn(nn.Module):
    """Computes what a layer does; notes what the network does with it that an int8 layer does not offer."""

    offered: tuple[str, ...] = ("in_features", "out_features")
    methods: tuple[str, ...] = ("weight", "bias")
    """What an int8 layer has as methods: networks that ask whether the weight is a tensor need no float one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # not a submodule
        for name in self.offered:
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))
        self.reason: str | None = _UNUSED
        self.read = ""
        """Which of `methods` the network has read; why the layer stays float if the network does not work so."""

    def forward(self, input: Any, *arguments: Any, **keywords: Any) -> Any:  # the name that the layers give it
        """Return what the layer does."""
        data = input.data if isinstance(input, PackedSequence) else input
        if data.is_nested or data.dtype is not torch.float32 or data.dim() < 2:
            kind = "a nested tensor" if data.is_nested else f"{data.dtype} with {data.dim()} axes"
            self.reason = f"its input is {kind}"
        elif self.reason == _UNUSED:
            self.reason = None
        return self._layer(input, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:  # of what a module without parameters does not have
        value = getattr(self.__dict__["_layer"], name)
        if name in self.methods:
            self.read = name
            return lambda: value
        self.reason = _reads(name)
        return value

    def reason_to_stay(self, *, works: bool) -> str | None:
        """Return why the layer has to stay float, or None. `works`: whether the network computed the same."""
        if works or self.reason not in (None, _UNUSED):
            return self.reason
        return _reads(self.read) if self.read else self.reason


class _RecurrentStandIn(_StandIn):
    offered = (
        *("mode", "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"),
        "proj_size",
    )

    methods = ()

    def flatten_parameters(self) -> None:
        """Do nothing, as the int8 layer."""


def _reads(name: str) -> str:
    return f"the network reads its {name} itself"


def _try(build: Build, candidates: Sequence[tuple[str, ...]], run: FloatRun) -> tuple[bool, dict[tuple[str, ...], str]]:
    """Run the network with stand-ins; return whether it computes the same, and why layers have to stay float."""
    network, stand_ins = build(), dict[nn.Module, _StandIn]()
    layers = {names: network.get_submodule(names[0]) for names in candidates}

    def stand_in(layer: Any) -> nn.Module:
        stand_ins[layer] = (_RecurrentStandIn if isinstance(layer, nn.RNNBase) else _StandIn)(layer)
        return stand_ins[layer]

    replace_layers(network, [name for names in candidates for name in names], stand_in)
    works = run.is_reproduced_by(network)
    reasons = {
        names: reason for names, layer in layers.items() if (reason := stand_ins[layer].reason_to_stay(works=works))
    }
    if not works:  # nor did it call all the others if it stopped half-way
        reasons = {names: reason for names, reason in reasons.items() if reason != _UNUSED}
    return works, reasons


def _one_by_one(
    build: Build, candidates: Sequence[tuple[str, ...]], run: FloatRun
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the layers that can be replaced together, and those that can't be in addition."""
    accepted, refused = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for names in candidates:
        works, found = _try(build, [*accepted, names], run)
        (accepted if works and not found else refused).append(names)
    return accepted, refused


def _call(network: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    with torch.inference_mode(), seeded(0):
        return network(*copies(inputs))


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
