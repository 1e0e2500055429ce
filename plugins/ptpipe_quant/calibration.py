"""Showing samples to reporters, by one process or by several with the same result.

What an observer ends with depends on the order of what it saw: a moving average weighs the last batch most, and a
histogram is spread anew whenever its range grows. So it is not their states that several workers bring together. In a
round each runs a batch of its own with nobody watching, and all exchange what reporters need to know of it: least and
greatest values, and from a second pass, for the range that a histogram has by then, the counts. Then every worker tells
its reporters of the round's batches, in their order.

Shape legend: R workers (batches of a round), W watched tensors, H of them watched by histograms, C counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.fx import GraphModule, Interpreter

from ptpipe import Context, StageError
from ptpipe_quant.fake_quant import ActivationFakeQuant
from ptpipe_quant.torch_ao import HistogramObserver, add_counts, counts_over, extremes_of, is_range, watches_range
from ptpipe_torch import Batch, Data
from ptpipe_torch.distributed.worker_group import WorkerGroup
from ptpipe_torch.runtime import torch_threads

Look: TypeAlias = Callable[[int, nn.Module, torch.Tensor], torch.Tensor]
"""What to note of a tensor: its number among those watched, who watches it, the tensor."""


@dataclass(frozen=True)
class Samples:
    """The first samples of a split."""

    data: Data
    split: str
    num: int
    ctx: Context

    @property
    def num_batches(self) -> int:
        """Batches of the data set's own size, the last one perhaps smaller."""
        return -(-self.num // self.data.loader.batch_size)

    def batches(self, order_N: npt.NDArray[np.int64]) -> Iterator[Batch]:
        """Read these samples, and tell how far that is."""
        done = 0
        for batch in self.data.batches(self.split, order_N=order_N, channels_last=True):
            yield batch
            done += len(batch.labels_N)
            self.ctx.progress(done, len(order_N), "samples")


def show(module: GraphModule, samples: Samples, workers: WorkerGroup) -> None:
    """Show the samples to all reporters of a prepared network. Every worker ends with the state of one process.

    Raises StageError where a watched tensor is not finite; the layer that gives it is named.
    """
    fake_quants = [part for part in module.modules() if isinstance(part, ActivationFakeQuant)]
    for fake_quant in fake_quants:  # these watch in training only, and must see what float layers give
        fake_quant.train().enable_fake_quant(False)
    module = module.to(memory_format=torch.channels_last)
    with torch_threads(None), torch.no_grad():
        if workers.size == 1:
            _show_alone(module, samples)
        else:
            _show_together(module, samples, workers)
    for fake_quant in fake_quants:
        fake_quant.eval().enable_fake_quant(True)


def not_finite(ctx: Context, name: str) -> StageError:
    """The error that names who gave such a value."""
    return StageError(f"{ctx.kind}: {name} gave a value that is not finite; the model or its input is broken")


def _show_alone(module: GraphModule, samples: Samples) -> None:
    for batch in samples.batches(np.arange(samples.num)):
        try:
            module(batch.images_NCHW)
        except RuntimeError:  # perhaps a histogram of what is not a number: that would be named
            with suppress(RuntimeError):
                _extremes(module, watched_tensors(module), batch, samples.ctx)
            raise


def _show_together(module: GraphModule, samples: Samples, workers: WorkerGroup) -> None:
    share, calls = _Share(samples, workers), watched_tensors(module)
    if samples.num_batches < workers.size:
        samples.ctx.notice(
            f"{workers.size} workers for {samples.num_batches} batches: some have none of their own to show"
        )
    for round_, batch in enumerate(share.batches()):
        extremes_RW2 = workers.all_gather_tensor(_extremes(module, calls, batch, samples.ctx))
        ranges_RW2 = _ranges(calls, extremes_RW2)
        counts_RHC = workers.all_gather_tensor(_counts(module, calls, batch, ranges_RW2[workers.rank]))
        for rank in range(share.num_new(round_)):
            _tell(calls, extremes_RW2[rank], ranges_RW2[rank], counts_RHC[rank])


def _tell(
    calls: Sequence[Watched], extremes_W2: torch.Tensor, ranges_W2: torch.Tensor, counts_HC: torch.Tensor
) -> None:
    """Tell reporters of a batch what they would have seen."""
    rows = iter(counts_HC)
    for call, extremes, limits in zip(calls, extremes_W2, ranges_W2, strict=True):
        if isinstance(call.watcher, HistogramObserver):
            counts_C = next(rows)
            if is_range(extremes):
                add_counts(call.watcher, limits, counts_C)
        elif is_range(extremes):
            call.watcher(extremes, **call.how)


@dataclass(frozen=True)
class _Share:
    """Which batches a worker shows: whole ones, so that every tensor is the one that one process has."""

    samples: Samples
    workers: WorkerGroup

    def number(self, round_: int, rank: int) -> int:
        """Of the batch that a worker shows in that round: who would have none shows the last one again."""
        return min(round_ * self.workers.size + rank, self.samples.num_batches - 1)

    def num_new(self, round_: int) -> int:
        """Of the batches of that round, how many nobody has shown before."""
        return min(self.workers.size, self.samples.num_batches - round_ * self.workers.size)

    def batches(self) -> Iterator[Batch]:
        """Read this worker's batches, as many as every other worker has."""
        size, num_rounds = self.samples.data.loader.batch_size, -(-self.samples.num_batches // self.workers.size)
        firsts = [self.number(round_, self.workers.rank) * size for round_ in range(num_rounds)]
        order_N = np.concatenate([np.arange(first, min(first + size, self.samples.num)) for first in firsts])
        return self.samples.batches(order_N)


@dataclass(frozen=True)
class Watched:
    """A watched tensor: who watches it, and how it is called in a forward pass."""

    name: str
    """The layer or operator that gives the tensor."""
    watcher: nn.Module
    how: Mapping[str, Any]

    @property
    def is_histogram(self) -> bool:
        """Whether the watcher is one."""
        return isinstance(self.watcher, HistogramObserver)


def watched_tensors(module: GraphModule) -> list[Watched]:
    """All of them, in the order of a forward pass."""
    nodes = [node for node in module.graph.nodes if node.op == "call_module"]
    return [
        Watched(node.args[0].name, watcher, dict(node.kwargs))
        for node in nodes
        if watches_range(watcher := module.get_submodule(node.target))
    ]


class _Noting(Interpreter):  # type: ignore[misc]  # torch comes without types
    """Runs a network past its reporters."""

    def __init__(self, module: GraphModule, look: Look) -> None:
        super().__init__(module)
        self._look, self.noted = look, list[torch.Tensor]()

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watcher = self.fetch_attr(target)
        if not watches_range(watcher):
            return super().call_module(target, args, kwargs)
        self.noted.append(self._look(len(self.noted), watcher, args[0]))
        return args[0]


def _noted(module: GraphModule, batch: Batch, look: Look) -> list[torch.Tensor]:
    noting = _Noting(module, look)
    noting.run(batch.images_NCHW)
    return noting.noted


def _extremes(module: GraphModule, calls: Sequence[Watched], batch: Batch, ctx: Context) -> torch.Tensor:
    """Least and greatest value of each watched tensor, W x 2. Raises StageError where one is not finite."""
    noted = _noted(module, batch, lambda _, watcher, x: extremes_of(x, watcher))
    for call, extremes in zip(calls, noted, strict=True):
        if is_range(extremes) and not extremes.isfinite().all():
            raise not_finite(ctx, call.name)
    return torch.stack(noted)


def _ranges(calls: Sequence[Watched], extremes_RW2: torch.Tensor) -> torch.Tensor:
    """The range that each histogram has when it has seen that tensor too, R x W x 2."""
    ranges_RW2 = extremes_RW2.clone()
    so_far = {call.watcher: (call.watcher.min_val, call.watcher.max_val) for call in calls if call.is_histogram}
    for ranges_W2 in ranges_RW2:
        for call, limits in zip(calls, ranges_W2, strict=True):
            if call.is_histogram:
                low, high = so_far[call.watcher]
                so_far[call.watcher] = torch.minimum(limits[0], low), torch.maximum(limits[1], high)
                limits[0], limits[1] = so_far[call.watcher]
    return ranges_RW2


def _counts(module: GraphModule, calls: Sequence[Watched], batch: Batch, ranges_W2: torch.Tensor) -> torch.Tensor:
    """What histograms of these ranges count, H x C; without a histogram the network is not run again."""
    if not any(call.is_histogram for call in calls):
        return torch.empty(0)

    def count(number: int, watcher: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if isinstance(watcher, HistogramObserver):
            return counts_over(x, watcher, ranges_W2[number])
        return torch.empty(0)

    return torch.stack([counts_C for counts_C in _noted(module, batch, count) if len(counts_C)])
