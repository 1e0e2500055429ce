"""Samples of test whose inputs train has as well, so that a metric measures memory.

Shape legend: N samples of train, M of test, B of a part, V values of a sample.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ptpipe import Context
from ptpipe_torch import ArrayColumn, Column, RaggedColumn, Split
from ptpipe_torch.data.column import flatten

_MIN_SHARED, _MIN_FRACTION = 10, 0.01
"""Of test's samples: fewer are no notice."""
_MIN_TOKENS = 16
"""A shorter text may be written twice."""
_BY_CHANCE = 10
"""Copies are so many times as frequent as by chance."""
_PART_BYTES = 1 << 22
_MAX_VALUES = 1 << 28
"""That are compared in all; of samples with more, some values at random."""
_CHANCE_ROWS, _CHANCE_VALUES = 10_000, 64
_TEST_FILES, _TRAIN_FILES, _FILE_BYTES = 2000, 20_000, 1 << 16
"""That are read, and how much of the middle of each: so much, and the size, is hardly that of another image."""


def report_shared(splits: Mapping[str, Split], ctx: Context, *, may_repeat: bool) -> None:
    """Give a notice where samples of test, or without test of val, have inputs that train has as well.

    Inputs that repeat within train as often as between the splits do so by nature where they are short texts, where
    their columns' values make it likely, or where `may_repeat` says so: they are categories or whole numbers alone.
    """
    name = next((name for name in ("test", "val") if len(splits[name])), None)
    train, test = splits["train"], splits[name] if name else None
    if name is None or test is None or not test.targets:
        return
    max_values = max(_CHANCE_VALUES, _MAX_VALUES // (len(train) + len(test)))
    values, rows, counts = np.unique(_hashes(train, max_values), return_index=True, return_counts=True)
    hashes_M = _hashes(test, max_values)
    found_M = values[np.searchsorted(values, hashes_M).clip(max=len(values) - 1)] == hashes_M
    if not _are_many(found_M):
        return
    repeated = 1 - np.count_nonzero(counts == 1) / len(train)
    if found_M.mean() <= 2 * repeated:
        if may_repeat:
            return
        found_M &= _are_long(test)
        if not _are_many(found_M) or found_M.mean() < _BY_CHANCE * _chance(train, rows):
            return
    ctx.notice(_describe(name, test.ids[found_M].tolist(), len(test)))


def report_shared_files(root: Path, splits: Mapping[str, Split], ctx: Context) -> None:
    """Give a notice where images of test, or without test of val, are copies of files that train has.

    Few files are read: those of test, at most 2,000, and those of train of the same sizes. `splits`: their ids are
    paths relative to `root`.
    """
    name = next((name for name in ("test", "val") if len(splits[name])), None)
    if name is None:
        return
    paths = splits[name].ids.tolist()
    tested = paths[:: _step(len(paths), _TEST_FILES)]
    sizes = {path: _size(root / path) for path in tested}
    wanted = set(sizes.values())
    same_size = [path for path in splits["train"].ids.tolist() if _size(root / path) in wanted]
    contents = {_middle(root / path) for path in same_size[:: _step(len(same_size), _TRAIN_FILES)]}
    shared = [path for path in tested if _middle(root / path) in contents] if contents else []
    if _are_many(np.arange(len(tested)) < len(shared)):
        ctx.notice(_describe(name, shared, len(tested)))


def _describe(name: str, shared: Sequence[str], num_samples: int) -> str:
    return (
        f"{len(shared):,} of {name}'s {num_samples:,} samples are also in train, the first of them {shared[0]}: what "
        "is measured on these is memory. Remove the copies, or keep them in one split"
    )


def _are_many(found_M: npt.NDArray[np.bool_]) -> bool:
    num = np.count_nonzero(found_M)
    return bool(num >= _MIN_SHARED and num > _MIN_FRACTION * len(found_M))


def _hashes(split: Split, max_values: int) -> npt.NDArray[np.int64]:
    """Return a number for each sample, (N,), that is the same where its inputs are; for this process alone.

    `max_values`: of a sample's, that are looked at.
    """
    columns = [
        np.fromiter(_column_hashes(column, max_values), np.int64, len(split)) for column in split.inputs.values()
    ]
    return columns[0] if len(columns) == 1 else np.fromiter(map(hash, zip(*columns, strict=True)), np.int64, len(split))


def _column_hashes(column: Column, max_values: int) -> Iterable[int]:
    source, rows_N = flatten(column)
    if isinstance(source, RaggedColumn):
        for start, stop in zip(source.offsets_N[rows_N].tolist(), source.offsets_N[rows_N + 1].tolist(), strict=True):
            yield hash(source.values_V[start:stop].tobytes())
        return
    sample = source.take(rows_N[:1])
    places_V = np.random.default_rng(0).permutation(sample.size)[:max_values] if sample.size > max_values else None
    num_rows = max(1, _PART_BYTES // max(1, sample.nbytes))
    for start in range(0, len(rows_N), num_rows):
        part_B = source.take(rows_N[start : start + num_rows])
        part_BV = part_B.reshape(len(part_B), -1)
        chosen_BV = np.ascontiguousarray(part_BV if places_V is None else part_BV[:, places_V])
        yield from map(hash, chosen_BV.view(np.dtype((np.void, chosen_BV[0].nbytes))).ravel().tolist())


def _are_long(split: Split) -> npt.NDArray[np.bool_]:
    """Return which samples have no short text, (M,)."""
    are_long_M = np.ones(len(split), dtype=np.bool_)
    for column in split.inputs.values():
        if (lengths_M := column.lengths) is not None:
            are_long_M &= lengths_M >= _MIN_TOKENS
    return are_long_M


def _chance(train: Split, distinct: npt.NDArray[np.int64]) -> float:
    """Return about how probable it is that a sample has the inputs of one in train, were its values independent.

    `distinct`: a row for each of train's different samples. Copies among them would make values look frequent.
    """
    rows = distinct[:: _step(len(distinct), _CHANCE_ROWS)]
    num_pairs, log_p, num_values = len(rows) * (len(rows) - 1) / 2, 0.0, 0
    for column in train.inputs.values():
        if not isinstance(flatten(column)[0], ArrayColumn):
            continue
        values_RV = column.take(rows).reshape(len(rows), -1)
        for values_R in values_RV.T[:: _step(values_RV.shape[1], _CHANCE_VALUES)]:
            _, counts = np.unique(values_R, return_counts=True)
            log_p += np.log((1 + (counts * (counts - 1.0)).sum() / 2) / max(1, num_pairs))
            num_values += 1
    if num_values == 1:  # of which each different one occurs once
        return 1.0
    return min(1.0, len(train) * float(np.exp(log_p))) if num_values else 0.0


def _step(num: int, limit: int) -> int:
    """Return the distance between at most `limit` of `num` items."""
    return max(1, -(-num // limit))


def _size(path: Path) -> int:
    return os.stat(path).st_size  # noqa: PTH116 - a Path per file is slow


def _middle(path: Path) -> tuple[int, int]:
    """Return what two files have in common that are copies; for this process alone."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return size, hash(os.pread(file.fileno(), _FILE_BYTES, max(0, (size - _FILE_BYTES) // 2)))
