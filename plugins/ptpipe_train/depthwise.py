"""Depthwise convolutions in float32 under autocast on a CPU.

oneDNN has no fast bf16 kernels for most of them: against float32, forward and backward pass take 2 to 3 times as long
with 5x5 kernels, 10 to 40 times with a stride (torch 2.13). Networks with such layers were slower in bf16 than in
float32; with them in float32 they are faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ptpipe_train.mix_in import mix_in


def keep_depthwise_float32(module: nn.Module) -> None:
    """Let the depthwise convolutions of a network compute in float32 under autocast on a CPU, in place.

    Transposed ones and those of quantization-aware training too. Without autocast nothing changes.
    """
    for layer in module.modules():
        if _is_depthwise(layer) and not isinstance(layer, _Float32):
            mix_in(layer, _Float32)


def _is_depthwise(layer: nn.Module) -> bool:
    weight, groups = getattr(layer, "weight", None), getattr(layer, "groups", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(groups, int):
        return False
    return groups > 1 and weight.dim() > 2 and weight.shape[1] == 1


class _Float32:
    """Mixin of a layer that leaves autocast."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the layer."""
        forward = super().forward  # type: ignore[misc]  # that of the layer's own type
        if not torch.is_autocast_enabled("cpu"):
            return forward(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, _to_float32, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return forward(*args, **kwargs)


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
