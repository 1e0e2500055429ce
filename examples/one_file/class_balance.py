"""A stage of several workers in one file: `gate.class_balance` counts the labels of a train split together."""

from __future__ import annotations

from pydantic import Field

from ptpipe import Context, Decision, StageConfig, StageError, Verdict, stage
from ptpipe_torch import Classification, Data, init_worker_group


class ClassBalanceConfig(StageConfig):
    """Options of `gate.class_balance`."""

    min_fraction: float = Field(default=0.01, gt=0, lt=1, description="least fraction of samples that a class may have")
    workers: int = Field(default=2, ge=1, le=64, description="processes that share the samples")


@stage("gate.class_balance", packages=("numpy", "torch"), workers=lambda config: config.workers)
def class_balance(config: ClassBalanceConfig, ctx: Context, data: Data) -> Verdict:
    """Refuse a train split in which a class has too few samples."""
    import numpy as np

    task = data.info.task
    if not isinstance(task, Classification):
        raise StageError(f"gate.class_balance counts classes, and {data.info.name} has none")
    labels_N = data.splits["train"].targets["labels"].values()
    with init_worker_group(ctx, on_cuda=False) as workers:
        own_N = labels_N[workers.rank_slice(len(labels_N))]
        counts_K = workers.all_reduce(np.bincount(own_N, minlength=task.num_classes).tolist())
    fraction = min(counts_K) / max(1, len(labels_N))
    decision = Decision.PASSED if fraction >= config.min_fraction else Decision.REFUSED
    name = task.class_names[counts_K.index(min(counts_K))]
    return Verdict(decision, f"the smallest class, {name}, has {fraction:.2%} of the samples", {"fraction": fraction})
