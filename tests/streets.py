"""Data sets of made-up street scenes: a class for each pixel, which its brightness tells.

Shape legend: N images, H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ptpipe_torch import ArrayColumn, Data, DatasetInfo, ImageInfo, LoaderOptions, Segmentation, Split

CLASSES = ("sky", "road", "car")


def street_data(
    shape_CHW: tuple[int, int, int] = (3, 32, 48),
    *,
    num: Sequence[int] = (16, 8, 8),
    class_names: Sequence[str] = CLASSES,
) -> Data:
    """Return images and masks in the splits train, test and calibration, in batches of 8."""
    channels, height, width = shape_CHW
    rng = np.random.default_rng(0)
    splits = {}
    for name, size in zip(("train", "test", "calibration"), num, strict=True):
        fields_NHW = (
            rng.integers(0, len(class_names), (size, 4, 4)).repeat(-(-height // 4), 1).repeat(-(-width // 4), 2)
        )
        masks_NHW = fields_NHW[:, :height, :width].astype(np.uint8)
        noise_NHWC = rng.integers(0, 40, (size, height, width, channels))
        pixels_NHWC = (masks_NHW[..., None] * (200 // len(class_names)) + noise_NHWC).astype(np.uint8)
        ids = np.array([f"{name}/{row}" for row in range(size)])
        splits[name] = Split(ids, {"images": ArrayColumn(pixels_NHWC)}, {"masks": ArrayColumn(masks_NHW)})
    images = ImageInfo(shape_CHW=shape_CHW, mean=(0.4,) * channels, std=(0.3,) * channels)
    task = Segmentation(class_names=tuple(class_names), shape_HW=(height, width))
    return Data(DatasetInfo("streets", {"images": images}, task), splits, LoaderOptions(batch_size=8))
