"""fp16 where each rank holds other gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class TeamScaler(torch.amp.GradScaler):  # type: ignore[misc]  # torch comes without types
    """A GradScaler whose ranks skip a step together: one of them having overflowed is enough."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Any:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for flag in found.values():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return found
