"""`torch.cat([a, b]).chunk(2)` for a batch of any size, as networks of two pictures run a common encoder on both.

torch counts the parts by a rounded quotient, which its solver can't show to be the same for all sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CHUNK, _SPLIT = (torch.chunk, torch.Tensor.chunk), (torch.split, torch.Tensor.split)

_COUNTED = re.compile(r"generated guard \(\(\(-1\) \+ .*\) // .*\) == \d+")


def counts_parts(error: BaseException) -> bool:
    """Return whether `torch.export` stopped at such a count."""
    return _COUNTED.search(str(error)) is not None


class EqualParts(TorchFunctionMode):
    """Takes the equal parts of an axis of any size one by one, inside the `with`, while a network is traced."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        parts = _parts(*args, **kwargs or {}, is_chunk=func in _CHUNK) if func in (*_CHUNK, *_SPLIT) else None
        return func(*args, **kwargs or {}) if parts is None else parts


def _parts(
    tensor: torch.Tensor,
    chunks: Any = None,
    dim: int = 0,
    *,
    split_size: Any = None,
    split_size_or_sections: Any = None,
    is_chunk: bool,
    **others: Any,
) -> tuple[torch.Tensor, ...] | None:
    """Return the parts; None where the axis has a fixed size, or parts that are not equal for every size."""
    asked = next((value for value in (chunks, split_size, split_size_or_sections) if value is not None), None)
    size: Any = tensor.shape[dim]
    if not isinstance(size, torch.SymInt) or not isinstance(asked, int | torch.SymInt) or others:
        return None
    if size % asked != 0:  # torch.export refuses the network where this does not hold for every size
        return None
    number, length = (asked, size // asked) if is_chunk else (int(size // asked), asked)
    return tuple(tensor.narrow(dim, index * length, length) for index in range(number))
