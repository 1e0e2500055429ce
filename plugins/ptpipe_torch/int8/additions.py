"""Additions of quantized tensors on qnnpack, whose kernel (torch 2.13) refuses scales that differ widely.

Networks with layer scale, such as ConvNeXt, add what they have scaled by 1e-6 to what they have not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

_LEAST_RATIO, _RATIO_LIMIT = 2.0**-14, 2.0**8
"""Of an input's scale to the output's. Source: qnnpack, `pytorch_qnnp_create_add_nc_q8`."""


def has_addition_kernel(x: torch.Tensor, y: torch.Tensor, scale: float) -> bool:
    """Return whether qnnpack adds two quint8 tensors to one of this scale."""
    return all(_LEAST_RATIO <= tensor.q_scale() / scale < _RATIO_LIMIT for tensor in (x, y))


def add(x: torch.Tensor, y: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Add two quint8 tensors; the sum is quint8 too. Where qnnpack has no kernel, it is computed in float32."""
    if has_addition_kernel(x, y, scale):
        total: torch.Tensor = torch.ops.quantized.add(x, y, scale, zero_point)
        return total
    return torch.quantize_per_tensor(x.dequantize() + y.dequantize(), scale, zero_point, torch.quint8)


def add_relu(x: torch.Tensor, y: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Add two quint8 tensors as `add` does, and set negative sums to zero."""
    if has_addition_kernel(x, y, scale):
        total: torch.Tensor = torch.ops.quantized.add_relu(x, y, scale, zero_point)
        return total
    return torch.quantize_per_tensor((x.dequantize() + y.dequantize()).relu(), scale, zero_point, torch.quint8)


_BY_KERNEL: dict[Any, Any] = {torch.ops.quantized.add: add, torch.ops.quantized.add_relu: add_relu}
ADDITIONS = tuple(_BY_KERNEL.values())


def use_additions_of_any_scale(converted: GraphModule) -> None:
    """Let additions of an int8 network for qnnpack take inputs of any scale."""
    for node in converted.graph.nodes:
        node.target = _BY_KERNEL.get(node.target, node.target)
    converted.recompile()
