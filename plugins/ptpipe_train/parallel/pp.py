"""Chunks of the network, one after the other: the one file that knows `torch.distributed.pipelining`.

Shape legend: N images of a batch, M of a micro-batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ptpipe import JSON, StageError, write_atomically
from ptpipe_torch import Batch
from ptpipe_torch.distributed.worker_group import WorkerGroup
from ptpipe_train.evaluation import buffers_kept, left_as_it_was
from ptpipe_train.parallel.buffers import RangeUnion, SharedBuffers, broadcast_bytes
from ptpipe_train.parallel.chunks import Cuttable, balanced, find_cuts, measured_costs_s, named_cuts
from ptpipe_train.parallel.gradients import clip_together, sum_gradients
from ptpipe_train.parallel.scaler import GroupScaler
from ptpipe_train.parallel.share import IGNORED, Share, filled
from ptpipe_train.parallel.way import Objective, Way
from ptpipe_train.parallel_options import Degrees, Parallel
from ptpipe_train.settings import Settings

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved_1f1b": ScheduleInterleaved1F1B}


class Place(NamedTuple):
    """What the cutting needs beside the network."""

    images_MCHW: torch.Tensor
    """A micro-batch, on the device."""
    file: Path
    """Where the cuts are kept."""


class Chunks(Way):
    """Each process holds some chunks of the network and works on one micro-batch while others work on the next.

    With several replicas the gradients of a chunk are summed over its copies at the end of a step. The last batch of
    an epoch is filled up to the size of the others with samples that count nothing.
    """

    state_is_shared = False

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        options: Parallel,
        workers: WorkerGroup,
        batch_size: int,
        place: Place,
    ) -> None:
        super().__init__(module, settings)
        degrees = options.degrees
        self._copies, self._column = _groups(degrees, workers)
        replica, self._position = divmod(workers.rank, degrees.ranks_of_chunks)
        self.workers, self.share = workers, Share(replica, degrees.replicas)
        self._size = batch_size // degrees.replicas
        self._compress = options.compress or "none"
        self._num_microbatches = options.num_microbatches
        network = find_cuts(module)
        firsts = _agreed_cuts(network, place, options, settings, workers)
        self._begins = [network.cuts[first - 1].begins for first in firsts]
        pieces = [network.piece(*bounds) for bounds in pairwise([0, *firsts, network.num_pieces])]
        mine = range(self._position, degrees.chunks, degrees.ranks_of_chunks)
        self.needs_images, self._has_last = 0 in mine, degrees.chunks - 1 in mine
        self.trained = nn.ModuleList([pieces[number] for number in mine])
        self._losses = _Losses(settings.device)
        self._ranges: RangeUnion | None = None
        self._buffers: SharedBuffers | None = None
        self._ends = [
            _End(piece, self.settings, self._ranges_take_part, is_first=piece is pieces[0], is_last=piece is pieces[-1])
            for piece in pieces
        ]
        self._schedule = self._make_schedule(self._ends, mine, place.images_MCHW, options)
        self._ends = [self._ends[number] for number in mine]
        if degrees.replicas > 1:
            self._ranges = RangeUnion(self.trained, workers, self._copies)
            self._buffers = SharedBuffers(self.trained, self._copies)

    def _ranges_take_part(self, counts: bool) -> None:
        if self._ranges:
            self._ranges.takes_part = counts

    def _make_schedule(
        self, ends: Sequence[nn.Module], mine: Sequence[int], images_MCHW: torch.Tensor, options: Parallel
    ) -> Any:
        with left_as_it_was(self.module):
            values = _values_between(ends, images_MCHW)
        stages = [
            PipelineStage(
                ends[number],
                number,
                len(ends),
                self.settings.device,
                input_args=values[number],
                output_args=values[number + 1],
                group=self._column,
            )
            for number in mine
        ]
        make = _SCHEDULES[options.schedule or "1f1b"]
        of_rank = stages if make is ScheduleInterleaved1F1B else stages[0]
        return make(of_rank, options.num_microbatches, loss_fn=self._losses, scale_grads=False)

    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        batch = filled(batch, self._size)
        self._losses.begin(objective, scaler)
        inputs = (batch.images_NCHW,) if self.needs_images else ()
        counts_M = (batch.labels_N.view(self._num_microbatches, -1) != IGNORED).any(1).tolist()
        with self.times.part("forward_backward"), ExitStack() as ended:
            for end in self._ends:
                ended.enter_context(end.told_what_counts(counts_M))
            self._schedule.step(*inputs, target=batch.labels_N if self._has_last else None)
        if last:
            with self.times.part("communication"):
                sum_gradients(self.trained.parameters(), self._copies, self._compress)
        return self._losses.total()

    def scaler(self) -> torch.amp.GradScaler:
        scaler = GroupScaler(self.settings.device.type, enabled=self.settings.precision == "fp16")
        scaler.scale(torch.zeros((), device=self.settings.device))  # it begins with a loss, which most ranks never see
        return scaler

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        clip_together(parameters, max_norm, self._column)

    def gather(self) -> None:
        """Each rank of the first replica hands out the state of its chunks."""
        if self._buffers:
            self._buffers.unite()
        own = {name: tensor for piece in self.trained for name, tensor in piece.state_dict().items()}
        content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in own.items()})
        for rank in range(dist.get_world_size(self._column)):
            received = broadcast_bytes(content, rank)
            if self._position != rank:
                self.module.load_state_dict(load(received), strict=False)

    def facts(self) -> dict[str, JSON]:
        return {"chunks_begin_at": list[JSON](self._begins)}


def _groups(degrees: Degrees, workers: WorkerGroup) -> tuple[Any, Any]:
    """Of all copies of this rank's chunks; and of this rank's copy of the network. By torch's rule all make all.

    The workers are a mesh of replicas x ranks of chunks; a DeviceMesh's own groups would not know the time limit.
    """
    num = degrees.ranks_of_chunks
    copies = [list(range(position, workers.size, num)) for position in range(num)]
    columns = [list(range(first, first + num)) for first in range(0, workers.size, num)]
    made = {}
    for ranks in (*copies, *columns):
        made[tuple(ranks)] = dist.new_group(ranks, timeout=timedelta(seconds=workers.timeout_s))
    return made[tuple(copies[workers.rank % num])], made[tuple(columns[workers.rank // num])]


class _End(nn.Module):  # type: ignore[misc]  # torch comes without types
    """A chunk as it stands between two messages: its own precision and layout inside, plain rows outside.

    Messages hold images with their channels last where chunks do: neither side has to copy them into another order.
    Micro-batches of samples that only fill a batch leave no trace in it. They come last.
    """

    def __init__(
        self,
        piece: nn.Module,
        settings: Settings,
        take_part: Callable[[bool], None],
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.piece, self.settings, self._take_part = piece, settings, take_part
        self._is_first, self._is_last = is_first, is_last
        self._counts: Iterator[bool] = iter(())
        self._is_kept, self._ended = False, ExitStack()

    @contextmanager
    def told_what_counts(self, counts_M: Sequence[bool]) -> Iterator[None]:
        """Go through a batch inside the `with`; `counts_M`: which of its micro-batches have samples that count."""
        self._counts, self._is_kept = iter(counts_M), False
        with ExitStack() as self._ended:  # to the end of all backward passes, which look whether anything was changed
            yield

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the chunk."""
        counts = next(self._counts, True)
        self._take_part(counts)
        if not counts and not self._is_kept:
            self._ended.enter_context(buffers_kept(self.piece))
            self._is_kept = True
        if self.settings.channels_last and x.dim() == 4:
            x = x if self._is_first else x.permute(0, 3, 1, 2)
            x = x.contiguous(memory_format=torch.channels_last)
        with self.settings.autocast():
            y: torch.Tensor = self.piece(x)
        if self.settings.channels_last and y.dim() == 4 and not self._is_last:
            y = y.permute(0, 2, 3, 1)
        return y.contiguous()


