"""Zeros of a pruned model, which a training keeps, and zeros that become more during one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe_torch import Model
from ptpipe_torch.model.recipe import ALL
from ptpipe_torch.pruning import largest, prunable_layers
from ptpipe_train.dtensor import shard_like, to_local, whole_tensor

if TYPE_CHECKING:
    from ptpipe_train.config import Pruning
    from ptpipe_train.state import TrainingState


@dataclass(frozen=True)
class PruningSchedule:
    """Which weights become zero during a training, and how many of them at a step.

    M. Zhu and S. Gupta, To prune, or not to prune, arXiv 1710.01878, equation 1.
    """

    names: frozenset[str]
    amount: float
    begin: int
    end: int
    every: int
    """Steps between two prunings; the last one is at `end` in any case."""

    @classmethod
    def of(cls, options: Pruning, module: nn.Module, num_steps: int) -> PruningSchedule:
        """Return the schedule of a network in a training of that many steps.

        Raises StageError where it does not fit into the training, for a pattern of `skip` that matches no layer, and
        where no trained weight of a convolution or linear layer is left.
        """
        begin, end, every = (
            value if isinstance(value, int) else round(value * num_steps)
            for value in (options.begin, options.end, options.every)
        )
        if end >= num_steps:
            raise StageError(f"pruning: end is step {end}, counted from 0, but the training has {num_steps} steps")
        if begin >= end:
            raise StageError(f"pruning: begin is step {begin} of {num_steps}, and not before end, which is step {end}")
        layers = prunable_layers(module, options.skip, "pruning")
        weights = {id(layer.weight) for layer in layers.values() if layer.weight.requires_grad}
        if not weights:
            raise StageError("pruning: every weight that could be pruned is frozen (freeze)")
        names = frozenset(name for name, parameter in module.named_parameters() if id(parameter) in weights)
        return cls(names, options.amount, begin, end, max(1, every))

    def is_due(self, step: int) -> bool:
        """Return whether weights are pruned before that step, counted from 0."""
        return step == self.end or (self.begin <= step < self.end and (step - self.begin) % self.every == 0)

    def fraction_at(self, step: int, initial: float) -> float:
        """Return the fraction of zeros of a layer that began with `initial`."""
        left = 1 - (step - self.begin) / (self.end - self.begin)
        return self.amount + (initial - self.amount) * left**3


class KeptZeros:
    """Keeps the zeros of pruned weights: their gradients are zero, so no optimizer moves them.

    As a mask in the forward pass (`torch.nn.utils.prune`) does, but weights keep their names, and what the network
    computes is unchanged. With a schedule, more of them become zero.
    """

    def __init__(
        self,
        pruned: Mapping[str, torch.Tensor] = {},
        named_parameters: Iterable[tuple[str, nn.Parameter]] = (),
        schedule: PruningSchedule | None = None,
    ) -> None:
        """`pruned`: weights with zeros; `named_parameters`: that this worker trains, still as they are there."""
        names = schedule.names if schedule else frozenset[str]()
        self._schedule = schedule
        self._kept: dict[str, tuple[nn.Parameter, torch.Tensor]] = {}
        for name, parameter in named_parameters:
            if parameter.requires_grad and (name in pruned or name in names):
                weight = to_local(parameter.detach())
                self._kept[name] = (parameter, weight != 0 if name in pruned else torch.ones_like(weight).bool())
        self._initial = {name: 1.0 - _density(pruned[name]) if name in pruned else 0.0 for name in sorted(names)}

    @property
    def scheduled(self) -> list[str]:
        """The names of the weights that a schedule prunes."""
        return list(self._initial)

    def are_all(self, step: int) -> bool:
        """Return whether no weight is pruned after that step."""
        return self._schedule is None or step >= self._schedule.end

    def clear_gradients(self) -> None:
        """Set the gradients of the zeros to zero, in place."""
        for parameter, keep in self._kept.values():
            if parameter.grad is not None:
                to_local(parameter.grad).mul_(keep)

    @torch.no_grad()
    def prune(self, step: int, state: TrainingState) -> None:
        """Set the smallest weights to zero where the schedule has some before that step, counted from 0.

        Also their optimizer state and average, so that neither momentum nor the past brings them back. Every rank must
        call it.
        """
        if self._schedule is None or not self._schedule.is_due(step):
            return
        for name, initial in self._initial.items():
            if name not in self._kept:
                continue  # of another pipeline stage
            parameter, keep = self._kept[name]
            amount = self._schedule.fraction_at(step, initial)
            (kept,) = largest([whole_tensor(parameter.detach(), state.device)], amount)
            keep &= shard_like(parameter, kept).to(keep.device)
            to_local(parameter.detach()).mul_(keep)
            for value in state.optimizer.state[parameter].values():
                if value is not None and value.shape == parameter.shape:
                    to_local(value).mul_(keep)
            if state.average:
                state.average.clear(parameter, keep)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is kept of the weights that a schedule prunes, by name; others have it in their zeros."""
        return {name: keep for name, (_, keep) in self._kept.items() if name in self._initial}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `tensors`."""
        for name, keep in self.tensors.items():
            keep.copy_(tensors[name])


def pruned_weights(model: Model) -> dict[str, torch.Tensor]:
    """Return the weights that were pruned and have zeros, by name.

    Weights have at least two axes. Of a model without names of what was pruned, all weights count that have zeros, and
    something else: what is all zero is how the layer was initialized.
    """
    names = model.recipe.pruned
    weights = {
        name: tensor for name, tensor in model.tensors.items() if tensor.dim() > 1 and (name in names or ALL in names)
    }
    return {name: weight for name, weight in weights.items() if 0 < weight.count_nonzero() < weight.numel()}


def sparsity_of(model: Model) -> float | None:
    """Return the fraction of zeros in the pruned weights; None for a model that is not pruned."""
    weights = pruned_weights(model).values()
    if not weights:
        return None
    return 1 - sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)


def with_sparsity(ctx: Context, trained: Model, zeros: KeptZeros) -> Model:
    """Return the model, which says what was pruned during its training; report the fraction of zeros."""
    trained = trained.with_recipe(pruned=trained.recipe.with_pruned(zeros.scheduled).pruned)
    if (sparsity := sparsity_of(trained)) is not None:
        ctx.metric(sparsity=round(sparsity, 4))
    return trained


def _density(weight: torch.Tensor) -> float:
    return int(weight.count_nonzero()) / weight.numel()
