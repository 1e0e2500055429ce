"""Calibration: run samples through the observers of a prepared network, on one process or several, with one result.

The state of an observer depends on the order of what it observed: a moving average gives the last batch most weight,
and a histogram is redistributed whenever its range grows. So workers do not merge observer states. In each round every
worker runs one batch with observers bypassed, and all gather what observers need to know of it: minimum and maximum,
and from a second pass the histogram counts over the range that the histogram has by then. Then every worker updates
its observers with the round's batches, in their order.

Shape legend: R workers (batches of a round), T observed tensors, H of them observed by histograms, C histogram bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.fx import GraphModule, Interpreter

from ptpipe import Context, StageError
from ptpipe_quant.fake_quant import ActivationFakeQuant
from ptpipe_torch import Batch, Data
from ptpipe_torch.distributed.worker_group import WorkerGroup
from ptpipe_torch.int8.histogram import MinErrorHistogramObserver, has_range, min_max_of
from ptpipe_torch.int8.observers import observes_range
from ptpipe_torch.memory_format import to_channels_last
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.runtime import torch_threads

Statistic: TypeAlias = Callable[[int, Any, torch.Tensor], torch.Tensor]
"""What to record of a tensor: takes its index among the observed tensors, its observer, the tensor."""


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
        """Yield batches of these samples, and report progress."""
        done = 0
        for batch in self.data.batches(self.split, order_N=order_N, channels_last=self.channels_last):
            yield batch
            done += len(batch)
            self.ctx.progress(done, len(order_N), "samples")


def run_calibration(module: GraphModule, samples: Samples, workers: WorkerGroup) -> None:
    """Run the samples through all observers of a prepared network, in place; every worker ends with the same state.

    Raises StageError if an observed tensor is not finite, and names the layer that computed it.
    """
    fake_quants = [layer for layer in module.modules() if isinstance(layer, ActivationFakeQuant)]
    for fake_quant in fake_quants:  # they observe in training mode only, and must see the outputs of float layers
        fake_quant.train()
        fake_quant.fake_quant_enabled.zero_()
    inputs = zeros(samples.data.info.signature.inputs, 2)
    channels_last = to_channels_last(deepcopy(module), inputs, samples.ctx.log)  # observers must not see them
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module.to(memory_format=layout)  # type: ignore[call-overload]  # missing in torch's annotations
    samples = replace(samples, channels_last=channels_last)
    with torch_threads(None), torch.no_grad():
        if workers.size == 1:
            _calibrate(module, samples)
        else:
            _calibrate_in_rounds(module, samples, workers)
    for fake_quant in fake_quants:
        fake_quant.eval()
        fake_quant.fake_quant_enabled.fill_(1)


def not_finite(ctx: Context, name: str) -> StageError:
    """Return the error that names the layer with such an output."""
    return StageError(f"{ctx.kind}: the output of {name} is not finite; the model or its input is broken")


def _calibrate(module: GraphModule, samples: Samples) -> None:
    for batch in samples.batches(np.arange(samples.num)):
        module(*batch.args)


def _calibrate_in_rounds(module: GraphModule, samples: Samples, workers: WorkerGroup) -> None:
    shard, tensors = _Shard(samples, workers), observed_tensors(module)
    if samples.num_batches < workers.size:
        samples.ctx.notice(f"{workers.size} workers for {samples.num_batches} batches: some workers have no batch")
    for round_, batch in enumerate(shard.batches()):
        limits_RT2 = workers.all_gather_tensor(_min_max(module, tensors, batch, samples.ctx))
        ranges_RT2 = _running_ranges(tensors, limits_RT2)
        counts_RHC = workers.all_gather_tensor(_counts(module, tensors, batch, ranges_RT2[workers.rank]))
        for rank in range(shard.num_new(round_)):
            _update_observers(tensors, limits_RT2[rank], ranges_RT2[rank], counts_RHC[rank])


def _update_observers(
    tensors: Sequence[ObservedTensor], limits_T2: torch.Tensor, ranges_T2: torch.Tensor, counts_HC: torch.Tensor
) -> None:
    """Update observers as if they had observed the batch itself."""
    rows = iter(counts_HC)
    for tensor, limits, range_ in zip(tensors, limits_T2, ranges_T2, strict=True):
        if isinstance(tensor.observer, MinErrorHistogramObserver):
            counts_C = next(rows)
            if has_range(limits):
                tensor.observer.merge(range_, counts_C)
        elif has_range(limits):
            tensor.observer(limits, **tensor.arguments)


@dataclass(frozen=True)
class _Shard:
    """The batches of one worker: whole ones, so that every tensor is the one that a single process has."""

    samples: Samples
    workers: WorkerGroup

    def batch_index(self, round_: int, rank: int) -> int:
        """Return the batch that a worker runs in a round; a worker without a new one repeats the last batch."""
        return min(round_ * self.workers.size + rank, self.samples.num_batches - 1)

    def num_new(self, round_: int) -> int:
        """Return how many batches of the round are not repetitions."""
        return min(self.workers.size, self.samples.num_batches - round_ * self.workers.size)

    def batches(self) -> Iterator[Batch]:
        """Yield this worker's batches, as many as every other worker has."""
        size, num_rounds = self.samples.data.loader.batch_size, -(-self.samples.num_batches // self.workers.size)
        starts = [self.batch_index(round_, self.workers.rank) * size for round_ in range(num_rounds)]
        order_N = np.concatenate([np.arange(start, min(start + size, self.samples.num)) for start in starts])
        return self.samples.batches(order_N)


@dataclass(frozen=True)
class ObservedTensor:
    """A tensor with its observer (or fake quantization) and the observer's keyword arguments in a forward pass."""

    name: str
    """The layer or operator that computes the tensor."""
    observer: Any
    arguments: Mapping[str, Any]

    @property
    def has_histogram(self) -> bool:
        """Whether the observer is a histogram."""
        return isinstance(self.observer, MinErrorHistogramObserver)


def observed_tensors(module: GraphModule) -> list[ObservedTensor]:
    """Return all observed tensors of a prepared network, in the order of a forward pass."""
    return [
        ObservedTensor(node.all_input_nodes[0].name, observer, dict(node.kwargs))
        for node in module.graph.nodes
        if node.op == "call_module" and observes_range(observer := module.get_submodule(str(node.target)))
    ]


class RecordingInterpreter(Interpreter):
    """Runs a network with observers bypassed, and records a statistic of each observed tensor."""

    def __init__(self, module: GraphModule, statistic: Statistic) -> None:
        super().__init__(module)
        self._statistic, self.recorded = statistic, list[torch.Tensor]()

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        observer: Any = self.fetch_attr(target)
        if not observes_range(observer):
            return super().call_module(target, args, kwargs)
        self.recorded.append(self._statistic(len(self.recorded), observer, args[0]))
        return args[0]


def _record(module: GraphModule, batch: Batch, statistic: Statistic) -> list[torch.Tensor]:
    interpreter = RecordingInterpreter(module, statistic)
    interpreter.run(*batch.args)
    return interpreter.recorded


def _min_max(module: GraphModule, tensors: Sequence[ObservedTensor], batch: Batch, ctx: Context) -> torch.Tensor:
    """Return the minimum and maximum of each observed tensor, T x 2. Raises StageError if one is not finite."""

    def limits_of(_: int, observer: Any, x: torch.Tensor) -> torch.Tensor:
        return min_max_of(x, ignore_infinite=isinstance(observer, MinErrorHistogramObserver))

    recorded = _record(module, batch, limits_of)
    for tensor, limits in zip(tensors, recorded, strict=True):
        if has_range(limits) and not limits.isfinite().all():
            raise not_finite(ctx, tensor.name)
    return torch.stack(recorded)


def _running_ranges(tensors: Sequence[ObservedTensor], limits_RT2: torch.Tensor) -> torch.Tensor:
    """Return the range of each histogram after it has observed that tensor too, R x T x 2."""
    ranges_RT2 = limits_RT2.clone()
    running = {
        tensor.observer: (tensor.observer.min_val, tensor.observer.max_val)
        for tensor in tensors
        if tensor.has_histogram
    }
    for ranges_T2 in ranges_RT2:
        for tensor, limits in zip(tensors, ranges_T2, strict=True):
            if tensor.has_histogram:
                min_val, max_val = running[tensor.observer]
                running[tensor.observer] = torch.minimum(limits[0], min_val), torch.maximum(limits[1], max_val)
                limits[0], limits[1] = running[tensor.observer]
    return ranges_RT2


def _counts(
    module: GraphModule, tensors: Sequence[ObservedTensor], batch: Batch, ranges_T2: torch.Tensor
) -> torch.Tensor:
    """Return the counts of histograms of these ranges, H x C; without a histogram the network is not run again."""
    if not any(tensor.has_histogram for tensor in tensors):
        return torch.empty(0)

    def count(index: int, observer: Any, x: torch.Tensor) -> torch.Tensor:
        if isinstance(observer, MinErrorHistogramObserver):
            return observer.counts(x, ranges_T2[index])
        return torch.empty(0)

    return torch.stack([counts_C for counts_C in _record(module, batch, count) if len(counts_C)])
