"""Ways of training on several devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ptpipe import Context
from ptpipe_torch import Data, Model
from ptpipe_torch.distributed.worker_group import WorkerGroup
from ptpipe_train.parallel.replicas import Alone, Replicas, data_parallel
from ptpipe_train.parallel.way import Objective, Way
from ptpipe_train.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ptpipe_train.parallel_options import Parallel

__all__ = ["Material", "Objective", "Way", "choose_way"]


@dataclass(frozen=True)
class Material:
    """What is trained, and on what."""

    model: Model
    module: nn.Module
    """The model, built, on the CPU."""
    data: Data
    batch_size: int
    """Of all workers together."""


def choose_way(options: Parallel, ctx: Context, workers: WorkerGroup, material: Material, settings: Settings) -> Way:
    """Make ready what `parallel:` says; one worker alone needs no wrapper. Every worker must call it."""
    if options.mode != "dp" and workers.size == 1:
        return Alone(settings.placed(material.module), settings)
    if options.mode == "fsdp":
        from ptpipe_train.parallel.fsdp import Shards

        whole = settings.placed(material.model.build_prepared().train())
        few_images_NCHW = _first_images(material.data, settings, 2)
        return Shards(material.module, whole, settings, options, workers, few_images_NCHW)
    if options.mode == "dp":
        return data_parallel(material.module, settings, options, ctx)
    module = settings.placed(material.module)
    if options.mode == "ddp":
        return Replicas(module, settings, options, workers)
    from ptpipe_train.parallel.pp import Chunks, Place

    images_MCHW = _first_images(material.data, settings, material.batch_size // options.parts)
    place = Place(images_MCHW, Path(ctx.scratch) / "cuts.json")
    return Chunks(module, settings, options, workers, material.batch_size, place)


def _first_images(data: Data, settings: Settings, num: int) -> torch.Tensor:
    """As many images of train."""
    order_N = np.arange(num) % len(data.splits["train"])
    batches = data.batches(
        "train", order_N=order_N, batch_size=num, channels_last=settings.channels_last, device=settings.device
    )
    return next(iter(batches)).images_NCHW
