"""Tensors to call a network with where no data is at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ptpipe import StageError
from ptpipe_torch.model.signature import BATCH, TensorSpec

_MAX_VALUES = 1 << 26
"""Of one sample: a stored recipe, which may come from anywhere, names the size that is allocated."""
_SYMBOL_SIZE = 16


def zeros(specs: Sequence[TensorSpec], batch_size: int, symbol_size: int = _SYMBOL_SIZE) -> tuple[torch.Tensor, ...]:
    """Return a tensor of zeros for each input: the first of a vocabulary, for integers.

    `symbol_size`: of axes, other than the batch's, that may have any size. Raises StageError where a sample is absurdly
    large.
    """
    # Names of torch and NumPy are the same.
    return tuple(torch.zeros(_shape(spec, batch_size, symbol_size), dtype=getattr(torch, spec.dtype)) for spec in specs)


def copies(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the same inputs for a network that may change them in place."""
    return tuple(tensor.clone() for tensor in inputs)


def _shape(spec: TensorSpec, batch_size: int, symbol_size: int) -> tuple[int, ...]:
    sizes = {BATCH: batch_size}
    shape = tuple(size if isinstance(size, int) else sizes.get(size, symbol_size) for size in spec.shape)
    if math.prod(shape[1:]) > _MAX_VALUES:
        raise StageError(f"the input {spec} is too large to run the network once")
    return shape
