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
