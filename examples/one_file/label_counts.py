"""A stage of several workers in one file: `data.label_counts` counts the samples of each class."""

from __future__ import annotations

from pydantic import Field

from ptpipe import Context, Decision, StageConfig, Verdict, stage
from ptpipe_torch import Data
from ptpipe_torch.distributed.worker_group import init_worker_group


class LabelCountsConfig(StageConfig):
    """Options of `data.label_counts`."""

    workers: int = Field(2, ge=1, le=64, description="number of processes")
    min_count: int = Field(1, ge=0, description="the gate refuses if a class has fewer training samples")


@stage("data.label_counts", workers=lambda config: config.workers)
def count_labels(config: LabelCountsConfig, ctx: Context, data: Data) -> Verdict:
    """Count the training samples of each class; refuse if a class has too few."""
    import numpy as np

    labels_N = data.splits["train"].labels_N
    with init_worker_group(ctx, comm="gloo", timeout_s=60) as workers:
        own = labels_N[workers.rank_slice(len(labels_N))]  # each worker counts its part
        counts = workers.all_reduce(np.bincount(own, minlength=data.info.num_classes).tolist())
    ctx.metric(min_count=int(min(counts)), max_count=int(max(counts)))
    decision = Decision.PASSED if min(counts) >= config.min_count else Decision.REFUSED
    return Verdict(decision, f"the rarest class has {min(counts):.0f} samples")
