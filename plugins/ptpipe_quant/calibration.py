"""Calibration: run samples through the observers of a prepared network, on one process or several, with one result.

Each worker runs whole batches with observers bypassed. What observers count are sums, which workers add at the end. A
moving average gives the last batch most weight, so for other observers each batch's minima and maxima are kept, and
every worker updates its observers with those of all batches, in their order.

Shape legend: B batches of a worker, R workers, T observed tensors, H counting observers, C bins.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ptpipe import Context, StageError
from ptpipe_quant.fake_quant import ActivationFakeQuant
from ptpipe_torch import Batch, Data
from ptpipe_torch.data.calibration_samples import check_finite
from ptpipe_torch.distributed.worker_group import WorkerGroup
from ptpipe_torch.int8.observers import observes_range
from ptpipe_torch.int8.value_counts import CountingObserver, has_range, min_max_of
from ptpipe_torch.memory_format import to_channels_last
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.runtime import torch_threads

# Of a tensor, over all samples: enough to choose the range of 256 levels (decision 0024 has the figures).
_MAX_COUNTED = 1 << 20
_MIN_POSITIONS = 4
"""Of a sample's feature map."""

Statistic: TypeAlias = Callable[[Any, torch.Tensor], torch.Tensor]
"""What to record of an observed tensor: takes its observer and the tensor."""


@dataclass(frozen=True)
class Samples:
    """The first `num` samples of a split."""

    data: Data
    split: str
    num: int
    ctx: Context
    channels_last: bool = False
    """Memory format of the images."""

    @property
    def num_batches(self) -> int:
        """Number of batches of the data set's batch size; the last one may be smaller."""
        return -(-self.num // self.data.loader.batch_size)

    def batches(self, order_N: npt.NDArray[np.int64]) -> Iterator[Batch]:
        """Yield batches of these samples, and report progress. Raises StageError for one that is not finite."""
        done = 0
        for batch in self.data.batches(self.split, order_N=order_N, channels_last=self.channels_last):
            check_finite(self.ctx.kind, self.data, self.split, batch)
            yield batch
            done += len(batch)
            self.ctx.progress(done, len(order_N), "samples")


def run_calibration(module: GraphModule, samples: Samples, workers: WorkerGroup) -> None:
    """Run the samples through all observers of a prepared network, in place; every worker ends with the same state.

    Raises StageError if an input is not finite, and names the sample, or if an output is not, and names its layer.
    """
    fake_quants = [layer for layer in module.modules() if isinstance(layer, ActivationFakeQuant)]
    for fake_quant in fake_quants:  # they observe in training mode only, and must see the outputs of float layers
        fake_quant.train()
        fake_quant.fake_quant_enabled.zero_()
    inputs = zeros(samples.data.info.signature.inputs, 2)
    channels_last = to_channels_last(_Unobserved(module), inputs, samples.ctx.log)
    samples = replace(samples, channels_last=channels_last)
    overwrite_inputs(module)
    with torch_threads(None), torch.no_grad():
        _calibrate(module, samples, workers)
    for fake_quant in fake_quants:
        fake_quant.eval()
        fake_quant.fake_quant_enabled.fill_(1)


def overwrite_inputs(module: GraphModule) -> None:
    """Let each activation overwrite its input if nothing else reads it: its memory is still in the processor's cache.

    A clamp then takes a tenth of the time. Only what convolutions, linear layers, batch norms and sums have computed
    is overwritten; other operators may return views.
    """
    for node in module.graph.nodes:
        if node.op == "call_module":
            layer: Any = module.get_submodule(str(node.target))
            if isinstance(layer, nn.Sequential):  # a fused layer: convolution and activation
                layer = layer[-1]
            elif not all(_is_overwritable(module, value) for value in node.all_input_nodes):
                continue
            if hasattr(layer, "inplace"):
                layer.inplace = True


def _is_overwritable(module: GraphModule, node: Node) -> bool:
    if len(node.users) > 1:
        return False
    if node.op == "call_module":
        layers = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.Linear)
        return isinstance(module.get_submodule(str(node.target)), layers)
    return node.target in (operator.add, torch.add)


def not_finite(ctx: Context, name: str) -> StageError:
    """Return the error that names the layer with such an output."""
    return StageError(f"{ctx.kind}: the output of {name} is not finite; the model or its input is broken")


