"""Grids of what HardSwish reads, on which 3 is a whole number of steps.

HardSwish is x times relu6(x + 3) / 6. Runtimes without an integer kernel for it compute in float. On such a grid the
second factor is an integer too, x clipped, on a grid of a sixth of the step: a product of integers is left, which has
kernels, and nothing is rounded that was not rounded before.

Ranges get wider, by 1 % on average in MobileNetV3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe_torch.int8.observers import mix_in, observer_at, observes_activation_range

BEND = 3.0
"""HardSwish bends at this value and at its negative."""
_MIN_STEPS = 16
"""With fewer steps to the bend, a range could get 1 / 16 wider, and more."""


def use_whole_steps(prepared: GraphModule) -> None:
    """Let the observers in front of each HardSwish return such grids, in place."""
    for node in prepared.graph.find_nodes(op="call_module"):
        if isinstance(prepared.get_submodule(str(node.target)), nn.Hardswish):
            observer = observer_at(prepared, node.all_input_nodes[0])
            if observer is not None and observes_activation_range(observer):
                mix_in(getattr(observer, "activation_post_process", observer), _WholeSteps)


def has_whole_steps(observer: Any) -> bool:
    """Return whether an observer returns such grids."""
    return isinstance(observer, _WholeSteps)


def whole_steps(
    scale: torch.Tensor, zero_point: torch.Tensor, low: torch.Tensor, quant_min: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next larger scale that 3 is a multiple of, and its zero point; where that is no use, the given ones.

    `low`: minimum of the range, 0 at most. It is no use where -3 is below the range, as the second factor has no zero
    point among the integers then, or where the range would get much wider.
    """
    num_steps = torch.floor(BEND / scale)
    wider = BEND / num_steps
    offset = quant_min - torch.round(low / wider)
    is_used = (num_steps >= _MIN_STEPS) & (offset - num_steps >= quant_min)
    return torch.where(is_used, wider, scale), torch.where(is_used, offset.to(zero_point.dtype), zero_point)


class _WholeSteps:
    """Mixin of an observer."""

    quant_min: int

    def _calculate_qparams(self, min_val: torch.Tensor, max_val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero_point = super()._calculate_qparams(min_val, max_val)  # type: ignore[misc]  # torch.ao's
        low = min_val.clamp(max=0).to(scale.dtype).reshape(scale.shape)
        return whole_steps(scale, zero_point, low, self.quant_min)
