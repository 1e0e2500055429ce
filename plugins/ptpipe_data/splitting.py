"""Draw val and calibration, and make small experiments smaller. What is drawn is a function of the seed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptpipe import StageError
from ptpipe_torch.data.data import Split

if TYPE_CHECKING:
    from ptpipe_data import SplitConfig


def draw_splits(
    train: Split,
    test: Split,
    config: SplitConfig,
    seed: int,
    *,
    val: Split | None = None,
    enlarge: Callable[[Split], Split] | None = None,
) -> dict[str, Split]:
    """Splits by name. Each draw has a stream of its own: changing one size leaves the other splits as they are.

    `val`: where the data set comes with one; otherwise it is taken from `train`. `enlarge`: done to what is left to
    train on, before it is limited to `train_size`. Raises StageError where the sizes can't be had.
    """
    if val is None:
        train, val = set_aside(train, config.val_size, seed, "val")
    train = enlarge(train) if enlarge else train
    train = _at_most(train, config.train_size, seed, "train")
    source = train if config.calibration_from == "train" else val
    if config.calibration_size and not len(source):
        raise StageError(f"calibration_from: {config.calibration_from}, but that split is empty")
    return {
        "train": train,
        "val": val,
        "test": _at_most(test, config.test_size, seed, "test"),
        "calibration": _at_most(source, config.calibration_size, seed, "calibration"),
    }


def set_aside(pool: Split, size: float, seed: int, name: str) -> tuple[Split, Split]:
    """What is left, and what was drawn for the split `name`: a share below 1 of the pool, or a number of samples.

    Raises StageError where nothing would be left.
    """
    num = num_samples(size, len(pool))
    if num >= len(pool):
        raise StageError(f"{name}_size: {size:g} leaves nothing of {len(pool)} samples to train on")
    order = _order(len(pool), seed, name)
    return pool.subset(np.sort(order[num:])), pool.subset(np.sort(order[:num]))


def num_samples(size: float, available: int) -> int:
    """The number that an option means: a share below 1, or a number already."""
    return round(size * available) if size < 1 else int(size)


def _at_most(pool: Split, size: float | None, seed: int, name: str) -> Split:
    if size is None:
        return pool
    return pool.subset(np.sort(_order(len(pool), seed, name)[: num_samples(size, len(pool))]))


def _order(num: int, seed: int, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    stream = ("val", "train", "test", "calibration").index(name)
    return np.random.default_rng((seed, stream)).permutation(num)
