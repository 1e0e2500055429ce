"""Data sets of one image and its class: the columns `images` and `labels`.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptpipe import Context
from ptpipe_data.scratch_arrays import scratch_arrays
from ptpipe_torch import ArrayColumn, Column, DatasetInfo, ImageFileColumn, ImageInfo, Resizing, Split, Task

if TYPE_CHECKING:
    from ptpipe_data.image_config import EncodedImageConfig

_IMAGES, _LABELS = "images", "labels"
_CHUNK_IMAGES = 64


def labelled_images(ids: npt.NDArray[np.str_], images: Column, labels_N: npt.NDArray[np.int64]) -> Split:
    """Return a split. `images`: pixels, uint8 (N, H, W, C)."""
    return Split(ids, {_IMAGES: images}, {_LABELS: ArrayColumn(labels_N)})


def images_of(split: Split) -> Column:
    """Return the column of pixels, uint8 (N, H, W, C)."""
    return split.inputs[_IMAGES]


def labels_of(split: Split) -> npt.NDArray[np.int64]:
    """Return the number of each image's class, int64 (N,)."""
    return split.targets[_LABELS].values()


def image_files(root: Path, paths: Sequence[str], config: EncodedImageConfig) -> ImageFileColumn:
    """Return images that are decoded when they are taken. `paths`: relative to `root`."""
    paths_N = np.array([path.encode() for path in paths], dtype=np.bytes_)
    return ImageFileColumn(root, paths_N, config.image_size, config.shorter_side, config.channels, config.max_pixels)


def decode_images(columns: Mapping[str, Column], ctx: Context) -> dict[str, ArrayColumn]:
    """Return the pixels of image files, uint8 (N, H, W, C), as arrays that are mapped from the scratch folder."""
    decoded = {}
    with scratch_arrays(ctx.scratch) as make_array:
        for name, images in columns.items():
            pixels_NHWC = make_array(name, (len(images), *images.take(np.arange(1)).shape[1:]))
            for start in range(0, len(images), _CHUNK_IMAGES):
                stop = min(start + _CHUNK_IMAGES, len(images))
                pixels_NHWC[start:stop] = images.take(np.arange(start, stop))
                ctx.progress(stop, len(images), "images")
            decoded[name] = ArrayColumn(pixels_NHWC)
    return decoded


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
