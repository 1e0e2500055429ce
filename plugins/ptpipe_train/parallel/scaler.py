"""fp16 where each rank holds other gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ptpipe_torch.distributed.worker_group import group_device


class GroupScaler(torch.amp.GradScaler):  # type: ignore[misc]  # torch comes without types
    """A GradScaler whose ranks skip a step together: one of them having overflowed is enough.

    Each rank must scale something before it steps, if only a 0 where it sees no loss; it may have no gradients.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Any:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16) or {found_inf.device: found_inf}
        device = group_device()
        any_inf = torch.stack([flag.to(device) for flag in found.values()]).amax(0)
        dist.all_reduce(any_inf, dist.ReduceOp.MAX)
        for flag in found.values():
            flag.copy_(any_inf)
        return found
