from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe import StageError
from ptpipe_data.config import SplitConfig
from ptpipe_data.splitting import draw_splits, num_samples
from ptpipe_torch import ArrayColumn, Data, Split

from ...datasets import image_info, image_split

INFO = image_info("x", ("0", "1", "2"), (1, 1, 1), (0.5,), (0.5,))


def pool(name: str, num: int) -> Split:
    pixels = np.arange(num, dtype=np.uint8).reshape(num, 1, 1, 1)
    return image_split(np.array([f"{name}/{i:03d}" for i in range(num)]), np.arange(num) % 3, ArrayColumn(pixels))


def drawn(config: SplitConfig, seed: int = 7, num_train: int = 100, num_test: int = 30) -> Data:
    return Data(INFO, draw_splits(pool("train", num_train), pool("test", num_test), config, seed))


def ids(data: Data, name: str) -> list[str]:
    return data.splits[name].ids.tolist()


SIZES = st.one_of(st.integers(0, 250).map(float), st.floats(0, 1, exclude_max=True))


@settings(deadline=None)
@given(
    num_train=st.integers(1, 200),
    num_test=st.integers(0, 50),
    val_size=SIZES,
    calibration_size=SIZES,
    calibration_from=st.sampled_from(["train", "val"]),
    train_size=st.none() | SIZES,
    test_size=st.none() | SIZES,
    seed=st.integers(0, 2**63),
)
def test_invariants(num_train: int, num_test: int, seed: int, **options: object) -> None:
    config = SplitConfig(**options)
    try:
        data = drawn(config, seed, num_train, num_test)
    except StageError as error:
        num_val = num_samples(config.val_size, num_train)
        num_left = num_train - num_val
        empty = not (num_samples(config.train_size, num_left) if config.train_size is not None else num_left)
        source_empty = empty if config.calibration_from == "train" else not num_val
        assert num_val >= num_train or source_empty, error
        return
    train, val, test, calibration = (set(ids(data, name)) for name in ("train", "val", "test", "calibration"))
    assert not train & val and not test & (train | val | calibration)
    assert calibration <= (train if config.calibration_from == "train" else val)
    assert train | val <= {f"train/{i:03d}" for i in range(num_train)}
    assert len(data.splits["val"]) == num_samples(config.val_size, num_train)
    if config.train_size is None:
        assert len(train) == num_train - len(val)
    for split in data.splits.values():  # ids, labels and pixels stay together
        numbers = np.array([int(id_.partition("/")[2]) for id_ in split.ids], dtype=np.int64)
        np.testing.assert_array_equal(split.targets["labels"].values(), numbers % 3)
        np.testing.assert_array_equal(split.inputs["images"].take(np.arange(len(split))).ravel(), numbers)
    again = drawn(config, seed, num_train, num_test)
    assert all(ids(again, name) == ids(data, name) for name in data.splits)


def test_seed_decides() -> None:
    config = SplitConfig(calibration_size=20)
    assert ids(drawn(config, 1), "val") != ids(drawn(config, 2), "val")
    assert ids(drawn(config, 1), "calibration") != ids(drawn(config, 2), "calibration")
    assert ids(drawn(config, 1), "test") == ids(drawn(config, 2), "test")


def test_one_size_leaves_the_other_splits_alone() -> None:
    base = drawn(SplitConfig(calibration_size=20))
    other = drawn(SplitConfig(calibration_size=30, test_size=5))
    assert ids(base, "val") == ids(other, "val") and ids(base, "train") == ids(other, "train")
    assert set(ids(base, "calibration")) < set(ids(other, "calibration"))


def test_sizes() -> None:
    data = drawn(SplitConfig(val_size=0.1, train_size=25, test_size=0.5, calibration_size=0.2))
    assert [len(split) for split in data.splits.values()] == [25, 10, 15, 5]
    data = drawn(SplitConfig(val_size=40, calibration_from="val", calibration_size=2000))
    assert [len(split) for split in data.splits.values()] == [60, 40, 30, 40]
    assert len(drawn(SplitConfig(calibration_size=0)).splits["calibration"]) == 0


def test_refusals() -> None:
    with pytest.raises(StageError, match="val_size: 100 leaves nothing of 100 samples"):
        drawn(SplitConfig(val_size=100))
    with pytest.raises(StageError, match="calibration_from: val, but that split is empty"):
        drawn(SplitConfig(val_size=0, calibration_from="val"))
