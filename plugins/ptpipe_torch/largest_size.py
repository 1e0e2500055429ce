"""The largest size that a network takes of an axis that may have any, such as the tokens that it has positions for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO

import torch
from torch import nn

from ptpipe_torch.kept_attributes import KeptAttributes
from ptpipe_torch.model.axis_sizes import are_multiples
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.model.signature import TensorSpec

MAX_TRIED = 4096
"""A larger size may take more memory than there is."""


def is_largest_size(network: nn.Module, inputs: Sequence[TensorSpec], size: int) -> bool:
    """Return whether a network takes this size of the axes of its inputs that have no fixed one, and none above it.

    It is run on one sample, and left as it was. False where such axes have several sizes, or multiples.
    """
    symbols = {symbol for spec in inputs for symbol in spec.symbols}
    has_one_size = len(symbols) == 1 and not are_multiples(symbols)
    return has_one_size and size < MAX_TRIED and takes(network, inputs, size) and not takes(network, inputs, size + 1)


def takes(network: nn.Module, inputs: Sequence[TensorSpec], size: int, *, batch_size: int = 1) -> bool:
    """Return whether a network takes inputs of this size. It is left as it was."""
    kept = KeptAttributes(network)
    try:
        with torch.no_grad(), redirect_stderr(StringIO()):  # to which a traced network prints the line that failed
            network(*zeros(inputs, batch_size, size))
    except Exception:  # noqa: BLE001  # a network may raise anything for a size that it does not take
        return False
    finally:
        kept.restore()
    return True
