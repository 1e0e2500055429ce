"""Data sets of pictures and their classes.

Shape legend: N pictures, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ptpipe_torch import ArrayColumn, Classification, Column, DatasetInfo, ImageInfo, Split


def image_info(
    name: str, class_names: Sequence[str], shape_CHW: tuple[int, int, int], mean: Sequence[float], std: Sequence[float]
) -> DatasetInfo:
    images = ImageInfo(shape_CHW=shape_CHW, mean=tuple(mean), std=tuple(std))
    return DatasetInfo(name, {"images": images}, Classification(class_names=tuple(class_names)))


def image_split(ids: npt.NDArray[np.str_], labels_N: npt.NDArray[np.int64], images: Column) -> Split:
    return Split(ids, {"images": images}, {"labels": ArrayColumn(labels_N)})


def labels_of(split: Split) -> npt.NDArray[np.int64]:
    return split.targets["labels"].values()


def class_names_of(info: DatasetInfo) -> tuple[str, ...]:
    assert isinstance(info.task, Classification)
    return info.task.class_names
