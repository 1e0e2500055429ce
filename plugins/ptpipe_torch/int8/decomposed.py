"""Operators that quantize and dequantize plain integers; torch registers them when it imports a module."""

from __future__ import annotations

import torch

from ptpipe_torch.int8.engine import deprecations_silenced

with deprecations_silenced():
    import torch.ao.quantization.fx._decomposed  # registers them

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
DEQUANTIZE_CHANNELS = torch.ops.quantized_decomposed.dequantize_per_channel.default
CHOOSE_LEVELS = torch.ops.quantized_decomposed.choose_qparams.tensor
"""Chooses scale and zero point for the range of a tensor, at run time."""
QUANTIZE_AT = torch.ops.quantized_decomposed.quantize_per_tensor.tensor
"""With a scale and a zero point that are tensors, as `CHOOSE_LEVELS` returns them."""
DEQUANTIZE_AT = torch.ops.quantized_decomposed.dequantize_per_tensor.tensor
