"""Functions of torch that make a constant of a size, for axes of any size: `torch.linspace`, and `torch.istft`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._refs import istft
from torch.overrides import TorchFunctionMode


class SymbolicSizes(TorchFunctionMode):
    """Computes what these functions do by others, where they are given a symbol for a size."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or what stands for it."""
        given = kwargs or {}
        if func in _FUNCTIONS and any(isinstance(value, torch.SymInt) for value in (*args, *given.values())):
            return _FUNCTIONS[func](*args, **given)
        return func(*args, **given)


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    """Return evenly spaced numbers, rounded as torch's kernel for the CPU rounds them: from both ends."""
    own_dtype = dtype or torch.get_default_dtype()
    if not own_dtype.is_floating_point:
        return torch.linspace(start, end, steps, dtype=dtype, **options)
    places = torch.arange(steps, **options)
    from_end = steps - 1 - places
    step = (end - start) / (places + from_end).clamp(min=1).to(own_dtype)
    is_first_half = (places < from_end) | (places + from_end == 0)
    return torch.where(is_first_half, start + step * places, end - step * from_end)


_FUNCTIONS: Mapping[Any, Any] = {torch.linspace: _linspace, torch.istft: istft}
