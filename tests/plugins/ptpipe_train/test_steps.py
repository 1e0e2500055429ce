"""The assignment of samples to steps, and the sizes of the forward passes that follow from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptpipe_torch import epoch_order
from ptpipe_train.config_parallel import Parallel
from ptpipe_train.parallel.batch_shard import BatchShard
from ptpipe_train.steps import StepPlan

MODES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {"mode": "ddp", "workers": 3},
    "pp": {"mode": "pp", "microbatches": 4},
    "ddp+pp": {"mode": "ddp+pp", "workers": 4, "microbatches": 2},
}


def sizes_of(plan: StepPlan, parallel: Parallel) -> set[int]:
    """Divide every batch of an epoch as the workers do, and count."""
    order_N, num_shards = np.arange(plan.samples_per_epoch), parallel.degrees.batch_shards
    found = set()
    for start in range(0, len(order_N), plan.batch_size):
        batch_N = order_N[start : start + plan.batch_size]
        for rank in range(num_shards):
            own_N = BatchShard(rank, num_shards).of(batch_N, plan.batch_size)
            size = plan.batch_size // parallel.passes_per_batch if parallel.mode in ("pp", "ddp+pp") else len(own_N)
            found |= {len(own_N[first : first + size]) for first in range(0, len(own_N), max(1, size))}
    return found


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [4, 8, 12])
def test_sizes_of_forward_passes(name: str, batch_size: int, *, drop_last: bool) -> None:
    parallel = Parallel(**MODES[name])
    for num_samples in range(1, 40):
        plan = StepPlan(1, num_samples, batch_size, 1, 7, drop_last)
        assert plan.pass_sizes(parallel) == sizes_of(plan, parallel), num_samples


@pytest.mark.parametrize(("drop_last", "num_samples"), [(False, 43), (True, 40)])
def test_windows_are_the_order_of_an_epoch(num_samples: int, *, drop_last: bool) -> None:
    plan = StepPlan(2, 43, 8, 3, 7, drop_last)
    assert plan.samples_per_epoch == num_samples
    order_N = epoch_order(43, 7, 1)
    assert np.array_equal(plan.remaining(order_N, 0), order_N[:num_samples])
    assert [plan.window_size(step) for step in range(plan.steps_per_epoch)] == [24, num_samples - 24]
    assert np.array_equal(plan.remaining(order_N, 1), order_N[24:num_samples])
