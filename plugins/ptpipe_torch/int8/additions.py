"""Additions of quantized tensors that torch's operator (2.13) refuses or warns about.

qnnpack's kernel refuses scales that differ widely: networks with layer scale, such as ConvNeXt, add what they have
scaled by 1e-6 to what they have not. On every engine, the operator takes the sum's shape from the first tensor, and
writes a warning to stderr for each call in which the sum is larger.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

_LEAST_RATIO, _RATIO_LIMIT = 2.0**-14, 2.0**8
"""Of an input's scale to the output's. Source: qnnpack, `pytorch_qnnp_create_add_nc_q8`."""


def has_addition_kernel(x: torch.Tensor, y: torch.Tensor, scale: float) -> bool:
    """Return whether the engine adds two quint8 tensors to one of this scale."""
    if torch.backends.quantized.engine != "qnnpack":
        return True
    return all(_LEAST_RATIO <= tensor.q_scale() / scale < _RATIO_LIMIT for tensor in (x, y))


def add(x: torch.Tensor, y: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Add two quint8 tensors; the sum is quint8 too. Where qnnpack has no kernel, it is computed in float32."""
    x = _expanded(x, y)
    if has_addition_kernel(x, y, scale):
        total: torch.Tensor = torch.ops.quantized.add(x, y, scale, zero_point)
        return total
    return torch.quantize_per_tensor(x.dequantize() + y.dequantize(), scale, zero_point, torch.quint8)


def add_relu(x: torch.Tensor, y: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Add two quint8 tensors as `add` does, and set negative sums to zero."""
    x = _expanded(x, y)
    if has_addition_kernel(x, y, scale):
        total: torch.Tensor = torch.ops.quantized.add_relu(x, y, scale, zero_point)
        return total
    return torch.quantize_per_tensor((x.dequantize() + y.dequantize()).relu(), scale, zero_point, torch.quint8)


def _expanded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the first tensor in the shape of the sum."""
    if x.shape == y.shape:
        return x
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]  # torch is partly typed
    return x.expand(shape)


_BY_KERNEL: dict[Any, Any] = {torch.ops.quantized.add: add, torch.ops.quantized.add_relu: add_relu}
ADDITIONS = tuple(_BY_KERNEL.values())


def use_additions_of_any_form(converted: GraphModule) -> None:
    """Let additions of an int8 network take inputs of any scale and of shapes that broadcast."""
    for node in converted.graph.nodes:
        node.target = _BY_KERNEL.get(node.target, node.target)
    converted.recompile()