class _Losses:
    """The loss of each micro-batch, which the schedule asks for on the rank of the last chunk."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[torch.Tensor] = []

    def begin(self, objective: Objective, scaler: torch.amp.GradScaler) -> None:
        self._objective, self._scaler = objective, scaler
        self._parts = []

    def __call__(self, logits_MK: torch.Tensor, labels_M: torch.Tensor) -> torch.Tensor:
        loss = self._objective(logits_MK, labels_M)
        self._parts.append(loss.detach())
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def total(self) -> torch.Tensor:
        return sum(self._parts, start=torch.zeros((), device=self._device))


def _values_between(ends: Sequence[nn.Module], images_MCHW: torch.Tensor) -> list[torch.Tensor]:
    """Examples of what goes into each chunk, and of what comes out of the last."""
    values = [images_MCHW]
    with torch.no_grad():
        for end in ends:
            values.append(end(values[-1]))
    return [images_MCHW, *(torch.empty_like(value).requires_grad_() for value in values[1:])]


def _agreed_cuts(
    network: Cuttable, place: Place, options: Parallel, settings: Settings, workers: WorkerGroup
) -> list[int]:
    """Where chunks begin, the same on all ranks and again after a restart. Costs are measured by rank 0."""
    if network.num_pieces < options.num_chunks:
        raise StageError(
            f"the network can be cut into {network.num_pieces} pieces at most, not into {options.num_chunks} chunks"
        )
    if options.split_at is not None:
        return named_cuts(network, options.split_at)
    firsts = [0] * (options.num_chunks - 1)
    if workers.rank == 0:
        with suppress(OSError, ValueError):
            firsts = json.loads(place.file.read_text(encoding="utf-8"))
        if not _fits(firsts, network, options):
            with torch.random.fork_rng(), settings.autocast():
                firsts = balanced(measured_costs_s(network, place.images_MCHW, settings.device), options.num_chunks)
            write_atomically(place.file, json.dumps(firsts).encode())
    return [round(first) for first in workers.all_reduce(firsts)]


def _fits(firsts: Any, network: Cuttable, options: Parallel) -> bool:
    return (
        isinstance(firsts, list)
        and len(firsts) == options.num_chunks - 1
        and all(isinstance(first, int) and 0 < first < network.num_pieces for first in firsts)
        and firsts == sorted(set(firsts))
    )
