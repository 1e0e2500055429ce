"""Tensors of a prepared model that repairs changed: the float network's own are kept beside them, as buffers.

What rounding changes is the difference from those: a weight that AdaRound has put on the int8 grid is the same there
before and after rounding. A converted model is stored without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import JSON
from ptpipe_torch import FunctionRef, Model

_PREFIX = "float_"


def add_float_tensors(prepared: GraphModule, names: Sequence[str]) -> None:
    """Add a buffer for the float value of each of these parameters, in place."""
    for name in names:
        layer, parameter = _parts(prepared, name)
        layer.register_buffer(_PREFIX + parameter, getattr(layer, parameter).detach().clone())


def float_tensor(layer: nn.Module, parameter: str) -> torch.Tensor | None:
    """Return what a repaired parameter of a layer is in the float network; None where no repair changed it."""
    return layer._buffers.get(_PREFIX + parameter)


def undo_repairs(prepared: GraphModule) -> None:
    """Give all repaired parameters of a network the values of the float one, in place."""
    for layer in prepared.modules():
        for parameter, value in layer._parameters.items():
            if value is not None and (before := float_tensor(layer, parameter)) is not None:
                value.detach().copy_(before)


def with_repaired(
    model: Model, repaired: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor], **noted: JSON
) -> Model:
    """Return a prepared model with these parameters, by name.

    `before`: the same ones in the float network. `noted`: further arguments of the transform that prepares it.
    """
    *others, last = model.recipe.prepare
    former = last.arguments.get("repaired")
    names = dict.fromkeys([*(former if isinstance(former, list) else ()), *repaired])
    noted_last = FunctionRef(last.address, {**last.arguments, **noted, "repaired": list(names)}, last.source)
    kept = {_buffer_name(name): value for name, value in before.items()}
    recipe = replace(model.recipe, prepare=(*others, noted_last))
    return Model(recipe, {**model.tensors, **repaired, **kept})


def without_float_tensors(model: Model) -> Model:
    """Return a prepared model with its repairs, but without the float network's own tensors."""
    prepare, names = list[FunctionRef](), set[str]()
    for reference in model.recipe.prepare:
        arguments = dict(reference.arguments)
        repaired = arguments.pop("repaired", None)
        names |= {_buffer_name(str(name)) for name in (repaired if isinstance(repaired, list) else ())}
        prepare.append(FunctionRef(reference.address, arguments, reference.source))
    if not names:
        return model
    tensors = {name: tensor for name, tensor in model.tensors.items() if name not in names}
    return Model(replace(model.recipe, prepare=tuple(prepare)), tensors)


def _parts(network: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, parameter = name.rpartition(".")
    return network.get_submodule(path), parameter


def _buffer_name(name: str) -> str:
    path, _, parameter = name.rpartition(".")
    return f"{path}.{_PREFIX}{parameter}"
