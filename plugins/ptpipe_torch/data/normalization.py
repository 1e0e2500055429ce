"""Normalization of whole batches of pixels.

Shape legend: B images of a batch, C channels, H height, W width, P = H * W * C.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class Normalization:
    """Bytes to float32: pixel * scale + offset per channel."""

    def __init__(self, scale_C: Sequence[float], offset_C: Sequence[float]) -> None:
        self._scale_C, self._offset_C = (np.asarray(values, dtype=np.float64) for values in (scale_C, offset_C))
        self._rows: dict[tuple[torch.device, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, pixels_BHWC: torch.Tensor, channels_last: bool) -> torch.Tensor:
        """Return float32 of shape (B, C, H, W) in that memory format, on the device of the pixels."""
        num, height, width, channels = pixels_BHWC.shape
        if not channels_last:
            pixels_BHWC = pixels_BHWC.permute(0, 3, 1, 2).contiguous()
        scale_P, offset_P = self._per_pixel(pixels_BHWC.device, height * width, channels_last)
        # Scales are repeated over the whole image, so that the inner loop is long in either layout.
        values_BP = pixels_BHWC.reshape(num, height * width * channels).float()
        torch.addcmul(offset_P, values_BP, scale_P, out=values_BP)
        if channels_last:
            return values_BP.view(num, height, width, channels).permute(0, 3, 1, 2)
        return values_BP.view(num, channels, height, width)

    def _per_pixel(
        self, device: torch.device, num_pixels: int, channels_last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = (device, channels_last)
        if key not in self._rows or len(self._rows[key][0]) != num_pixels * len(self._scale_C):
            spread = np.tile if channels_last else np.repeat
            with torch.inference_mode(False):  # cached: a later caller may be training
                scale_P, offset_P = (
                    torch.from_numpy(spread(values_C, num_pixels).astype(np.float32)).to(device)
                    for values_C in (self._scale_C, self._offset_C)
                )
            self._rows[key] = scale_P, offset_P
        return self._rows[key]
