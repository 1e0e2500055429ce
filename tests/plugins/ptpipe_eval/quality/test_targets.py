from __future__ import annotations

from dataclasses import replace

import numpy as np

from ptpipe_eval.quality.targets import targets_sha256
from ptpipe_torch import ArrayColumn, RaggedColumn, Split


def split(order: list[int], labels: list[int]) -> Split:
    ids = np.array([f"x/{number}" for number in order])
    return Split(ids, {"x": ArrayColumn(np.array(order))}, {"labels": ArrayColumn(np.array(labels)[order])})


def test_the_order_does_not_matter_and_the_targets_do() -> None:
    digest = targets_sha256(split([0, 1, 2, 3], [5, 6, 7, 8]))
    assert targets_sha256(split([3, 0, 2, 1], [5, 6, 7, 8])) == digest
    assert targets_sha256(split([3, 0, 2, 1], [5, 6, 8, 7])) != digest
    one = split([0, 1, 2, 3], [5, 6, 7, 8])
    assert targets_sha256(replace(one, inputs={"x": ArrayColumn(np.zeros(4))})) == digest
    assert targets_sha256(replace(one, targets={})) != digest


def test_rows_of_different_lengths() -> None:
    ids = np.array(["a", "b"])
    lengths = [np.array([0, 2, 3]), np.array([0, 1, 3])]
    one, other = (Split(ids, {}, {"tags": RaggedColumn(np.array([1, 2, 3]), of, -1)}) for of in lengths)
    assert targets_sha256(one) != targets_sha256(other)
    several = Split(np.array([f"{n:04}" for n in range(3000)]), {}, {"y": ArrayColumn(np.arange(3000))})
    assert targets_sha256(several) != targets_sha256(
        replace(several, targets={"y": ArrayColumn(np.arange(3000)[::-1])})
    )
