"""Quantization parameters of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ptpipe_onnx.graph import Array, constant


@dataclass(frozen=True)
class Grid:
    """Per-tensor quantization parameters; a value is (integer - zero point) * scale."""

    scale: np.float32
    zero_point: int
    dtype: np.dtype[np.generic]

    @classmethod
    def of(cls, node: ir.Node) -> Grid | None:
        """Return the grid of a QuantizeLinear or DequantizeLinear; None if it is per channel or not constant."""
        scale, zero_point = (constant(value) for value in node.inputs[1:3])
        if scale is None or zero_point is None or scale.size != 1:
            return None
        return cls(np.float32(scale.item()), int(zero_point.item()), zero_point.dtype)

    @classmethod
    def from_torch(cls, scale: Any, zero_point: Any, dtype: Any) -> Grid:
        """Return the grid of a scale, a zero point and an integer type of torch."""
        return cls(np.float32(scale), int(zero_point), np.dtype(str(dtype).removeprefix("torch.")))

    def __str__(self) -> str:
        return f"scale {self.scale:.9g}, zero point {self.zero_point}, {self.dtype}"

    @property
    def limits(self) -> tuple[int, int]:
        """Minimum and maximum integer."""
        info = np.iinfo(self.dtype)  # type: ignore[type-var]  # an integer type, as ONNX demands of a zero point
        return int(info.min), int(info.max)

    def integer(self, value: float) -> int:
        """Quantize a number as QuantizeLinear does: rounded half to even, saturated."""
        return int(self.integers(np.float32(value)))

    def integers(self, values: Array | np.float32) -> Array:
        """Quantize an array as QuantizeLinear does."""
        scaled = np.rint(np.asarray(values, np.float32) / self.scale) + np.float32(self.zero_point)
        integers: Array = np.clip(scaled, *self.limits).astype(self.dtype)
        return integers
