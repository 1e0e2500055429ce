"""Showing samples to observers, by one process or by several with the same result.

What an observer ends with depends on the order of what it saw: a moving average weighs the last batch most, and a
histogram is spread anew whenever its range grows. So it is not their states that several workers bring together. Each
runs its batches with nobody watching and notes what observers need to know of them: least and greatest values, and in a
second pass, when the range that a histogram has by then is known, the counts. Then every worker tells its observers of
all batches, in their order.

Shape legend: B batches, W watched tensors, H of them watched by histograms, C counts of a histogram.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.fx import GraphModule, Interpreter

from ptpipe import Context, StageError
from ptpipe_quant.fake_quant import ActivationFakeQuant
from ptpipe_quant.torch_ao import HistogramObserver, add_counts, counts_over, extremes_of, watches_range
from ptpipe_torch import Batch, Data
from ptpipe_torch.runtime import torch_threads
from ptpipe_torch.team import Team

Look: TypeAlias = Callable[[int, nn.Module, torch.Tensor], torch.Tensor | None]
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


def show(module: GraphModule, samples: Samples, team: Team) -> None:
    """Show the samples to all observers of a prepared network. Every worker ends with the state of one process.

    Raises StageError where a watched tensor is not finite; the layer that gives it is named.
    """
    fake_quants = [part for part in module.modules() if isinstance(part, ActivationFakeQuant)]
    for fake_quant in fake_quants:  # these watch in training only, and must see what float layers give
        fake_quant.train().enable_fake_quant(False)
    module = module.to(memory_format=torch.channels_last)
    with torch_threads(None), torch.no_grad():
        if team.size == 1:
            _show_alone(module, samples)
        else:
            _show_together(module, samples, team)
    for fake_quant in fake_quants:
        fake_quant.eval().enable_fake_quant(True)


def _show_alone(module: GraphModule, samples: Samples) -> None:
    for batch in samples.batches(np.arange(samples.num)):
        try:
            module(batch.images_NCHW)
        except RuntimeError:  # a histogram of what is not a number
            _extremes(module, batch, samples.ctx)
            raise


def _show_together(module: GraphModule, samples: Samples, team: Team) -> None:
    share, calls = _Share(samples, team), _calls(module)
    mine = torch.stack([_extremes(module, batch, samples.ctx) for batch in share.batches()])
    # Of each worker and each of its rounds; batches follow one another round by round.
    extremes_BW2 = _gathered(team, mine).transpose(0, 1).flatten(0, 1)[: samples.num_batches]
    for extremes_W2 in extremes_BW2:
        for call, extremes in zip(calls, extremes_W2, strict=True):
            if not isinstance(call.watcher, HistogramObserver):
                call.watcher(extremes, **call.how)
    if any(isinstance(call.watcher, HistogramObserver) for call in calls):
        _fill_histograms(module, calls, share, _ranges_so_far(calls, extremes_BW2))


def _fill_histograms(module: GraphModule, calls: list[_Call], share: _Share, ranges_BW2: torch.Tensor) -> None:
    watched_H = [number for number, call in enumerate(calls) if isinstance(call.watcher, HistogramObserver)]
    for round_, batch in enumerate(share.batches()):
        ranges_W2 = ranges_BW2[share.number(round_, share.team.rank)]
        noted = _noted(module, batch, partial(_counts, ranges_W2))
        mine_HC = torch.stack([counts_C for counts_C in noted if counts_C is not None])
        for rank, counts_HC in enumerate(_gathered(share.team, mine_HC)):
            if share.is_repeated(round_, rank):
                break
            ranges_W2 = ranges_BW2[share.number(round_, rank)]
            for number, counts_C in zip(watched_H, counts_HC, strict=True):
                add_counts(calls[number].watcher, ranges_W2[number], counts_C)


def _counts(ranges_W2: torch.Tensor, number: int, watcher: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    return counts_over(x, watcher, ranges_W2[number]) if isinstance(watcher, HistogramObserver) else None


def _gathered(team: Team, tensor: torch.Tensor) -> torch.Tensor:
    """The tensors (float32) of all workers, by rank."""
    return torch.tensor(team.gather(tensor.flatten().tolist())).view(team.size, *tensor.shape)


@dataclass(frozen=True)
class _Share:
    """Which batches a worker shows: whole ones, so that every tensor is the one that one process has."""

    samples: Samples
    team: Team

    def number(self, round_: int, rank: int) -> int:
        """Of the batch that a worker shows in that round: who would have none shows the last one again."""
        return min(round_ * self.team.size + rank, self.samples.num_batches - 1)

    def is_repeated(self, round_: int, rank: int) -> bool:
        """Whether it is one that another worker shows too."""
        return round_ * self.team.size + rank >= self.samples.num_batches

    def batches(self) -> Iterator[Batch]:
        """Read this worker's batches, as many as every other worker has."""
        size, num_rounds = self.samples.data.loader.batch_size, -(-self.samples.num_batches // self.team.size)
        firsts = [self.number(round_, self.team.rank) * size for round_ in range(num_rounds)]
        order_N = np.concatenate([np.arange(first, min(first + size, self.samples.num)) for first in firsts])
        return self.samples.batches(order_N)


@dataclass(frozen=True)
class _Call:
    """A watched tensor: who watches it, and how it is called in a forward pass."""

    name: str
    """The layer or operator that gives the tensor."""
    watcher: nn.Module
    how: Mapping[str, Any]


def _calls(module: GraphModule) -> list[_Call]:
    nodes = [node for node in module.graph.nodes if node.op == "call_module"]
    return [
        _Call(node.args[0].name, watcher, dict(node.kwargs))
        for node in nodes
        if watches_range(watcher := module.get_submodule(node.target))
    ]


class _Noting(Interpreter):  # type: ignore[misc]  # torch comes without types
    """Runs a network past its observers."""

    def __init__(self, module: GraphModule, look: Look) -> None:
        super().__init__(module)
        self._look, self.noted = look, list[torch.Tensor | None]()

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watcher = self.fetch_attr(target)
        if not watches_range(watcher):
            return super().call_module(target, args, kwargs)
        self.noted.append(self._look(len(self.noted), watcher, args[0]))
        return args[0]


def _noted(module: GraphModule, batch: Batch, look: Look) -> list[torch.Tensor | None]:
    noting = _Noting(module, look)
    noting.run(batch.images_NCHW)
    return noting.noted


def _extremes(module: GraphModule, batch: Batch, ctx: Context) -> torch.Tensor:
    """Least and greatest value of each watched tensor. Raises StageError where one is not finite."""
    noted = _noted(module, batch, lambda _, watcher, x: extremes_of(x, watcher))
    for call, extremes in zip(_calls(module), noted, strict=True):
        if extremes is None or not extremes.isfinite().all():
            raise StageError(
                f"{ctx.kind}: {call.name} gave a value that is not finite; the model or its input is broken"
            )
    return torch.stack([extremes for extremes in noted if extremes is not None])


def _ranges_so_far(calls: list[_Call], extremes_BW2: torch.Tensor) -> torch.Tensor:
    """The range of all that a tensor's observer has seen by then, that tensor included."""
    ranges_BW2 = extremes_BW2.clone()
    so_far: dict[nn.Module, tuple[float, float]] = {}
    for ranges_W2 in ranges_BW2:
        for call, limits in zip(calls, ranges_W2, strict=True):
            low, high = so_far.get(call.watcher, (math.inf, -math.inf))
            limits[0].clamp_(max=low)
            limits[1].clamp_(min=high)
            so_far[call.watcher] = (limits[0].item(), limits[1].item())
    return ranges_BW2
