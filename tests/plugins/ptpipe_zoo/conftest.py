from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ptpipe import Context
from ptpipe.events import Event
from ptpipe_torch import ArrayColumn, Data, Split, Unlabeled

from ...datasets import image_info, image_split

MakeData = Callable[..., Data]


@pytest.fixture
def make_data() -> MakeData:
    """Random images of a shape, in a number of classes."""

    def make(shape_CHW: tuple[int, int, int] = (1, 12, 12), num_classes: int = 5, num_images: int = 6) -> Data:
        channels, height, width = shape_CHW
        rng = np.random.default_rng(0)
        pixels_NHWC = rng.integers(0, 256, (num_images, height, width, channels), dtype=np.uint8)
        info = image_info("noise", tuple(map(str, range(num_classes))), shape_CHW, (0.5,) * channels, (0.3,) * channels)
        ids = np.array([f"train/{number}" for number in range(num_images)])
        labels_N = rng.integers(0, num_classes, num_images)
        return Data(info, {"train": image_split(ids, labels_N, ArrayColumn(pixels_NHWC))})

    return make


@pytest.fixture
def unlabeled(make_data: MakeData) -> Data:
    """The same images without classes."""
    data = make_data()
    splits = {name: Split(split.ids, split.inputs, {}) for name, split in data.splits.items()}
    return Data(replace(data.info, task=Unlabeled()), splits)


@pytest.fixture
def events() -> list[Event]:
    """The events of the stage."""
    return []


@pytest.fixture
def ctx(tmp_path: Path, events: list[Event]) -> Context:
    return Context(stage_id="net", kind="model.test", seed=7, scratch=tmp_path, _tell=events.append)
