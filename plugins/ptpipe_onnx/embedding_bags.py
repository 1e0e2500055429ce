"""Embedding bags of one length as lookups and a sum, a mean or a maximum.

torch's exporter writes each as a loop over the bags: 32 bags of 64 indices take 337 us in place of 21.

Shape legend: B bags, L indices of a bag, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def embedding_bag_replacements(network: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return what computes the same, by layer. Those that rescale their rows (`max_norm`) have no ONNX form."""
    return {
        layer: _Bags(layer)
        for layer in network.modules()
        if type(layer) is nn.EmbeddingBag and layer.max_norm is None and layer is not network
    }


class _Bags(nn.Module):
    """Reduces the rows of each bag; calls the layer itself for bags of any length."""

    def __init__(self, layer: nn.EmbeddingBag) -> None:
        super().__init__()
        self.weight = layer.weight
        self.mode, self.padding_idx = layer.mode, layer.padding_idx
        self._layer = [layer]  # no submodule: parameters keep their names

    def forward(self, input: torch.Tensor, offsets: Any = None, per_sample_weights: Any = None) -> torch.Tensor:
        """Return what the layer does, (B, F)."""
        if input.dim() != 2:
            result: torch.Tensor = self._layer[0](input, offsets, per_sample_weights)
            return result
        rows_BLF = nn.functional.embedding(input, self.weight)
        if per_sample_weights is not None:
            rows_BLF = rows_BLF * per_sample_weights[..., None]
        if self.padding_idx is None:
            return rows_BLF.amax(1) if self.mode == "max" else getattr(rows_BLF, self.mode)(1)
        counts_BL1 = (input != self.padding_idx)[..., None]
        num_B1 = counts_BL1.sum(1)
        if self.mode == "max":
            largest_BF = rows_BLF.masked_fill(~counts_BL1, torch.finfo(rows_BLF.dtype).min).amax(1)
            return largest_BF.masked_fill(num_B1 == 0, 0.0)
        sums_BF = (rows_BLF * counts_BL1).sum(1)
        return sums_BF / num_B1.clamp(min=1) if self.mode == "mean" else sums_BF
