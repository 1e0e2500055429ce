"""Networks whose inputs may have any size along some axes, as pictures do where a network is convolutional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe_torch import BATCH, Model, Signature, TensorSpec
from ptpipe_torch.errors import first_line
from ptpipe_torch.model.axis_sizes import numbers_of, parsed
from ptpipe_torch.model.example_inputs import copies, zeros
from ptpipe_torch.model.outputs import named_outputs
from ptpipe_torch.runtime import seeded

if TYPE_CHECKING:
    from ptpipe_zoo.config import DynamicShapesConfig

_TRIED_SIZES = (16, 9, 11)
"""As `zeros` has them: those that later stages run the network at."""
_TRIED_FACTORS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_BATCH_SIZE = 2


def with_dynamic_shapes(config: DynamicShapesConfig, ctx: Context, model: Model) -> Model:
    """Implement `model.dynamic_shapes`."""
    if model.recipe.backend:
        raise StageError(
            f"this model is {model.format}: its graph was recorded for inputs of one size. Put {ctx.kind} before the "
            "stage that prepares or quantizes it"
        )
    inputs = tuple(_opened(spec, config.inputs.get(spec.name)) for spec in model.signature.inputs)
    if unknown := config.inputs.keys() - {spec.name for spec in inputs}:
        raise StageError(f"inputs: the model has no {', '.join(sorted(unknown))}; it takes {_listed(inputs)}")
    network = model.build()
    outputs = _outputs(network, replace(model.signature, inputs=inputs))
    former = (*model.signature.inputs, *model.signature.outputs)
    if numbers_of((spec.shape, of.shape) for spec, of in zip((*inputs, *outputs), former, strict=True)) is None:
        raise StageError(f"inputs: {_listed(inputs)} and {_listed(outputs)} can't be {_listed(former)}, which they are")
    signature = replace(model.signature, inputs=inputs, outputs=outputs)
    ctx.log(f"the model takes and returns {signature}")
    return model.with_recipe(signature=signature)


def _opened(spec: TensorSpec, shape: Sequence[int | str] | None) -> TensorSpec:
    """Return an input whose samples may have this shape. Raises StageError where those that it has don't fit."""
    if shape is None:
        return spec
    opened = replace(spec, shape=(spec.shape[0], *shape))
    if numbers_of([(opened.shape, spec.shape)]) is None:
        raise StageError(f"inputs: {spec.name} of shape ({', '.join(map(str, shape))}) does not fit {spec}")
    return opened


def _outputs(network: nn.Module, signature: Signature) -> tuple[TensorSpec, ...]:
    """Return what a network returns for inputs of any size, by what it returns for a few.

    Raises StageError where it doesn't take these.
    """
    trials = []
    for size in _TRIED_SIZES:
        examples = zeros(signature.inputs, _BATCH_SIZE, size)
        pairs = ((spec.shape, of.shape) for spec, of in zip(signature.inputs, examples, strict=True))
        numbers = numbers_of(pairs)
        assert numbers is not None
        trials.append((numbers, _output_shapes(network, signature, examples)))
    return tuple(
        _output(spec, [(numbers, shapes[spec.name]) for numbers, shapes in trials]) for spec in signature.outputs
    )


def _output(spec: TensorSpec, trials: Sequence[tuple[Mapping[str, int], Sequence[int]]]) -> TensorSpec:
    """Return an output with a symbol for each axis whose size is another for other inputs.

    `trials`: the numbers of the inputs' symbols, and the shape that the output then has.
    """
    shape: list[int | str] = [BATCH]
    for axis in range(1, len(spec.shape)):
        sizes = [(numbers, found[axis]) for numbers, found in trials]
        is_fixed = len({size for _, size in sizes}) == 1
        shape.append(sizes[0][1] if is_fixed else _symbol_of(sizes) or f"{spec.name}_{axis}")
    return replace(spec, shape=tuple(shape))


def _symbol_of(sizes: Sequence[tuple[Mapping[str, int], int]]) -> str | None:
    """Return the multiple of an input's symbol that an axis always is; None where it is another size."""
    numbers, first = sizes[0]
    for name in numbers:
        factor = first // numbers[name]
        if all(size == factor * of[name] for of, size in sizes):
            return f"{factor}*{name}" if factor > 1 else name
    return None


def _output_shapes(
    network: nn.Module, signature: Signature, examples: Sequence[torch.Tensor]
) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each output by its name. Raises StageError where the network can't take the examples."""
    any_size = [
        replace(spec, shape=(BATCH, *(f"axis_{axis}" for axis in range(1, len(spec.shape)))))
        for spec in signature.outputs
    ]
    try:
        returned = _returned(network, examples)
    except Exception as error:
        from ptpipe_torch.torch_export import place_of_error  # takes a second

        named = zip(signature.inputs, examples, strict=True)
        sizes = ", ".join(f"{spec.name} {tuple(of.shape[1:])}" for spec, of in named if spec.symbols)
        place = place_of_error(network, error, __file__).in_parentheses
        raise StageError(
            f"the network can't take samples of other sizes, such as {sizes}: {first_line(error).rstrip('.')}{place}"
            f"{_remedy(network, signature)}"
        ) from error
    return {name: tuple(output.shape) for name, output in named_outputs(returned, any_size).items()}


def _returned(network: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    with seeded(0), torch.no_grad():
        return network(*copies(inputs))


def _remedy(network: nn.Module, signature: Signature) -> str:
    """Return which sizes a network does take, to end an error about those that it doesn't."""
    for factor in _TRIED_FACTORS:
        inputs = [_multiplied(spec, factor) for spec in signature.inputs]
        try:
            for size in _TRIED_SIZES:
                _returned(network, zeros(inputs, _BATCH_SIZE, size))
        except Exception:  # noqa: BLE001, S112  # a network may raise anything for sizes that it doesn't take
            continue
        shapes = (f"{spec.name}: [{', '.join(map(str, spec.sample_shape))}]" for spec in inputs if spec.symbols)
        return f". It takes multiples of {factor}: inputs: {{{', '.join(shapes)}}}"
    return ". Leave these axes at the data set's size"


def _multiplied(spec: TensorSpec, factor: int) -> TensorSpec:
    return replace(spec, shape=(BATCH, *(_multiple(size, factor) for size in spec.sample_shape)))


def _multiple(size: int | str, factor: int) -> int | str:
    if isinstance(size, int):
        return size
    own_factor, name = parsed(size)
    return f"{max(own_factor, factor)}*{name}"


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs))
