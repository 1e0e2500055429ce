"""Per-channel mean and standard deviation of pixels, for normalization.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import numpy as np

from ptpipe_torch import Column

_CHUNK_BYTES = 4 << 20


def channel_stats(images: Column) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of pixels scaled to [0, 1], rounded to four digits.

    Computed from histograms of the byte values: integers, so the result doesn't depend on the order of summation. A
    constant channel gets the standard deviation 1.
    """
    _, height, width, channels = images.take(np.arange(1)).shape
    counts_CV = np.zeros((channels, 256), dtype=np.int64)
    step = max(1, _CHUNK_BYTES // (height * width * channels))
    for start in range(0, len(images), step):
        pixels_NHWC = images.take(np.arange(start, min(start + step, len(images))))
        for channel in range(channels):
            counts_CV[channel] += np.bincount(pixels_NHWC[..., channel].ravel(), minlength=256)
    values_V = np.arange(256) / 255
    fractions_CV = counts_CV / counts_CV.sum(axis=1, keepdims=True)
    mean_C = fractions_CV @ values_V
    std_C = np.sqrt(np.maximum(fractions_CV @ values_V**2 - mean_C**2, 0))
    return (
        tuple(round(float(mean), 4) for mean in mean_C),
        tuple(round(float(std), 4) or 1.0 for std in std_C),
    )