def _calibrate(module: GraphModule, samples: Samples, workers: WorkerGroup) -> None:
    tensors = observed_tensors(module)
    if samples.num_batches < workers.size:
        samples.ctx.notice(f"{workers.size} workers for {samples.num_batches} batches: some workers have no batch")
    counters = {
        observer: CountingObserver()
        for observer in dict.fromkeys(tensor.observer for tensor in tensors)
        if isinstance(observer, CountingObserver)
    }
    num_rounds = -(-samples.num_batches // workers.size)
    limits_BT2 = torch.tensor([torch.inf, -torch.inf]).repeat(num_rounds, len(tensors), 1)
    for round_, batch in enumerate(_batches(samples, workers)):
        limits_BT2[round_] = _observe(module, tensors, counters, batch, samples)
    for limits_RT2 in workers.all_gather_tensor(limits_BT2).unbind(1):
        for limits_T2 in limits_RT2:
            _update_observers(tensors, limits_T2)
    _add_counts(counters, workers)


def _batches(samples: Samples, workers: WorkerGroup) -> Iterator[Batch]:
    """Yield this worker's batches: whole ones, so that every tensor is the one that a single process has."""
    size = samples.data.loader.batch_size
    starts = range(samples.num_batches)[workers.rank_slice(samples.num_batches)]
    order_N = [np.arange(start * size, min((start + 1) * size, samples.num)) for start in starts]
    return samples.batches(np.concatenate(order_N)) if order_N else iter(())


def _observe(
    module: GraphModule,
    tensors: Sequence[ObservedTensor],
    counters: Mapping[CountingObserver, CountingObserver],
    batch: Batch,
    samples: Samples,
) -> torch.Tensor:
    """Return the minimum and maximum of each observed tensor, T x 2. Raises StageError if one is not finite."""

    def observe(observer: Any, x: torch.Tensor) -> torch.Tensor:
        counter = counters.get(observer)
        return min_max_of(x) if counter is None else counter.observe(x, _stride(x, len(batch), samples.num))

    interpreter = RecordingInterpreter(module, observe)
    interpreter.run(*batch.args)
    limits_T2 = torch.stack(interpreter.recorded)
    broken_T = has_range(limits_T2) & ~limits_T2.isfinite().all(-1)
    if broken_T.any():
        raise not_finite(samples.ctx, tensors[int(broken_T.nonzero()[0])].name)
    return limits_T2


def _stride(x: torch.Tensor, batch_size: int, num_samples: int) -> int:
    """Return at which positions of a feature map values are counted: at all, at every third and so on.

    It depends on the sizes of a sample alone, so that batches and workers change nothing, and has no common divisor
    with them, so that no row, column or phase of a pattern is left out.
    """
    if x.dim() < 4 or len(x) != batch_size:  # other axes may hold the samples
        return 1
    num_values, num_positions = num_samples * x[0].numel(), math.prod(x.shape[2:])
    least = max(1, min(num_values // _MAX_COUNTED, num_positions // _MIN_POSITIONS))
    return next(stride for stride in itertools.count(least) if math.gcd(stride, num_positions) == 1)


def _update_observers(tensors: Sequence[ObservedTensor], limits_T2: torch.Tensor) -> None:
    """Update observers that don't count, as if they had observed the batch itself."""
    for tensor, limits in zip(tensors, limits_T2, strict=True):
        if has_range(limits) and not isinstance(tensor.observer, CountingObserver):
            tensor.observer(limits, **tensor.arguments)


def _add_counts(counters: Mapping[CountingObserver, CountingObserver], workers: WorkerGroup) -> None:
    """Add what all workers have counted to the observers, whose earlier counts stay."""
    if not counters:
        return
    limits_H2 = torch.stack([torch.stack([counter.min_val, counter.max_val]) for counter in counters.values()])
    limits_RH2 = workers.all_gather_tensor(limits_H2)
    limits_H2 = torch.stack([limits_RH2[..., 0].amin(0), limits_RH2[..., 1].amax(0)], dim=1)
    for (observer, counter), limits in zip(counters.items(), limits_H2, strict=True):
        if has_range(limits):  # bins of one width on all workers
            observer.extend(limits)
            counter.extend(torch.stack([observer.min_val, observer.max_val]))
    counts = torch.stack([torch.cat([counter.num_zeros[None], counter.counts_C]) for counter in counters.values()])
    sums = (
        torch.tensor(workers.all_reduce(counts.flatten().tolist()), dtype=torch.float64).long().view_as(counts)
    )  # exact to 2^53
    for observer, row in zip(counters, sums, strict=True):
        observer.add(row[0], row[1:])


@dataclass(frozen=True)
class ObservedTensor:
    """A tensor with its observer (or fake quantization) and the observer's keyword arguments in a forward pass."""

    name: str
    """The path of the layer that computes the tensor, or the name of the operator's node."""
    observer: Any
    arguments: Mapping[str, Any]


def observed_tensors(module: GraphModule) -> list[ObservedTensor]:
    """Return all observed tensors of a prepared network, in the order of a forward pass."""
    tensors: list[ObservedTensor] = []
    for node in module.graph.nodes:
        if node.op == "call_module" and observes_range(observer := module.get_submodule(str(node.target))):
            source = node.all_input_nodes[0]
            name = str(source.target) if source.op == "call_module" else source.name
            if any(tensor.name == name for tensor in tensors):  # a layer that is called more than once
                name = f"{name} ({source.name})"
            tensors.append(ObservedTensor(name, observer, dict(node.kwargs)))
    return tensors


class RecordingInterpreter(Interpreter):
    """Runs a network with observers bypassed, and records a statistic of each observed tensor."""

    def __init__(self, module: GraphModule, statistic: Statistic) -> None:
        super().__init__(module)
        self.extra_traceback = False  # would be added to the error's message
        self._statistic, self.recorded = statistic, list[torch.Tensor]()

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        observer: Any = self.fetch_attr(target)
        if not observes_range(observer):
            return super().call_module(target, args, kwargs)
        self.recorded.append(self._statistic(observer, args[0]))
        return args[0]


class _Unobserved(nn.Module):
    """A prepared network whose observers see nothing."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> Any:
        return RecordingInterpreter(self.module, lambda _observer, x: x).run(*inputs)
