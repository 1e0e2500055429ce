"""Zeros of a pruned model, which a training keeps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ptpipe_torch import Model
from ptpipe_train.dtensor import to_local


class KeptZeros:
    """Keeps the zeros of pruned weights: their gradients are zero, so no optimizer moves them.

    As a mask in the forward pass (`torch.nn.utils.prune`) does, but weights keep their names, and what the network
    computes is unchanged.
    """

    def __init__(self, model: Model, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """`named_parameters`: those that this worker trains, still as they are in `model`."""
        names = set(pruned_weights(model))
        trained = [parameter for name, parameter in named_parameters if name in names and parameter.requires_grad]
        self._kept = [(parameter, to_local(parameter.detach()) != 0) for parameter in trained]

    def clear_gradients(self) -> None:
        """Set the gradients of the zeros to zero, in place."""
        for parameter, keep in self._kept:
            if parameter.grad is not None:
                to_local(parameter.grad).mul_(keep)


def pruned_weights(model: Model) -> dict[str, torch.Tensor]:
    """Return the weights of a pruned model that have zeros, by name; of another model none.

    Weights have at least two axes. What is all zero was not pruned, it is how the layer was initialized.
    """
    if not model.recipe.is_sparse:
        return {}
    weights = {name: tensor for name, tensor in model.tensors.items() if tensor.dim() > 1}
    return {name: weight for name, weight in weights.items() if 0 < weight.count_nonzero() < weight.numel()}


def sparsity_of(model: Model) -> float | None:
    """Return the fraction of zeros in the pruned weights; None for a model that is not pruned."""
    weights = pruned_weights(model).values()
    if not weights:
        return None
    return 1 - sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)
