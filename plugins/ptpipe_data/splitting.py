"""Train, val, test and calibration splits, drawn at random as a function of the seed alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ptpipe import StageError
from ptpipe_torch.data.data import Split

if TYPE_CHECKING:
    from ptpipe_data.config import SplitConfig

Groups: TypeAlias = Callable[[Split], npt.NDArray[np.int64]]
"""Returns the number of the group of each sample, (N,), which depends on the group's name alone."""


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
    found: Mapping[str, Split], config: SplitConfig, seed: int, *, test_fraction: float, groups: Groups | None = None
) -> dict[str, Split]:
    """Return the splits of a data set that has samples for `train`, and for `val` and `test` or not.

    `test_fraction`: held out of `train` for test where there is none and the config names no size. `groups`: what is
    held out of train, is held out in whole groups.
    """
    train, val, test = found["train"], found.get("val"), found.get("test")
    if test is None:
        size = test_fraction if config.test_size is None else config.test_size
        train, test = hold_out(train, size, seed, "test", groups)
        config = config.model_copy(update={"test_size": None})
    if val is None:
        train, val = hold_out(train, config.val_size, seed, "val", groups)
    return draw_splits(train, test, config, seed, val=val)


def hold_out(samples: Split, size: float, seed: int, name: str, groups: Groups | None = None) -> tuple[Split, Split]:
    """Return what is left of `samples`, and what was drawn for the split `name`: a fraction below 1, or a number.

    With `groups`, whose rows stay together, as nearly so many. Raises StageError where nothing would be left, or no
    group is small enough.
    """
    num = num_samples(size, len(samples))
    if num >= len(samples):
        raise StageError(f"{name}_size: {size:g} leaves nothing of {len(samples)} samples to train on")
    if groups is None:
        order = _order(len(samples), seed, name)
        return samples.subset(np.sort(order[num:])), samples.subset(np.sort(order[:num]))
    _, numbers_N, counts = np.unique(groups(samples), return_inverse=True, return_counts=True)
    is_drawn_N = _drawn_groups(counts, num, seed, name)[numbers_N]
    if num and (not is_drawn_N.any() or is_drawn_N.all()):
        raise StageError(
            f"{name}_size: {size:g} means {num:,} of {len(samples):,} rows, which stay together in groups of "
            f"{counts.min():,} to {counts.max():,} (option `group`): raise or lower {name}_size, 0 for no {name}"
        )
    return samples.subset(np.flatnonzero(~is_drawn_N)), samples.subset(np.flatnonzero(is_drawn_N))


def _drawn_groups(counts: npt.NDArray[np.int64], num: int, seed: int, name: str) -> npt.NDArray[np.bool_]:
    """Return which groups, of `counts` samples, are drawn: in random order each that brings the sum nearer to `num`."""
    are_drawn, left = np.zeros(len(counts), dtype=np.bool_), num
    for group in _order(len(counts), seed, name).tolist():
        if counts[group] < 2 * left:
            are_drawn[group] = True
            left -= int(counts[group])
    return are_drawn


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
