"""Parallel strategies: a single process, DataParallel, DistributedDataParallel, FSDP2, pipelines."""

from __future__ import annotations

from ptpipe_train.compiling import compiled
from ptpipe_train.parallel.ddp import CapturedProcess, DDPStrategy, SingleProcess, data_parallel
from ptpipe_train.parallel.strategy import Objective, ParallelStrategy, TrainingInputs

__all__ = ["Objective", "ParallelStrategy", "TrainingInputs", "choose_strategy"]


def choose_strategy(inputs: TrainingInputs) -> ParallelStrategy:
    """Build the strategy of `inputs.options.mode`; one worker needs no wrapper. Every worker must call it."""
    mode = inputs.options.mode
    if mode != "dp" and inputs.workers.size == 1:
        module = inputs.settings.place(inputs.module)
        if inputs.cuda_graphs:
            return CapturedProcess(module, inputs.settings, inputs.ctx.log)
        return SingleProcess(module, inputs.settings, compiled(module) if inputs.compile else None)
    if mode == "dp":
        return data_parallel(inputs.module, inputs.settings, inputs.options, inputs.ctx)
    if mode == "ddp":
        return DDPStrategy(inputs)
    if mode == "fsdp":
        from ptpipe_train.parallel.fsdp import FSDPStrategy

        return FSDPStrategy(inputs)
    from ptpipe_train.parallel.pp import PipelineStrategy

    return PipelineStrategy(inputs)
