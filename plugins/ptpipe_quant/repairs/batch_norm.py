"""Re-estimate the statistics of batch norms for rounded weights.

A batch norm subtracts the mean and divides by the deviation of what its layer computed in training, with float weights.
Rounded weights compute something else, by a shift and a factor for each channel: just what new statistics undo, before
they are folded. Layer by layer, in the order of a forward pass, so that each one sees what the int8 network will feed
it with; first the variance, on which the folded weight and its rounding depend, then the mean with the new rounding.

Shape legend: C channels of a batch norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe import Context, StageError
from ptpipe_quant.repairs.channels import CONVOLUTIONS, EdgeFinder, Layer, NotScalableError
from ptpipe_quant.repairs.config import ReestimateBatchNormConfig
from ptpipe_quant.repairs.float_model import traced
from ptpipe_quant.repairs.lockstep import BatchRun
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
    is_float = _check_keeps_norms(ctx, model)
    graph: Any = traced(model, ()) if is_float else model.build_prepared()
    assert isinstance(graph, GraphModule), type(graph)
    rounding = _Rounding(graph, model, config) if is_float else None
    norms = _own_norms(graph, model)
    if not norms:
        raise StageError(f"{ctx.kind}: this network has no batch norm with running statistics of its own")
    former = {name: (norm.running_mean.clone(), norm.running_var.clone()) for name, norm in norms.items()}
    with torch_threads(None):
        runs = [
            BatchRun(graph, inputs) for inputs in network_inputs(ctx, model, data, config.split, config.num_samples)
        ]
        for node in graph.graph.nodes:
            for name, norm, layer in _normalized_at(graph, node, norms, rounding):
                _set_statistics(ctx, name, norm, _Source(graph, node, norm, layer, rounding, runs))
            for run in runs:
                run.step(node)
    shifts = [
        ((norms[name].running_mean - mean_C).abs() / torch.sqrt(variance_C + norms[name].eps)).max().item()
        for name, (mean_C, variance_C) in former.items()
    ]
    ctx.metric(batch_norms=len(norms), largest_shift=max(shifts))
    tensors = dict(model.tensors)
    for name, norm in norms.items():
        tensors |= {f"{name}.running_mean": norm.running_mean, f"{name}.running_var": norm.running_var}
    return Model(model.recipe, tensors)


def _check_keeps_norms(ctx: Context, model: Model) -> bool:
    """Return whether a model is float. Raises StageError for one whose batch norms are folded."""
    if model.recipe.backend is None and not model.recipe.convert:
        return True
    last = model.recipe.prepare[-1] if model.recipe.prepare else None
    is_qat = last is not None and last.address.endswith(":prepare_qat")
    if model.recipe.convert or last is None or not is_qat or last.arguments.get("batch_norm") != "train":
        raise StageError(
            f"{ctx.kind}: the batch norms of this model are folded into its weights already. Put it in front of "
            "quant.prepare, or behind the training that follows quant.prepare_qat with `batch_norm: train`"
        )
    return False


def _own_norms(network: nn.Module, model: Model) -> dict[str, Any]:
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


class _Rounding:
    """Rounds the weights of a float network as quant.prepare and quant.convert will, with batch norms folded in."""

    def __init__(self, graph: GraphModule, model: Model, config: ReestimateBatchNormConfig) -> None:
        left_float = tuple(f"{name}." for name in float_names(model.build(), config.skip))
        self._per_channel = chosen_weights(config) == "per_channel"
        self._narrow = set(saturating_layers(graph, config.backend))
        finder = EdgeFinder(graph, set(graph.state_dict()))
        self.layers: dict[Node, Layer] = {}
        self._weights: dict[str, torch.Tensor] = {}
        for node in graph.graph.find_nodes(op="call_module"):
            module = graph.get_submodule(str(node.target))
            if not isinstance(module, (*CONVOLUTIONS, nn.Linear)) or f"{node.target}.".startswith(left_float):
                continue
            try:
                layer = self.layers[node] = finder.layer(node)
            except NotScalableError:  # called more than once: each call will have a folded weight of its own
                continue
            self._weights[layer.name] = layer.weight.clone()
            self.apply(layer)

    def apply(self, layer: Layer) -> None:
        """Round the layer's own float weight, for the present statistics of its batch norm."""
        layer.weight.copy_(self._weights[layer.name])
        is_narrow = layer.name in self._narrow
        quantized = int8_weight(layer.folded_weight(), per_channel=self._per_channel, axis=0, narrow=is_narrow)
        layer.weight.copy_(layer.unfolded(quantized.dequantize()))


