"""What a network returns, as the named tensors of its signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from ptpipe import StageError
from ptpipe_torch.model.signature import BATCH, DTYPES, Signature, TensorSpec

if TYPE_CHECKING:
    from torch.export import ExportedProgram  # which takes long to import


def named_outputs(returned: Any, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Return the output tensors by name: of a mapping by its keys, of a tensor or a sequence by position.

    Raises StageError where the network returned something else than its signature says.
    """
    names = [spec.name for spec in specs]
    if isinstance(returned, Mapping):
        values = {name: returned[name] for name in names} if set(returned) == set(names) else {}
    else:
        parts = returned if isinstance(returned, list | tuple) else [returned]
        values = dict(zip(names, parts, strict=True)) if len(parts) == len(names) else {}
    if len(values) != len(names) or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise StageError(f"the network returns {describe(returned)}; it must return {', '.join(map(str, specs))}")
    for spec in specs:
        if not spec.fits(values[spec.name].shape):
            found = tuple(values[spec.name].shape)
            raise StageError(f"the network returns {spec.name} of shape {found}; it must return {spec}")
    return values


def with_outputs(needed: Signature, outputs: Sequence[TensorSpec]) -> Signature:
    """Return what an unlabeled data set needs, with the outputs that a model was found to have.

    Raises StageError where an output is called as an input.
    """
    if shared := sorted({spec.name for spec in outputs} & {spec.name for spec in needed.inputs}):
        raise StageError(f"an input and an output are both called {shared[0]}: rename one")
    return Signature(needed.inputs, tuple(outputs), needed.meanings)


def specs_of(returned: Sequence[Any], num_samples: Sequence[int]) -> tuple[TensorSpec, ...]:
    """Return the outputs of a network whose data set names no outputs, by what it returned for so many samples each.

    A mapping's keys are their names; a tensor is called `output`, those of a sequence `output_0`, `output_1`. Raises
    StageError for anything but tensors with a row for each sample, all else alike.
    """
    named = [_named(each) for each in returned]
    specs = []
    for name, first in named[0].items():
        shapes = [tuple(each[name].shape) if name in each else None for each in named]
        if (found := unlike_rows(shapes, num_samples)) is not None:
            raise StageError(f"the network returns {name} of shape {found} samples; it needs a row for each sample")
        dtype = str(first.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise StageError(f"the network returns {name} as {dtype}; outputs are {', '.join(DTYPES)}")
        specs.append(TensorSpec(name, dtype, (BATCH, *first.shape[1:])))
    return tuple(specs)


def unlike_rows(shapes: Sequence[tuple[int, ...] | None], num_samples: Sequence[int]) -> str | None:
    """Return the shapes of an output for so many samples each, in words; None where they are rows, one a sample."""
    rest = (shapes[0] or ())[1:]
    if 0 not in rest and list(shapes) == [(num, *rest) for num in num_samples]:
        return None
    return " and ".join(f"{shape} for {num}" for shape, num in zip(shapes, num_samples, strict=True))


def _named(returned: Any) -> dict[str, torch.Tensor]:
    if isinstance(returned, Mapping):
        values = dict(returned)
    elif isinstance(returned, list | tuple):
        values = {f"output_{number}": value for number, value in enumerate(returned)}
    else:
        values = {"output": returned}
    are_named = all(isinstance(name, str) and name.isidentifier() for name in values)
    if not values or not are_named or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise StageError(
            f"the network returns {describe(returned)}; it must return a tensor, several in a tuple, or a dict of "
            "tensors by names of letters, digits and underscores"
        )
    return values


def returned_names(returned: Any, specs: Sequence[TensorSpec]) -> list[str]:
    """Return the names of what a network returned, in its order: of a mapping, its keys."""
    names = [spec.name for spec in specs]
    return list(returned) if isinstance(returned, Mapping) and set(returned) == set(names) else names


def exported_names(program: ExportedProgram, specs: Sequence[TensorSpec]) -> list[str]:
    """Return the names of what an exported network returns, in its order."""
    structure = program.call_spec.out_spec
    assert structure is not None
    return returned_names(tree_unflatten(range(structure.num_leaves), structure), specs)


def predicted(
    network: nn.Module, inputs: Mapping[str, npt.NDArray[Any]], signature: Signature
) -> dict[str, npt.NDArray[Any]]:
    """Call a network as a `Predictor` is called."""
    arrays = (inputs[spec.name] for spec in signature.inputs)
    writable = (array if array.flags.writeable else array.copy() for array in arrays)  # or torch warns
    outputs = named_outputs(network(*map(torch.from_numpy, writable)), signature.outputs)
    return {name: output.numpy() for name, output in outputs.items()}


def tensors_of(returned: Any) -> list[torch.Tensor]:
    """Return all tensors that a network returned, in order."""
    return [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]


def describe(returned: Any) -> str:
    """Return what a network returned, in a few words: `a dict of aux, out`, `a tuple of 2 values (Tensor, dict)`."""
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} of {', '.join(map(str, returned))}"
    if isinstance(returned, list | tuple):
        types = [type(value).__name__ for value in returned]
        are_tensors = all(isinstance(value, torch.Tensor) for value in returned)
        shown = "" if are_tensors else f" ({', '.join(types[:5])})"
        return f"a {type(returned).__name__} of {len(types)} values{shown}"
    return f"a {type(returned).__name__}"
