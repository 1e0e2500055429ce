"""The drop in a task's primary metric, for every built-in task. Shape legend: N samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptpipe_torch.quality.drops import primary_drops, primary_value

from ..task.test_sample_sums import CASES


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_difference_of_the_primary_metric(name) -> None:
    task, outputs, targets = CASES[name]
    noisy = {
        key: tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
        for key, tensor in outputs.items()
    }
    before, after = (
        {key: rows.numpy() for key, rows in task.sample_sums(of, targets).items()} for of in (outputs, noisy)
    )
    (drop,) = primary_drops(task, before, [after], seed=7)
    difference = primary_value(task, before) - primary_value(task, after)
    assert drop.drop == pytest.approx(difference if task.primary_metric.higher_is_better else -difference, abs=1e-6)
    low, high = drop.limits(0.95)
    assert low <= drop.drop <= high and np.isfinite([low, high]).all()


@pytest.mark.parametrize("name", ["positive class", "labels", "entities", "tags", "pixels"])
def test_models_that_make_no_mistake_are_not_shown_to_be_equal(name) -> None:
    task, outputs, targets = CASES[name]
    (target,) = targets.values()
    for key, scores in outputs.items():
        axis = task.class_scores.get(key)
        numbers = target.clamp(0, scores.shape[axis or 1] - 1).long()
        right = target if axis is None else torch.nn.functional.one_hot(numbers, scores.shape[axis]).movedim(-1, axis)
        perfect = {key: 2 * right.float() - 1}
    sums = {of: rows.numpy() for of, rows in task.sample_sums(perfect, targets).items()}
    (drop,) = primary_drops(task, sums, [sums], seed=7)
    low, high = drop.limits(0.95)
    assert drop.drop == 0 and -low == high > 0.02 and drop.p_value(0.0001) > 0.9
