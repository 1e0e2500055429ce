"""The operators that quantize and dequantize in a reference network; torch registers them when it imports a module."""

from __future__ import annotations

import torch

from ptpipe_torch.int8.engine import deprecations_silenced

with deprecations_silenced():
    import torch.ao.quantization.fx._decomposed  # registers them

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
