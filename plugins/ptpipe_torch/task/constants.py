"""Numbers of a task, as tensors on the device where its losses are computed."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=64)
def constant(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the numbers, float32 unless `dtype` says otherwise, copied to the device once; not to be written to.

    A copy in each step would make the process wait for a CUDA device, and a step that waits is no CUDA graph.
    """
    import torch

    with torch.inference_mode(mode=False):  # a tensor of that mode can't be used in a training afterwards
        return torch.tensor(numbers, dtype=dtype or torch.float32, device=device)
