"""Samples that a repair runs through a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ptpipe import Context
from ptpipe_torch import Data, Model
from ptpipe_torch.data.calibration_samples import check_finite, num_calibration_samples


def network_inputs(
    ctx: Context, model: Model, data: Data, split: str, num_samples: int
) -> Iterator[Sequence[torch.Tensor]]:
    """Yield the inputs of a split's first samples, in batches of the data set's size; report progress.

    Raises StageError where they are not what the model takes, not finite, or where there are not two that differ.
    """
    data.info.check_inputs("the model", model.signature)
    num_samples = num_calibration_samples(ctx.kind, data, split, num_samples)
    done = 0
    for batch in data.batches(split, order_N=np.arange(num_samples)):
        check_finite(ctx.kind, data, split, batch)
        yield batch.args
        done += len(batch)
        ctx.progress(done, num_samples, "samples")
