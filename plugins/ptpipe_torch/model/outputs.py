"""What a network returns, as the named tensors of its signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from ptpipe import StageError
from ptpipe_torch.model.signature import Signature, TensorSpec

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
    """Return what a network returned, in a few words: `a dict of aux, out`."""
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} of {', '.join(map(str, returned))}"
    if isinstance(returned, list | tuple):
        return f"a {type(returned).__name__} of {len(returned)} values"
    return f"a {type(returned).__name__}"
