"""Samples that a repair runs through a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ptpipe import Context, StageError
from ptpipe_torch import Data, Model


def network_inputs(
    ctx: Context, model: Model, data: Data, split: str, num_samples: int
) -> Iterator[Sequence[torch.Tensor]]:
    """Yield the inputs of a split's first samples, in batches of the data set's size; report progress.

    Raises StageError where the split has none, or where they are not what the model takes.
    """
    data.info.check_inputs("the model", model.signature)
    num_samples = min(num_samples, len(data.splits[split]) if split in data.splits else 0)
    if num_samples == 0:
        raise StageError(f"{ctx.kind}: the data set's split {split!r} is empty; name another one as `split`")
    done = 0
    for batch in data.batches(split, order_N=np.arange(num_samples)):
        yield batch.args
        done += len(batch)
        ctx.progress(done, num_samples, "samples")
