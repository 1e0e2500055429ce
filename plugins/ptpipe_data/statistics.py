"""Mean and spread of pixels, exactly.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import numpy as np

from ptpipe_torch.data.images import Images

_CHUNK_BYTES = 4 << 20


def channel_statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of pixels scaled to [0, 1], to four digits.

    Worked out from counts of byte values, so the result doesn't depend on the order of summation. A channel
    that never changes is given the spread 1.
    """
    _, height, width, channels = images.take(np.arange(1)).shape
    counts_CV = np.zeros((channels, 256), dtype=np.int64)
    step = max(1, _CHUNK_BYTES // (height * width * channels))
    for start in range(0, len(images), step):
        pixels_NHWC = images.take(np.arange(start, min(start + step, len(images))))
        for channel in range(channels):
            counts_CV[channel] += np.bincount(pixels_NHWC[..., channel].ravel(), minlength=256)
    values_V = np.arange(256) / 255
    shares_CV = counts_CV / counts_CV.sum(axis=1, keepdims=True)
    mean_C = shares_CV @ values_V
    std_C = np.sqrt(np.maximum(shares_CV @ values_V**2 - mean_C**2, 0))
    return (
        tuple(round(float(mean), 4) for mean in mean_C),
        tuple(round(float(std), 4) or 1.0 for std in std_C),
    )
