"""Re-estimate the statistics of batch norms for rounded weights.

A batch norm subtracts the mean and divides by the deviation of what its layer computed in training, with float weights.
Rounded weights compute something else, by a shift and a factor for each channel: just what new statistics undo, before
they are folded. They are measured over all samples at once, mean and variance by the formula for merged samples of
T. Chan, G. Golub and R. LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.

Shape legend: C channels of a batch norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import Context, StageError
from ptpipe_quant.repairs.channels import CONVOLUTIONS, EdgeFinder, NotScalableError
from ptpipe_quant.repairs.config import ReestimateBatchNormConfig
from ptpipe_quant.repairs.float_model import traced
from ptpipe_quant.repairs.network_inputs import network_inputs
from ptpipe_quant.saturation import saturating_layers
from ptpipe_quant.stages import chosen_weights
from ptpipe_quant.trace import float_names
from ptpipe_torch import Data, Model
from ptpipe_torch.int8.layers import int8_weight
from ptpipe_torch.runtime import torch_threads

_NORMS = nn.modules.batchnorm._BatchNorm
_MAX_FACTOR = 2.0
"""By how much a variance may change: it decides on the folded weights, and so on their rounding, too. Without a limit a
channel whose weights are rounded to zero, which has no variance, would fold into enormous ones."""


@torch.no_grad()
def reestimate_batch_norm(config: ReestimateBatchNormConfig, ctx: Context, model: Model, data: Data) -> Model:
    """Implement `quant.reestimate_batch_norm`."""
    network = _rounded_network(config, ctx, model)
    norms = _norms(network, model)
    if not norms:
        raise StageError(f"{ctx.kind}: this network has no batch norm with running statistics of its own")
    statistics = {name: _Statistics(layer) for name, layer in norms.items()}
    with torch_threads(None):
        for inputs in network_inputs(ctx, model, data, config.split, config.num_samples):
            network(*inputs)
    measured = {name: each.mean_and_variance(ctx, name) for name, each in statistics.items()}
    ctx.metric(batch_norms=len(norms), largest_shift=_largest_shift(norms, measured))
    tensors = dict(model.tensors)
    for name, (mean_C, variance_C) in measured.items():
        former_C = norms[name].running_var
        variance_C = variance_C.clamp(former_C / _MAX_FACTOR, former_C * _MAX_FACTOR)
        tensors |= {f"{name}.running_mean": mean_C, f"{name}.running_var": variance_C}
    return Model(model.recipe, tensors)


def _norms(network: nn.Module, model: Model) -> dict[str, Any]:
    """Return the batch norms of the model whose statistics are used at one place of the network."""
    named = [
        (name, layer)
        for name, layer in network.named_modules(remove_duplicate=False)
        if isinstance(layer, _NORMS) and layer.running_mean is not None
    ]
    uses = Counter(id(layer.running_mean) for _, layer in named)
    return {
        name: layer
        for name, layer in named
        if uses[id(layer.running_mean)] == 1 and f"{name}.running_mean" in model.tensors
    }


def _rounded_network(config: ReestimateBatchNormConfig, ctx: Context, model: Model) -> nn.Module:
    """Return the network to run: of a float model with rounded weights, of one from QAT as it is."""
    if model.recipe.backend is None and not model.recipe.convert:
        graph = traced(model, ())
        _round_weights(graph, model, config)
        return graph
    last = model.recipe.prepare[-1] if model.recipe.prepare else None
    is_qat = last is not None and last.address.endswith(":prepare_qat")
    if model.recipe.convert or last is None or not is_qat or last.arguments.get("batch_norm") != "train":
        raise StageError(
            f"{ctx.kind}: the batch norms of this model are folded into its weights already. Put it in front of "
            "quant.prepare, or behind the training that follows quant.prepare_qat with `batch_norm: train`"
        )
    return model.build_prepared()


def _round_weights(graph: GraphModule, model: Model, config: ReestimateBatchNormConfig) -> None:
    """Round weights as quant.prepare and quant.convert will: with the batch norm folded in, then divided out again."""
    left_float = tuple(f"{name}." for name in float_names(model.build(), config.skip))
    per_channel = chosen_weights(config) == "per_channel"
    narrow = set(saturating_layers(graph, config.backend))
    finder = EdgeFinder(graph, set(graph.state_dict()))
    for node in graph.graph.find_nodes(op="call_module"):
        module: Any = graph.get_submodule(str(node.target))
        if not isinstance(module, (*CONVOLUTIONS, nn.Linear)) or f"{node.target}.".startswith(left_float):
            continue
        try:
            layer = finder.layer(node)
        except NotScalableError:  # called more than once: each call will have a folded weight of its own
            continue
        is_narrow = str(node.target) in narrow
        quantized = int8_weight(layer.folded_weight(), per_channel=per_channel, axis=0, narrow=is_narrow)
        module.weight.copy_(layer.unfolded(quantized.dequantize()))


class _Statistics:
    """Mean and variance of what a batch norm takes, which normalizes by each batch's own and keeps its state."""

    def __init__(self, layer: Any) -> None:
        self._count = 0
        self._mean_C: Any = 0.0
        self._squares_C: Any = 0.0
        layer.train()
        layer.momentum = 0.0
        layer.register_forward_pre_hook(self._observe)

    def _observe(self, _layer: nn.Module, args: Sequence[torch.Tensor]) -> None:
        values = args[0].detach().transpose(0, 1).flatten(1).double()
        count = values.shape[1]
        mean_C = values.mean(1)
        shift_C = mean_C - self._mean_C
        total = self._count + count
        squares_C = (values - mean_C[:, None]).square().sum(1)
        self._squares_C = self._squares_C + squares_C + shift_C.square() * (self._count * count / total)
        self._mean_C = self._mean_C + shift_C * (count / total)
        self._count = total

    def mean_and_variance(self, ctx: Context, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and unbiased variance, C. Raises StageError, naming the layer, where they don't exist."""
        if self._count < 2:
            raise StageError(f"{ctx.kind}: {name} saw {self._count} values of each channel; use more samples")
        mean_C, variance_C = self._mean_C.float(), (self._squares_C / (self._count - 1)).float()
        if not bool(mean_C.isfinite().all() and variance_C.isfinite().all()):
            raise StageError(f"{ctx.kind}: the input of {name} is not finite; the model or its input is broken")
        return mean_C, variance_C


def _largest_shift(norms: dict[str, Any], measured: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the largest change of a mean, in standard deviations of its channel."""
    shifts = [
        (mean_C - norms[name].running_mean).abs() / torch.sqrt(norms[name].running_var + norms[name].eps)
        for name, (mean_C, _) in measured.items()
    ]
    return max(float(shift_C.max()) for shift_C in shifts)
