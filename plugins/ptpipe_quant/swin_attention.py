"""torchvision's window attention (Swin, Swin v2) as its layers and products of activations, which have int8 forms.

torchvision passes the bare weights of the layers to a function, which is one operator of a traced network.

Source: Z. Liu et al., Swin Transformer, ICCV 2021, section 3.2; Swin Transformer V2, CVPR 2022, section 3.2 (cosine
attention). Shape legend: N batch, Y height, X width, C channels; B windows of the whole batch, W windows of an image,
T tokens of a window, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from ptpipe_torch.int8.fx import pad_with_input

F = nn.functional

_HIDDEN = -100.0
"""As torchvision has it."""
_MAX_FACTOR = 100.0


def window_weights(
    scores_BHTT: torch.Tensor, factor: torch.Tensor | float, bias: torch.Tensor, mask_WTT: torch.Tensor | None
) -> torch.Tensor:
    """Return the weights of the values, float32 (B, H, T, T)."""
    scores_BHTT = scores_BHTT * factor + bias
    if mask_WTT is not None:
        scores_NWHTT = scores_BHTT.reshape(-1, len(mask_WTT), *scores_BHTT.shape[1:])
        scores_BHTT = (scores_NWHTT + mask_WTT.unsqueeze(1)).flatten(0, 1)
    return F.softmax(scores_BHTT, -1)


torch.fx.wrap("window_weights")
torch.fx.wrap("pad_with_input")


class _WindowAttention(nn.Module):
    """Mixin of torchvision's layer with another forward pass. Sizes of the image become constants."""

    window_size: list[int]
    shift_size: list[int]
    num_heads: int
    attention_dropout: float
    dropout: float
    qkv: nn.Linear
    proj: nn.Linear
    get_relative_position_bias: Any

    def forward(self, x_NYXC: torch.Tensor) -> torch.Tensor:
        """Compute the attention of each token to those of its window."""
        _, height, width, num_channels = x_NYXC.shape
        sizes = [-(-size // window) * window for size, window in zip((height, width), self.window_size, strict=True)]
        shifts = [
            shift if size > window else 0
            for shift, size, window in zip(self.shift_size, sizes, self.window_size, strict=True)
        ]
        is_padded, is_shifted = sizes != [height, width], any(shifts)
        x = (
            pad_with_input(x_NYXC, (0, 0, 0, sizes[1] - width, 0, sizes[0] - height), "constant")
            if is_padded
            else x_NYXC
        )
        if is_shifted:
            x = torch.roll(x, shifts=[-shift for shift in shifts], dims=[1, 2])
        x = self._attend(self._windows(x, sizes, num_channels), _mask(sizes, self.window_size, shifts), num_channels)
        x = self._image(x, sizes, num_channels)
        if is_shifted:
            x = torch.roll(x, shifts=shifts, dims=[1, 2])
        return x[:, :height, :width, :].contiguous() if is_padded else x

    def _windows(self, x: torch.Tensor, sizes: list[int], num_channels: int) -> torch.Tensor:
        """Return (B, T, C)."""
        rows, columns = self.window_size
        x = x.reshape(-1, sizes[0] // rows, rows, sizes[1] // columns, columns, num_channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, rows * columns, num_channels)

    def _image(self, x_BTC: torch.Tensor, sizes: list[int], num_channels: int) -> torch.Tensor:
        """Return (N, Y, X, C)."""
        rows, columns = self.window_size
        x = x_BTC.reshape(-1, sizes[0] // rows, sizes[1] // columns, rows, columns, num_channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, *sizes, num_channels)

    def _attend(self, x_BTC: torch.Tensor, mask_WTT: torch.Tensor | None, num_channels: int) -> torch.Tensor:
        qkv, num_tokens, size = self.qkv(x_BTC), math.prod(self.window_size), num_channels // self.num_heads
        query, key, value = (
            torch.narrow(qkv, 2, first, num_channels).reshape(-1, num_tokens, self.num_heads, size).permute(0, 2, 1, 3)
            for first in range(0, 3 * num_channels, num_channels)
        )
        factor: Any = size**-0.5
        if (logit_scale := getattr(self, "logit_scale", None)) is not None:
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
            factor = torch.clamp(logit_scale, max=math.log(_MAX_FACTOR)).exp()
        scores = torch.matmul(query, key.transpose(-2, -1))
        weights = window_weights(scores, factor, self.get_relative_position_bias(), mask_WTT)
        weights = F.dropout(weights, self.attention_dropout, self.training)
        attended = torch.matmul(weights, value).permute(0, 2, 1, 3)
        return F.dropout(self.proj(attended.reshape(-1, num_tokens, num_channels)), self.dropout, self.training)


def _mask(sizes: list[int], window: list[int], shifts: list[int]) -> torch.Tensor | None:
    """Return what is added to the scores, (W, T, T), to hide tokens that only the shift made neighbours."""
    if not any(shifts):
        return None
    regions_YX = torch.zeros(*sizes)
    number = 0
    for rows in _slices(window[0], shifts[0]):
        for columns in _slices(window[1], shifts[1]):
            regions_YX[rows, columns] = number
            number += 1
    regions = regions_YX.reshape(sizes[0] // window[0], window[0], sizes[1] // window[1], window[1])
    regions_WT = regions.permute(0, 2, 1, 3).reshape(-1, math.prod(window))
    return (regions_WT.unsqueeze(1) != regions_WT.unsqueeze(2)) * _HIDDEN


def _slices(window: int, shift: int) -> list[slice]:
    return [slice(0, -window), slice(-window, -shift), slice(-shift, None)]


def use_window_attention(module: nn.Module, leaves: Collection[str]) -> None:
    """Let torchvision's window attention call its layers, in place, except for those in `leaves`."""
    within = tuple(f"{leaf}." for leaf in leaves)
    for name, layer in module.named_modules():
        if is_window_attention(layer) and not f"{name}.".startswith(within):
            call_layers(layer)


def call_layers(layer: Any) -> None:
    """Let one layer of window attention call its layers, in place."""
    if _has_unbiased_keys(layer):
        _without_key_bias(layer.qkv.bias.data)
    type_: Any = type(layer)
    layer.__class__ = _traceable(type_)


def attention_with_unbiased_keys(module: nn.Module) -> list[str]:
    """Return the names of the layers of window attention of version 2, whose keys have no bias."""
    return [name for name, layer in module.named_modules() if is_window_attention(layer) and _has_unbiased_keys(layer)]


def keep_keys_unbiased(prepared: nn.Module, names: Sequence[str]) -> None:
    """Let no gradient reach the biases of keys, which stay zero in training, in the place of a prepared network."""
    for name in names:
        bias: Any = prepared.get_submodule(f"{name}.qkv").bias
        bias.register_hook(lambda gradient: _without_key_bias(gradient.clone()))


def _has_unbiased_keys(layer: Any) -> bool:
    return hasattr(layer, "logit_scale") and layer.qkv.bias is not None


def _without_key_bias(bias: torch.Tensor) -> torch.Tensor:
    """Set the middle third to zero, in place; return the bias."""
    num_channels = len(bias) // 3
    bias[num_channels : 2 * num_channels] = 0
    return bias


def is_window_attention(layer: nn.Module) -> bool:
    """Return whether a layer is torchvision's window attention."""
    # torchvision is not imported for two types.
    type_ = type(layer)
    is_torchvisions = type_.__module__ == "torchvision.models.swin_transformer"
    return is_torchvisions and type_.__name__ in ("ShiftedWindowAttention", "ShiftedWindowAttentionV2")


@cache
def _traceable(type_: Any) -> Any:
    return type(type_.__name__, (_WindowAttention, type_), {})
