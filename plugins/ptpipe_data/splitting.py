"""Train, val, test and calibration splits, drawn at random as a function of the seed alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ptpipe import StageError
from ptpipe_torch.data.data import Split

if TYPE_CHECKING:
    from ptpipe_data.config import SplitConfig


def draw_splits(
    train: Split,
    test: Split,
    config: SplitConfig,
    seed: int,
    *,
    val: Split | None = None,
    enlarge: Callable[[Split], Split] | None = None,
) -> dict[str, Split]:
    """Return the splits by name. Each has its own random stream: changing one size leaves the others unchanged.

    Args:
        train: all training samples.
        test: all test samples.
        config: sizes of the splits.
        seed: the manifest's.
        val: the data set's own val split; None holds one out from `train`.
        enlarge: applied to what is left of `train`, before it is limited to `train_size`.

    Raises StageError where val leaves nothing to train on, or calibration would be drawn from an empty split.
    """
    if val is None:
        train, val = hold_out(train, config.val_size, seed, "val")
    train = enlarge(train) if enlarge else train
    train = _limit(train, config.train_size, seed, "train")
    source = train if config.calibration_from == "train" else val
    if config.calibration_size and not len(source):
        raise StageError(f"calibration_from: {config.calibration_from}, but that split is empty")
    return {
        "train": train,
        "val": val,
        "test": _limit(test, config.test_size, seed, "test"),
        "calibration": _limit(source, config.calibration_size, seed, "calibration"),
    }


def draw_missing_splits(
    found: Mapping[str, Split], config: SplitConfig, seed: int, *, test_fraction: float
) -> dict[str, Split]:
    """Return the splits of a data set that has samples for `train`, and for `val` and `test` or not.

    `test_fraction`: held out of `train` for test where there is none and the config names no size.
    """
    train, val = found["train"], found.get("val")
    if "test" in found:
        return draw_splits(train, found["test"], config, seed, val=val)
    train, test = hold_out(train, test_fraction if config.test_size is None else config.test_size, seed, "test")
    return draw_splits(train, test, config.model_copy(update={"test_size": None}), seed, val=val)


def hold_out(samples: Split, size: float, seed: int, name: str) -> tuple[Split, Split]:
    """Return what is left of `samples`, and what was drawn for the split `name`: a fraction below 1, or a number.

    Raises StageError where nothing would be left.
    """
    num = num_samples(size, len(samples))
    if num >= len(samples):
        raise StageError(f"{name}_size: {size:g} leaves nothing of {len(samples)} samples to train on")
    order = _order(len(samples), seed, name)
    return samples.subset(np.sort(order[num:])), samples.subset(np.sort(order[:num]))


def num_samples(size: float, available: int) -> int:
    """Return the number of samples that an option means: a fraction below 1, or a number already."""
    return round(size * available) if size < 1 else int(size)


def _limit(samples: Split, size: float | None, seed: int, name: str) -> Split:
    if size is None:
        return samples
    return samples.subset(np.sort(_order(len(samples), seed, name)[: num_samples(size, len(samples))]))


def _order(num: int, seed: int, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    stream = ("val", "train", "test", "calibration").index(name)
    return np.random.default_rng((seed, stream)).permutation(num)
