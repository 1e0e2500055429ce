"""What a training needs of its model's inputs and outputs, what it makes of them, and whether all workers agree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from ptpipe import Context, StageError
from ptpipe_torch import Data, Misfit, Model, Signature
from ptpipe_torch.distributed.worker_group import WorkerGroup
from ptpipe_torch.model.outputs import named_outputs
from ptpipe_torch.model.signature import describe_meanings
from ptpipe_torch.runtime import seeded
from ptpipe_torch.task.own_task import NUM_SAMPLES, check_own_task, depends_on_batch, has_own_loss, is_builtin
from ptpipe_train.device import first_batch
from ptpipe_train.evaluation import state_restored
from ptpipe_train.parallel.strategy import TrainingInputs
from ptpipe_train.steps import StepPlan


def check_pipelined(mode: str, signature: Signature) -> None:
    """Raise StageError where a pipeline can't pass values on: its schedule has one tensor, of one shape."""
    if len(signature.inputs) > 1:
        raise StageError(f"parallel mode {mode} takes networks of one input, not of {signature}")
    if len(signature.outputs) > 1:
        raise StageError(f"parallel mode {mode} takes networks of one output, not of {signature}")
    (spec,) = signature.inputs
    if spec.symbols:
        raise StageError(
            f"parallel mode {mode} needs batches of one shape, and {spec} has the {spec.symbols[0]} of each batch: "
            "give all the same (`padding: max_length` of data.text), or use mode ddp"
        )


def check_task(inputs: TrainingInputs, plan: StepPlan) -> None:
    """Raise StageError where a plugin's task returns something unusable of what the network returns for few samples.

    Give a notice where a loss of the user's own compares samples that are in different forward passes.
    """
    task, num_passes = inputs.data.info.task, plan.accumulate * inputs.options.passes_per_batch
    is_divided = num_passes > 1 and has_own_loss(task)
    if is_builtin(task) and not is_divided:
        return
    few = _few_samples(inputs)
    check_own_task(task, *few, is_trained=True)
    if is_divided and depends_on_batch(task, *few):
        inputs.ctx.notice(
            "the loss of a sample depends on the other samples of its batch, of which a forward pass has "
            f"{plan.window // num_passes}, because a step of {plan.window} is divided into {num_passes}: the result is "
            "not that of a step in one pass"
        )


def _few_samples(inputs: TrainingInputs) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Return outputs and targets of the first samples of train."""
    settings = replace(inputs.settings, device=torch.device("cpu"))
    batch = first_batch(inputs.data, settings, NUM_SAMPLES)
    with seeded(0), state_restored(inputs.module), torch.no_grad():
        return named_outputs(inputs.module(*batch.args), inputs.data.info.task.outputs), batch.targets


def with_meanings_of(ctx: Context, model: Model, data: Data) -> Model:
    """Return the model with outputs that stand for what the data's do; report where they stood for something else."""
    before, after, inputs = model.signature.meanings, data.info.signature.meanings, data.info.inputs
    for name, words in after.items():
        if name not in before or before[name] == words:
            continue
        misfit = inputs[name].misfit(before[name]) if name in inputs else Misfit(before[name], words, "")
        if misfit:
            was, becomes = describe_meanings(misfit.found, misfit.needed)
            ctx.notice(f"{name} stood for {was}, and stands for {becomes} from this training on")
    return model.with_recipe(signature=replace(model.signature, meanings={**before, **after}))


def refuse_disagreement(workers: WorkerGroup, model: Model) -> None:
    """Raise StageError unless all workers have the same network: rank 0's is the one that is delivered."""
    if workers.size == 1:
        return
    digest = hashlib.sha256()
    for name, tensor in sorted(model.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if not workers.all_equal(digest.digest()):
        raise StageError(
            "the workers ended with different networks: something in the network or in its data differs from worker to "
            "worker (a random number drawn without torch? a parameter that not all use?)"
        )