@dataclass(frozen=True)
class _Source:
    """Where the input of a batch norm comes from."""

    graph: GraphModule
    node: Node
    norm: Any
    layer: Layer | None
    """The layer that is rounded for the batch norm, of a float model."""
    rounding: _Rounding | None
    runs: Sequence[BatchRun]

    def values(self) -> Iterator[torch.Tensor]:
        """Yield the batch norm's input of each batch."""
        for run in self.runs:
            x = run.first_input(self.node)
            if self.layer is not None:
                yield self.layer.module(x)
            elif self.graph.get_submodule(str(self.node.target)) is self.norm:
                yield x
            else:
                yield from self._inside(x)

    def _inside(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield what a batch norm inside a layer takes, normalized by the batch's statistics for what follows."""
        seen: list[torch.Tensor] = []
        hook = self.norm.register_forward_pre_hook(lambda _norm, args: seen.append(args[0]))
        momentum, self.norm.momentum = self.norm.momentum, 0.0
        num_batches = self.norm.num_batches_tracked.clone()
        try:
            self.norm.train()
            self.graph.get_submodule(str(self.node.target))(x)
        finally:
            hook.remove()
            self.norm.eval()
            self.norm.momentum = momentum
            self.norm.num_batches_tracked.copy_(num_batches)
        yield from seen


def _normalized_at(
    graph: GraphModule, node: Node, norms: dict[str, Any], rounding: _Rounding | None
) -> Iterator[tuple[str, Any, Layer | None]]:
    """Yield the batch norms to measure before a node runs, each with the layer in front that is rounded for it."""
    if node.op != "call_module":
        return
    names = {id(norm): name for name, norm in norms.items()}
    layers = rounding.layers if rounding is not None else {}
    if node in layers and id(layers[node].norm) in names:
        yield names[id(layers[node].norm)], layers[node].norm, layers[node]
        return
    rounded_for = {id(layer.norm) for layer in layers.values()}
    for module in graph.get_submodule(str(node.target)).modules():
        if id(module) in names and id(module) not in rounded_for:
            yield names[id(module)], module, None


def _set_statistics(ctx: Context, name: str, norm: Any, source: _Source) -> None:
    """Measure variance, then mean, and set them, in place."""
    _, variance_C = _mean_and_variance(ctx, name, source.values())
    former_C = norm.running_var.clone()
    norm.running_var.copy_(variance_C.clamp(former_C / _MAX_FACTOR, former_C * _MAX_FACTOR))
    if source.layer is not None and source.rounding is not None:
        source.rounding.apply(source.layer)
    mean_C, _ = _mean_and_variance(ctx, name, source.values())
    norm.running_mean.copy_(mean_C)


def _mean_and_variance(ctx: Context, name: str, batches: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and unbiased variance over all batches, C. Raises StageError, naming the layer, if there are none."""
    count, sum_C, squares_C = 0, torch.zeros(()).double(), torch.zeros(()).double()
    for batch in batches:
        values = batch.transpose(0, 1).flatten(1).double()
        count += values.shape[1]
        sum_C = sum_C + values.sum(1)
        squares_C = squares_C + values.square().sum(1)
    if count < 2:
        raise StageError(f"{ctx.kind}: {name} saw {count} values of each channel; use more samples")
    mean_C = sum_C / count
    variance_C = ((squares_C - count * mean_C.square()) / (count - 1)).clamp(min=0)
    if not bool(mean_C.isfinite().all() and variance_C.isfinite().all()):
        raise StageError(f"{ctx.kind}: the input of {name} is not finite; the model or its input is broken")
    return mean_C.float(), variance_C.float()
