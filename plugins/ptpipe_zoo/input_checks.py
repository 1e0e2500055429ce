"""What a network of one's own makes of ids and padding that the first samples of a data set don't have.

Shape legend: N texts, L tokens of the longest one, T tokens of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch import DatasetInfo, TensorSpec, TokensInfo
from ptpipe_torch.model.example_inputs import copies
from ptpipe_torch.model.outputs import named_outputs
from ptpipe_torch.model.signature import Signature
from ptpipe_torch.python_file import own_errors
from ptpipe_torch.runtime import seeded

_OUT_OF_RANGE = re.compile(r"out of range|out of bounds|Class values must be")
"""In errors of embeddings, of indexing and of one_hot."""
_DEPENDS = 1e-4
"""Difference, relative to the largest output, from which on it is more than rounding.

Untrained transformers: 5e-4 and more where they read padding, 1e-6 and less where it is masked.
"""


def refuses_ids(error: BaseException | None) -> bool:
    """Return whether an error may be about an integer of the inputs that is too large or too small."""
    return isinstance(error, IndexError | RuntimeError) and _OUT_OF_RANGE.search(str(error)) is not None


def check_ids(network: nn.Module, inputs: Sequence[torch.Tensor], info: DatasetInfo, file: Path) -> None:
    """Raise StageError where a network fails for ids that the data set has, and not for the id 1 in their place."""
    columns = list(info.inputs.values())
    of_ids = [number for number, column in enumerate(columns) if column.vocabulary_sizes]
    if not of_ids:
        return
    ones = [torch.ones_like(tensor) if number in of_ids else tensor for number, tensor in enumerate(inputs)]
    try:
        _called(network, ones)
    except Exception:  # noqa: BLE001  # it fails for another reason
        return
    for number in of_ids:
        name, sizes = info.signature.inputs[number].name, columns[number].vocabulary_sizes
        remedy = f": {name} has the ids 0 to {sizes[0] - 1}: give their embedding {sizes[0]} rows"
        if not isinstance(columns[number], TokensInfo):
            remedy = (
                f": the columns of {name} have {', '.join(map(str, sizes))} ids, their number of categories + 1, as 0 "
                "is a value that train does not have: give their embeddings as many rows"
            )
        for which, extreme in _extremes(ones[number], sizes, is_text=isinstance(columns[number], TokensInfo)):
            try:
                with own_errors(file, f"the network, called with {which} of {name},", remedy):
                    _called(network, [*ones[:number], extreme, *ones[number + 1 :]])
            except StageError as error:
                if refuses_ids(error.__cause__):
                    raise


def _extremes(ones: torch.Tensor, sizes: Sequence[int], *, is_text: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ids that a network may not take. A text has one such token: all others as padding is no text."""
    if is_text:
        yield "the largest id", torch.cat([ones[:, :1] * (sizes[0] - 1), ones[:, 1:]], 1)
    else:
        yield "the largest ids", ones * (torch.tensor(sizes, dtype=ones.dtype) - 1)
        yield "the ids 0", torch.zeros_like(ones)


def padding_dependence(
    network: nn.Module, inputs: Sequence[torch.Tensor], info: DatasetInfo, signature: Signature
) -> str | None:
    """Return that a text's outputs depend on how far it is padded; None if not, or where it is always the same."""
    columns = {
        number: column
        for number, column in enumerate(info.inputs.values())
        if isinstance(column, TokensInfo) and column.padding == "longest"
    }
    if not columns:
        return None
    first, tokens = next(iter(columns.items()))
    length = min(inputs[first].shape[1], max(1, tokens.max_length // 2))
    short, padded = list(inputs), list(inputs)
    for number, column in columns.items():
        short[number] = inputs[number][:, :length]
        missing = min(2 * length, column.max_length) - length
        padded[number] = nn.functional.pad(short[number], (0, missing), value=column.padding_id)
    is_token_NL = short[first] != tokens.padding_id
    try:
        one, other = (named_outputs(_called(network, each), signature.outputs) for each in (short, padded))
        changed = [
            spec.name
            for spec in signature.outputs
            if spec.is_float and _differ(spec, one[spec.name], other[spec.name], is_token_NL, info)
        ]
    except Exception:  # noqa: BLE001  # it may take texts of one length alone, or of a few
        return None
    if not changed:
        return None
    return (
        f"the {changed[0]} of a text depend on how far it is padded, so on the other texts of its batch, and differ "
        f"for a text alone: mask the padding ({signature.inputs[first].name} != {tokens.padding_id})"
    )


def _differ(
    spec: TensorSpec, one: torch.Tensor, other: torch.Tensor, is_token_NL: torch.Tensor, info: DatasetInfo
) -> bool:
    """Return whether outputs differ, beyond rounding: those of texts, or of the tokens that both have."""
    # Without what is added to each output: it would hide a difference.
    one, other = (torch.from_numpy(info.task.in_natural_units(output.numpy())) for output in (one, other))
    symbolic = [axis for axis, size in enumerate(spec.shape) if axis and isinstance(size, str)]
    if symbolic:
        (axis,) = symbolic
        length = is_token_NL.shape[1]
        one, other = (output.movedim(axis, 1)[:, :length][is_token_NL] for output in (one, other))
    else:
        one, other = (output[is_token_NL.any(1)] for output in (one, other))
    return bool((one - other).abs().max() > _DEPENDS * one.abs().max())


def _called(network: nn.Module, inputs: Sequence[torch.Tensor]) -> object:
    with seeded(0), torch.no_grad():
        return network.eval()(*copies(inputs))
