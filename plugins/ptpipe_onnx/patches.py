"""`F.unfold` in ONNX: a slice for each position of the kernel, side by side.

torch's exporter writes it as lookups, whose indices lie along two axes: 8 times as long as the slices.

Shape legend: N samples, C channels, H and W height and width, K positions of a kernel, L of its places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

_LAST = np.iinfo(np.int64).max


def translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return what the exporter makes of the operators in this module."""
    return {torch.ops.aten.im2col.default: _translated}


def _translated(
    x: Any, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Any:
    """Return (N, C K, L) for (N, C, H, W); K is by row and column, as L is."""
    from onnxscript import opset18 as op

    def numbers(*values: int) -> Any:
        return op.Constant(value_ints=list(values))

    num_channels = x.shape[1]
    if any(padding):
        x = op.Pad(x, numbers(0, 0, *padding, 0, 0, *padding))
    parts = []
    for place in product(*map(range, kernel_size)):
        starts = [index * step for index, step in zip(place, dilation, strict=True)]
        behind = [(size - 1 - index) * step for size, index, step in zip(kernel_size, place, dilation, strict=True)]
        ends = [-number if number else _LAST for number in behind]
        part = op.Slice(x, numbers(*starts), numbers(*ends), numbers(2, 3), numbers(*stride))
        parts.append(op.Unsqueeze(part, numbers(2)))
    return op.Reshape(op.Concat(*parts, axis=2), numbers(0, num_channels * len(parts), -1))
