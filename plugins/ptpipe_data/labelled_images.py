"""Data sets of one image and its class: the columns `images` and `labels`.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ptpipe_torch import ArrayColumn, Column, DatasetInfo, ImageInfo, Resizing, Split, Task

_IMAGES, _LABELS = "images", "labels"


def labelled_images(ids: npt.NDArray[np.str_], images: Column, labels_N: npt.NDArray[np.int64]) -> Split:
    """Return a split. `images`: pixels, uint8 (N, H, W, C)."""
    return Split(ids, {_IMAGES: images}, {_LABELS: ArrayColumn(labels_N)})


def images_of(split: Split) -> Column:
    """Return the column of pixels, uint8 (N, H, W, C)."""
    return split.inputs[_IMAGES]


def labels_of(split: Split) -> npt.NDArray[np.int64]:
    """Return the number of each image's class, int64 (N,)."""
    return split.targets[_LABELS].values()


def image_info(
    name: str,
    task: Task,
    images: Column,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    resizing: Resizing | None = None,
) -> DatasetInfo:
    """Return the facts of a data set. `images`: of any split that has some."""
    _, height, width, channels = images.take(np.arange(1)).shape
    info = ImageInfo(shape_CHW=(channels, height, width), mean=tuple(mean), std=tuple(std), resizing=resizing)
    return DatasetInfo(name, {_IMAGES: info}, task)
