"""The drop in a task's primary metric, for every built-in task. Shape legend: N samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptpipe import StageError
from ptpipe_torch.quality.drops import finite_limits, primary_drops, primary_value
from ptpipe_torch.task.ranking import rows_of_samples

from ..task.test_sample_sums import CASES

OF_POSITIVE = "F1, roc_auc and average_precision are undefined there and count as 0"
OF_LABELS = "F1 is undefined there and counts as 0; roc_auc and average_precision leave it out"


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_difference_of_the_primary_metric(name) -> None:
    task, outputs, targets = CASES[name]
    noisy = {
        key: tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
        for key, tensor in outputs.items()
    }
    before, after = (rows_of_samples(task, of, targets) for of in (outputs, noisy))
    (drop,) = primary_drops(task, before, [after], seed=7)
    difference = primary_value(task, before) - primary_value(task, after)
    assert drop.drop == pytest.approx(difference if task.primary_metric.higher_is_better else -difference, abs=1e-6)
    low, high = drop.limits(0.95)
    assert low <= drop.drop <= high and np.isfinite([low, high]).all()
    assert finite_limits(task, drop, 0.95) == (low, high)


@pytest.mark.parametrize(
    "name", ["positive class", "average precision", "all classes", "labels", "entities", "tags", "pixels"]
)
def test_models_that_make_no_mistake_are_not_shown_to_be_equal(name) -> None:
    task, outputs, targets = CASES[name]
    (target,) = targets.values()
    for key, scores in outputs.items():
        axis = task.class_scores.get(key)
        numbers = target.clamp(0, scores.shape[axis or 1] - 1).long()
        right = target if axis is None else torch.nn.functional.one_hot(numbers, scores.shape[axis]).movedim(-1, axis)
        perfect = {key: 2 * right.float() - 1}
    sums = rows_of_samples(task, perfect, targets)
    (drop,) = primary_drops(task, sums, [sums], seed=7)
    low, high = drop.limits(0.95)
    assert drop.drop == 0 and -low == high > 0.02 and drop.p_value(0.0001) > 0.9


def without_class_b() -> tuple:
    task, outputs, targets = CASES["positive class"]
    return task, outputs, {"labels": targets["labels"] % 2 * 2}


def without_anything_to_find() -> tuple:
    task, outputs, targets = CASES["average precision"]
    return task, outputs, {"labels": targets["labels"] * 0}


def without_variance() -> tuple:
    task, outputs, targets = CASES["regression"]
    return task, outputs, {"targets": torch.full_like(targets["targets"], 0.3)}


def with_tags(tag: int) -> tuple:
    task, outputs, targets = CASES["entities"]
    return task, outputs, {"tags": torch.full_like(targets["tags"], tag)}


def with_labels_of_none() -> tuple:
    task, outputs, targets = CASES["labels"]
    return task, outputs, {"labels": targets["labels"] * 0}


def with_nothing_but_ignored_pixels() -> tuple:
    task, outputs, targets = CASES["pixels"]
    return task, outputs, {"masks": torch.full_like(targets["masks"], task.ignore)}


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (without_class_b(), f"test has no sample of 'b': {OF_POSITIVE}"),
        (without_anything_to_find(), f"test has no sample of 'b': {OF_POSITIVE}"),
        (without_variance(), "test has the same value of a, b in all samples: R2 is undefined there"),
        (with_tags(4), "test has no entity: F1 is undefined there and counts as 0"),
        (with_labels_of_none(), f"test has no sample of 'x', 'y', 'never': {OF_LABELS}"),
        (with_nothing_but_ignored_pixels(), "test has no pixel that counts: the IoU is undefined there"),
    ],
    ids=["f1", "average precision", "r2", "entities", "labels", "pixels"],
)
def test_what_is_undefined_is_named_and_shows_no_drop(case, sentence) -> None:
    task, outputs, targets = case
    figures = task.figures({name: of.numpy() for name, of in task.sums(outputs, targets).items()}, 23)
    assert task.undefined(figures, "test") == [sentence]
    opposite = {name: -of for name, of in outputs.items()}
    before, after = (rows_of_samples(task, of, targets) for of in (outputs, opposite))
    for candidate in (before, after):
        (drop,) = primary_drops(task, before, [candidate], seed=7)
        assert drop.limits(0.95) == (-np.inf, np.inf) and drop.p_value(1.0) == 1
        if task.primary_metric.is_fraction:
            assert finite_limits(task, drop, 0.95) == (-1, 1)
        else:
            with pytest.raises(StageError, match="r2: 23 samples can't show a drop in it"):
                finite_limits(task, drop, 0.95)


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        ("positive class", []),
        ("two classes", []),
        ("labels", [f"test has no sample of 'never': {OF_LABELS}"]),
        ("entities", []),
        ("regression", ["test has the same value of b in all samples: R2 is undefined there"]),
        ("pixels", []),
    ],
)
def test_what_a_split_lacks_is_named(name, sentences) -> None:
    task, outputs, targets = CASES[name]
    figures = task.figures({key: of.numpy() for key, of in task.sums(outputs, targets).items()}, 23)
    assert task.undefined(figures, "test") == sentences
