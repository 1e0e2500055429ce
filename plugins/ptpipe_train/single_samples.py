"""Forward passes of a single sample, which batch norm can't normalize, or of few: found before the training begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ptpipe import Context, StageError
from ptpipe_torch import Model, TrainingCallback
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.runtime import seeded
from ptpipe_train.parameters import freeze_parameters, norms_in_eval_mode
from ptpipe_train.steps import StepPlan

if TYPE_CHECKING:
    from ptpipe_train.config_parallel import Parallel

_FEW_IMAGES = 8
"""Batch norm statistics of fewer images are mostly noise (Wu and He, 2018, "Group Normalization")."""
_REFUSAL = "Expected more than 1 value per channel"


def refuse_single_samples(model: Model, plan: StepPlan, parallel: Parallel, freeze: Sequence[str] = ()) -> None:
    """Raise StageError where a forward pass of an epoch has a single sample and the network can't be trained on one."""
    if _has_single_sample(plan, parallel) and not parallel.sync_bn and not _takes_single_sample(model, freeze):
        remedies = []
        if not plan.drop_last and not _has_single_sample(replace(plan, drop_last=True), parallel):
            remedies.append("set drop_last to true")
        if sizes := _working_batch_sizes(plan, parallel):
            remedies.append(f"choose a batch_size such as {' or '.join(map(str, sizes))}")
        passes = parallel.passes_per_batch
        raise StageError(
            f"batch norm can't normalize a single sample, and {plan.num_samples} samples in batches of "
            f"{plan.batch_size}{f', each divided into {passes} forward passes,' if passes > 1 else ''} leave one: "
            f"{', or '.join(remedies)}"
        )


def _has_single_sample(plan: StepPlan, parallel: Parallel) -> bool:
    return 1 in plan.pass_sizes(parallel)


def _working_batch_sizes(plan: StepPlan, parallel: Parallel) -> list[int]:
    """Return the nearest batch sizes, one below and one above, that leave no single sample."""

    def works(batch_size: int) -> bool:
        try:
            parallel.check_batch_size(batch_size)
        except ValueError:
            return False
        return not _has_single_sample(replace(plan, batch_size=batch_size), parallel)

    below, above = range(plan.batch_size - 1, 1, -1), range(plan.batch_size + 1, 2 * plan.batch_size + 2)
    nearest = (next(filter(works, sizes), None) for sizes in (below, above))
    return [size for size in nearest if size]


def _takes_single_sample(model: Model, freeze: Sequence[str]) -> bool:
    """Return whether a forward pass in training mode accepts one sample; tried on a second build of the network."""
    module = model.build_prepared().train()
    freeze_parameters(module, freeze)
    frozen = norms_in_eval_mode(module)
    for layer in module.modules():
        if isinstance(layer, TrainingCallback):
            layer.on_progress(0.0)  # may freeze batch norms from the start
    for norm in frozen:
        norm.eval()
    try:
        with seeded(0), torch.no_grad():
            module(*zeros(model.signature.inputs, 1))
    except Exception as error:  # noqa: BLE001  # another one is raised again by the training
        return _REFUSAL not in str(error)
    return True


def warn_of_small_passes(parallel: Parallel, ctx: Context, module: nn.Module, batch_size: int) -> None:
    """Warn where a forward pass has few samples, and the network trains batch norms."""
    num_passes = parallel.passes_per_batch
    num_images = batch_size // num_passes
    if num_passes == 1 or parallel.sync_bn or num_images >= _FEW_IMAGES:
        return
    if any(isinstance(layer, _BatchNorm) and layer.training for layer in module.modules()):
        ctx.notice(
            f"batch norm sees {num_images} images at once, because a batch of {batch_size} is divided into "
            f"{num_passes} forward passes; accuracy may suffer with fewer than {_FEW_IMAGES}"
        )
