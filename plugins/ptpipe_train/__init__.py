"""Stage `train.supervised`: train a network for any task. Importing this imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ptpipe import JSON, Context, Plan, PlannedStage, Problem, RunFinished, Section, Stage, hookimpl, stage
from ptpipe_torch import Data, Model
from ptpipe_train.config import TrainConfig
from ptpipe_train.config_parallel import PIPELINED

__all__ = ["TrainConfig", "ptpipe_stages", "train"]


def _find_missing(config: TrainConfig) -> Iterable[str]:
    """Yield a line for each requirement of the options that this machine doesn't meet."""
    from ptpipe_train import device

    yield from device.find_missing(config.device, config.precision)
    yield from device.find_missing_for_workers(config.device, config.parallel)
    if config.compile:
        from ptpipe_train.compiling import find_missing_compiler

        yield from find_missing_compiler(config.device)


def _num_workers(config: TrainConfig) -> int:
    return config.parallel.degrees.world_size


@stage("train.supervised", packages=("torch", "numpy"), preflight=_find_missing, workers=_num_workers)
def train(config: TrainConfig, ctx: Context, model: Model, data: Data, teacher: Model | None = None) -> Model:
    """Train a network on the train split and evaluate it on the val split after each epoch.

    Takes a float model, or one prepared by quant.prepare_qat. The loss is that of the data set's task (of classes:
    cross-entropy), averaged over all samples of an optimizer step: 4 accumulated batches of 16 give the same step as
    one of 64 (except for batch norm, which sees one batch at a time). The order of samples depends on the seed and the
    epoch alone; dropout on the seed.

    A training that was killed resumes from its last checkpoint when it is started again, and ends with the same
    weights, bit for bit, as an uninterrupted one on the same machine with the same number of threads. Val is evaluated
    in float32, the precision of the delivered model. Fails when the loss or a weight is no longer finite.

    With a `teacher`, a float model such as the one that quant.prepare_qat got, the network also learns to return what
    that returns (knowledge distillation), as `distillation` says.

    `parallel` distributes the same training over processes and devices: a step takes the same samples for any number
    of workers and gives the result of one process (except for batch norm, which sees the shard of one process).
    """
    from ptpipe_train.supervised import train_supervised

    return train_supervised(config, ctx, model, data, teacher)


@hookimpl
def ptpipe_check(plan: Plan) -> Iterable[Problem]:
    """Find teachers that are missing or not float, and pipelines whose batches would differ in shape."""
    for planned in plan.stages:
        if not isinstance(planned.config, TrainConfig):
            continue
        yield from _teacher_problems(plan, planned, planned.config)
        if planned.config.parallel.mode not in PIPELINED:
            continue
        for data in planned.wiring.get("data", ()):
            if plan[data.stage].options.get("padding") == "longest":
                mode = planned.config.parallel.mode
                message = (
                    f"{mode} needs batches of one shape: set `padding: max_length` in {data.stage}, or use mode ddp"
                )
                yield plan.problem(planned.id, message, "parallel", "mode")


@hookimpl
def ptpipe_check_results(plan: Plan, summaries: Mapping[str, Mapping[str, Mapping[str, JSON]]]) -> Iterable[Problem]:
    """Find what early stopping can't monitor in data sets that are stored."""
    from ptpipe_train.early_stopping import early_stopping_problems

    return early_stopping_problems(plan, summaries)


def _teacher_problems(plan: Plan, planned: PlannedStage, config: TrainConfig) -> Iterable[Problem]:
    teachers = planned.wiring.get("teacher", ())
    if config.distillation and not teachers:
        message = "distillation needs a teacher: add `teacher: STAGE`, one that provides a float model, to `needs`"
        yield plan.problem(planned.id, message, "distillation")
    for teacher in teachers:
        if (kind := plan[teacher.stage].kind).startswith("quant."):
            message = f"the teacher must be a float model, and {teacher.stage} ({kind}) provides another"
            yield plan.problem(planned.id, message)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Offer `train.supervised`."""
    return [train]


@hookimpl
def ptpipe_report_sections(plan: Plan, run: RunFinished) -> Iterable[Section]:
    """Add the curves of every training."""
    from ptpipe_train.report import report_sections

    return report_sections(plan, run)
