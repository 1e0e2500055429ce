"""The digest of targets: what changes it, and what does not.

Shape legend: N samples.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ptpipe_eval.quality.targets import targets_sha256
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    LanguageModeling,
    RaggedColumn,
    Regression,
    Split,
    Task,
    TokenClassification,
)
from ptpipe_torch.task import target_bytes
from ptpipe_torch.task.token_classification import IGNORE, missed_words

CLASSES = Classification(class_names=("ant", "cat", "dog"))
NUMBERS = Regression(target_names=("y",), mean=(0.0,), std=(1.0,))


def split(order: list[int], labels: list[int]) -> Split:
    ids = np.array([f"x/{number}" for number in order])
    return Split(ids, {"x": ArrayColumn(np.array(order))}, {"labels": ArrayColumn(np.array(labels)[order])})


def test_the_order_does_not_matter_and_the_targets_do() -> None:
    digest = targets_sha256(split([0, 1, 2, 3], [0, 1, 2, 2]), CLASSES)
    assert targets_sha256(split([3, 0, 2, 1], [0, 1, 2, 2]), CLASSES) == digest
    assert targets_sha256(split([3, 0, 2, 1], [0, 2, 1, 2]), CLASSES) != digest
    one = split([0, 1, 2, 3], [0, 1, 2, 2])
    assert targets_sha256(replace(one, inputs={"x": ArrayColumn(np.zeros(4))}), CLASSES) == digest


def test_classes_are_told_by_their_names() -> None:
    more = Classification(class_names=("ant", "bee", "cat", "dog"))
    digest = targets_sha256(split([0, 1, 2], [0, 1, 2]), CLASSES)
    assert targets_sha256(split([0, 1, 2], [0, 2, 3]), more) == digest
    assert targets_sha256(split([0, 1, 2], [0, 1, 2]), more) != digest


@pytest.mark.parametrize("task", [NUMBERS, CLASSES])
def test_parts_do_not_matter(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(3000) % 3
    ids, column = np.array([f"{n:04}" for n in range(3000)]), ArrayColumn(values if task is CLASSES else values * 0.5)
    several = Split(ids, {}, {"y": column})
    digest = targets_sha256(several, task)
    monkeypatch.setattr(target_bytes, "_PART_BYTES", 1000)
    assert targets_sha256(several, task) == digest
    assert targets_sha256(replace(several, targets={"y": ArrayColumn(column.array_N[::-1])}), task) != digest


def test_tags_are_those_of_words_whatever_their_tokens() -> None:
    """Two texts: `B O B`, of one token each, and `O B`; then further tokens, a word without one, and another class."""
    ids = np.array(["a", "b"])
    whole = {"tags": RaggedColumn(np.array([1, 0, 1, 0, 1]), np.array([0, 3, 5]), IGNORE)}
    digest = targets_sha256(Split(ids, {}, whole), TokenClassification(class_names=("O", "B-x")))
    tags_V = np.array([IGNORE, 2, IGNORE, 2, IGNORE, 0, IGNORE, 2])
    missed = missed_words(np.array([3]), np.array([0]), 3)
    other = {
        "tags": RaggedColumn(tags_V, np.array([0, 4, 8]), IGNORE),
        "missed": RaggedColumn(missed, np.array([0, 1, 1]), IGNORE),
    }
    task = TokenClassification(class_names=("O", "B-w", "B-x"), has_missed=True)
    assert targets_sha256(Split(ids, {}, other), task) == digest
    changed = other | {"missed": RaggedColumn(missed + 2, np.array([0, 1, 1]), IGNORE)}
    assert targets_sha256(Split(ids, {}, changed), task) != digest


def test_nothing_is_known_of_tokens_to_predict() -> None:
    ids, column = np.array(["a", "b"]), RaggedColumn(np.array([1, 2, 3]), np.array([0, 2, 3]), IGNORE)
    assert targets_sha256(Split(ids, {}, {"next": column}), LanguageModeling(vocabulary_size=9)) is None
