from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe import StageError
from ptpipe_data.config import SplitConfig
from ptpipe_data.splitting import draw_missing_splits, draw_splits, num_samples
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


def group_drawn(groups: list[int], order: list[int], config: SplitConfig, seed: int) -> dict[str, set[str]]:
    """Return the ids of each split of rows that lie in this order in a file."""
    ids = np.array([f"{row}:{groups[row]}" for row in order], dtype=np.str_)
    rows = Split(ids, {}, {"row": ArrayColumn(np.array(order))})
    numbers = np.array(groups)
    splits = draw_missing_splits(
        {"train": rows}, config, seed, test_fraction=0.2, groups=lambda of: numbers[of.targets["row"].values()]
    )
    return {name: {*of.ids.tolist()} for name, of in splits.items()}


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.randoms(), SIZES, SIZES, st.integers(0, 2**63))
def test_groups_stay_together(groups: list[int], random: Random, val_size: float, test_size: float, seed: int) -> None:
    order = random.sample(range(len(groups)), len(groups))
    config = SplitConfig(val_size=val_size, test_size=test_size)
    try:
        splits = group_drawn(groups, [*range(len(groups))], config, seed)
    except StageError as error:
        with pytest.raises(StageError, match=f"^{re.escape(str(error))}$"):
            group_drawn(groups, order, config, seed)
        return
    train, val, test = (splits[name] for name in ("train", "val", "test"))
    assert sorted([*train, *val, *test]) == sorted(f"{row}:{group}" for row, group in enumerate(groups)), "each once"
    found = [{id_.partition(":")[2] for id_ in ids} for ids in (train, val, test)]
    assert sum(map(len, found)) == len({*groups}), "no group is in two splits"
    largest = max(map(groups.count, groups))
    assert 2 * abs(len(test) - num_samples(test_size, len(groups))) <= largest
    assert 2 * abs(len(val) - num_samples(val_size, len(groups) - len(test))) <= largest
    assert group_drawn(groups, order, config, seed) == splits, "whatever the order of the rows"


def test_groups_that_are_too_large_or_too_few() -> None:
    rows = [*range(30)]
    with pytest.raises(
        StageError, match=r"^test_size: 0.2 means 6 of 30 rows, which stay together in groups of 30 to 30 "
    ):
        group_drawn([0] * 30, rows, SplitConfig(), 1)
    with pytest.raises(
        StageError, match=r"^val_size: 0.05 means 1 of 20 rows, .* in groups of 10 to 10 .*: raise or lower"
    ):
        group_drawn([0] * 10 + [1] * 10 + [2] * 10, rows, SplitConfig(test_size=10), 1)
    splits = group_drawn([0] * 10 + [1] * 10 + [2] * 10, rows, SplitConfig(test_size=10, val_size=0.5), 1)
    assert [len(ids) for ids in splits.values()] == [10, 10, 10, 10]
