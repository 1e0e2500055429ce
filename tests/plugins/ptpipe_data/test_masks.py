from __future__ import annotations

import numpy as np
import pytest

from ptpipe import Context, StageError
from ptpipe_data.masks import count_classes
from ptpipe_torch import ArrayColumn


def counts(ctx: Context, *values: int, names: tuple[str, ...] = ("sky", "road"), ignore: int = 255) -> list[int]:
    masks_NHW = np.array(values, dtype=np.uint8).reshape(1, 1, -1)
    return count_classes(ArrayColumn(masks_NHW), names, ignore, ctx).tolist()


def test_masks_without_two_classes_teach_nothing(ctx: Context) -> None:
    with pytest.raises(
        StageError, match=r"have nothing but the class 'sky' and the ignored value 255 .*: if 255 is a class, number"
    ):
        counts(ctx, 0, 255, 0)
    with pytest.raises(StageError, match=r"have nothing but the ignored value 255"):
        counts(ctx, 255, 255)


def test_classes_without_pixels_are_reported(ctx: Context, events) -> None:
    assert counts(ctx, 0, 1, 1, 255) == [1, 2] and not events.notices
    assert counts(ctx, 1, 1, 1, names=("sky", "road", "car")) == [0, 3, 0]
    assert events.notices == ["train has nothing of 2 of 3 classes: sky, car"]


def test_a_class_that_is_ignored_is_not_counted(ctx: Context, events) -> None:
    names = ("void", "road", "car")
    assert counts(ctx, 0, 1, 2, 2, names=names, ignore=0) == [0, 1, 2] and not events.notices
    with pytest.raises(StageError, match=r"have nothing but the class 'road' and the ignored value 0 "):
        counts(ctx, 0, 1, names=names, ignore=0)
