"""Pipeline parallelism: the only file that uses `torch.distributed.pipelining`.

Shape legend: N samples of a batch, B micro-batches of it, M samples of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import fx, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ptpipe import JSON, StageError
from ptpipe_torch import Batch
from ptpipe_torch.distributed.worker_group import WorkerGroup
from ptpipe_train.degrees import Degrees
from ptpipe_train.device import DeviceSettings
from ptpipe_train.evaluation import buffers_restored, state_restored
from ptpipe_train.measured_once import measure_once
from ptpipe_train.parallel.batch_shard import BatchShard, padded
from ptpipe_train.parallel.buffers import BufferSync, RangeSync, broadcast_bytes
from ptpipe_train.parallel.gradients import clip_together, sum_gradients
from ptpipe_train.parallel.partition import (
    TracedNetwork,
    balanced,
    measure_costs_s,
    named_split_points,
    takes_network_input,
    trace_network,
)
from ptpipe_train.parallel.strategy import Objective, ParallelStrategy, TrainingInputs

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
}
_FILE = "split_points.json"


class PipelineStrategy(ParallelStrategy):
    """Each process holds some pipeline stages, and works on one micro-batch while others work on the next.

    With several replicas the gradients of a pipeline stage are summed over its copies at the end of a step. The last
    batch of an epoch is padded to the size of the others with ignored samples: the schedule's shapes are static.
    """

    state_is_replicated = False

    def __init__(self, inputs: TrainingInputs) -> None:
        settings, options, workers = inputs.settings, inputs.options, inputs.workers
        super().__init__(settings.place(inputs.module), settings)
        degrees = options.degrees
        self._replica_group, self._pipeline_group = _groups(degrees, workers)
        replica, self._pipeline_rank = divmod(workers.rank, degrees.pipeline_ranks)
        self.workers, self.batch_shard = workers, BatchShard(replica, degrees.replicas)
        self._shard_size = inputs.batch_size // degrees.replicas
        self._compress = options.compress or "none"
        self._num_microbatches = options.num_microbatches
        self._losses = _MicrobatchLosses(settings.device)
        self._ranges: RangeSync | None = None
        self._buffers: BufferSync | None = None
        (microbatch,) = inputs.first_inputs(inputs.batch_size // options.passes_per_batch)
        pieces = self._split(inputs, microbatch)
        own = range(self._pipeline_rank, degrees.pipeline_stages, degrees.pipeline_ranks)
        self._has_first, self._has_last = 0 in own, degrees.pipeline_stages - 1 in own
        self._pieces = [pieces[number] for number in own]
        needs_inputs_for_loss = self._has_last and inputs.has_teacher
        self.needs_inputs = self._has_first or needs_inputs_for_loss or any(map(takes_network_input, self._pieces))
        self.trained = nn.ModuleList(self._pieces)
        modules = [
            StageModule(piece, settings, self._set_takes_part, is_first=piece is pieces[0], is_last=piece is pieces[-1])
            for piece in pieces
        ]
        self._stage_modules = [modules[number] for number in own]
        self._schedule = self._make_schedule(modules, own, microbatch, options.schedule or "1f1b")
        if not self._can_trim:
            inputs.ctx.notice(
                "values between pipeline stages don't have a row for each sample: batch norm sees padding in the last "
                "micro-batch of an epoch, unless drop_last leaves that out"
            )
        if degrees.replicas > 1:
            self._ranges = RangeSync(self.trained, workers, self._replica_group)
            self._buffers = BufferSync(self.trained, self._replica_group)

    def _split(self, inputs: TrainingInputs, microbatch: torch.Tensor) -> list[fx.GraphModule]:
        """Return the network's pieces, one for each pipeline stage."""
        network = trace_network(self.module, uses_autocast=self.settings.precision != "fp32")
        firsts = _first_pieces(network, inputs, microbatch)
        self._split_points = [network.split_points[first - 1].next_layer for first in firsts]
        return [network.piece(*bounds) for bounds in pairwise([0, *firsts, network.num_pieces])]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for piece in self._pieces:
            yield from piece.named_parameters()

    def _set_takes_part(self, counts: bool) -> None:
        if self._ranges:
            self._ranges.takes_part = counts

    def _make_schedule(
        self, modules: Sequence[StageModule], own: Sequence[int], microbatch: torch.Tensor, schedule: str
    ) -> Any:
        with state_restored(self.module):
            values = _example_values(modules, microbatch)
            # A micro-batch of one sample is never filled in part.
            fewer = _example_values(modules, microbatch[1:]) if len(microbatch) > 1 else values
        self._can_trim = _have_samples_first(values, fewer)
        pipeline_stages = [
            PipelineStage(
                modules[number],
                number,
                len(modules),
                self.settings.device,
                input_args=values[number],
                output_args=values[number + 1],
                group=self._pipeline_group,
            )
            for number in own
        ]
        of_rank = pipeline_stages if schedule == "interleaved_1f1b" else pipeline_stages[0]
        return _SCHEDULES[schedule](of_rank, self._num_microbatches, loss_fn=self._losses, scale_grads=False)

    def forward_backward(
        self, batch: Batch, objective: Objective, scaler: torch.amp.GradScaler, *, last: bool
    ) -> torch.Tensor:
        batch = padded(batch, self._shard_size)
        self._losses.begin(objective, scaler, batch)
        inputs_B = batch.args[0].chunk(self._num_microbatches) if self.needs_inputs else ()
        rows_N = torch.arange(self._shard_size)
        sizes_B = (rows_N < len(batch)).view(self._num_microbatches, -1).sum(1).tolist()
        if not self._can_trim:
            sizes_B = [self._shard_size // self._num_microbatches if size else 0 for size in sizes_B]
        with self.times.part("forward_backward"), ExitStack() as batch_end:
            for module in self._stage_modules:
                batch_end.enter_context(module.microbatches(sizes_B, inputs_B))
            self._schedule.step(*(batch.args if self._has_first else ()), target=rows_N if self._has_last else None)
        if last:
            with self.times.part("communication"):
                sum_gradients(self.trained.parameters(), self._replica_group, self._compress)
        return self._losses.total()

    def pass_size(self, batch_size: int) -> int:
        return self._shard_size // self._num_microbatches

    def grad_scaler(self) -> torch.amp.GradScaler:
        # Each rank holds other gradients: an overflow on one of them must skip the step on all.
        scaler = ShardedGradScaler(
            self.settings.device.type, enabled=self.settings.precision == "fp16", process_group=dist.group.WORLD
        )
        scaler.scale(torch.zeros((), device=self.settings.device))  # initializes it on ranks that never see a loss
        return scaler

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        clip_together(parameters, max_norm, self._pipeline_group)

    def consolidate(self) -> None:
        """Broadcast the state of each pipeline stage from its rank of the first replica."""
        if self._buffers:
            self._buffers.synchronize()
        own = {name: tensor for piece in self._pieces for name, tensor in piece.state_dict().items()}
        content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in own.items()})
        for rank in range(dist.get_world_size(self._pipeline_group)):
            received = broadcast_bytes(content, rank)
            if self._pipeline_rank != rank:
                self.module.load_state_dict(load(received), strict=False)

    def metrics(self) -> dict[str, JSON]:
        return {"split_points": list[JSON](self._split_points)}


def _groups(degrees: Degrees, workers: WorkerGroup) -> tuple[Any, Any]:
    """Return the process group of the replicas of this rank's pieces, and that of this rank's pipeline.

    The workers form a mesh of replicas x pipeline ranks. A DeviceMesh's own groups would ignore the timeout; torch
    requires that every rank creates all groups in the same order.
    """
    num = degrees.pipeline_ranks
    replica_groups = [list(range(position, workers.size, num)) for position in range(num)]
    pipeline_groups = [list(range(first, first + num)) for first in range(0, workers.size, num)]
    created = {}
    for ranks in (*replica_groups, *pipeline_groups):
        created[tuple(ranks)] = dist.new_group(ranks, timeout=timedelta(seconds=workers.timeout_s))
    replicas, pipeline = replica_groups[workers.rank % num], pipeline_groups[workers.rank // num]
    return created[tuple(replicas)], created[tuple(pipeline)]


class StageModule(nn.Module):
    """The module of a pipeline stage: a piece of the network in its precision and memory format.

    Messages are contiguous. Where pieces work in channels-last, images are sent as NHWC, so neither side reorders
    them. Their shapes are static, so an epoch's last micro-batch may end in padding: the piece gets the samples before
    it alone, as batch norm would count it. Micro-batches of nothing else, which come last, leave no trace in the
    buffers.
    """

    def __init__(
        self,
        piece: fx.GraphModule,
        settings: DeviceSettings,
        set_takes_part: Callable[[bool], None],
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.piece, self.settings, self._set_takes_part = piece, settings, set_takes_part
        self._is_first, self._is_last = is_first, is_last
        self._takes_network_input = takes_network_input(piece)
        self._sizes: Iterator[int] = iter(())
        self._inputs: Iterator[torch.Tensor] = iter(())
        self._is_restoring, self._batch_end = False, ExitStack()

    @contextmanager
    def microbatches(self, sizes_B: Sequence[int], inputs_B: Sequence[torch.Tensor]) -> Iterator[None]:
        """Process one batch inside the `with`.

        `sizes_B`: how many samples of each micro-batch are not padding. `inputs_B`: the network's inputs, for pieces
        that take them.
        """
        self._sizes, self._inputs, self._is_restoring = iter(sizes_B), iter(inputs_B), False
        # Buffers are restored after all backward passes: autograd refuses tensors that were modified before.
        with ExitStack() as self._batch_end:
            yield

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the piece to a micro-batch."""
        num_padded = len(x)
        num = next(self._sizes, num_padded)
        self._set_takes_part(num > 0)
        if num == 0 and not self._is_restoring:
            self._batch_end.enter_context(buffers_restored(self.piece))
            self._is_restoring = True
        more = (next(self._inputs)[: num or num_padded],) if self._takes_network_input else ()
        x = x[: num or num_padded]
        if self.settings.channels_last and x.dim() == 4:
            x = x if self._is_first else x.permute(0, 3, 1, 2)  # NHWC to NCHW, a view
            x = x.contiguous(memory_format=torch.channels_last)
        with self.settings.autocast():
            y: torch.Tensor = self.piece(x, *more)
        y = torch.cat([y, y.new_zeros(num_padded - len(x), *y.shape[1:])]) if len(x) < num_padded else y
        if self.settings.channels_last and y.dim() == 4 and not self._is_last:
            y = y.permute(0, 2, 3, 1)
        return y.contiguous()


class _MicrobatchLosses:
    """Loss function of the schedule, which calls it for each micro-batch on the rank of the last pipeline stage.

    What the schedule passes as target are the rows of the micro-batch: the task's targets may be several.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._contributions: list[torch.Tensor] = []

    def begin(self, objective: Objective, scaler: torch.amp.GradScaler, batch: Batch) -> None:
        self._objective, self._scaler, self._batch = objective, scaler, batch
        self._contributions = []

    def __call__(self, returned: Any, rows_M: torch.Tensor) -> torch.Tensor:
        batch = self._batch.rows(int(rows_M[0]), int(rows_M[-1]) + 1)
        if 0 < (num := len(batch)) < len(rows_M):  # a loss that compares samples sees no padding
            returned, batch = returned[:num], batch.rows(0, num)
        loss = self._objective(returned, batch)
        self._contributions.append(loss.detach())
        return self._scaler.scale(loss)

    def total(self) -> torch.Tensor:
        return sum(self._contributions, start=torch.zeros((), device=self._device))


def _example_values(modules: Sequence[StageModule], microbatch: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors shaped like the input of each pipeline stage and the output of the last."""
    values = [microbatch]
    with torch.no_grad():
        for module in modules:
            with module.microbatches([len(microbatch)], [microbatch]):
                values.append(module(values[-1]))
    return [microbatch, *(torch.empty_like(value).requires_grad_() for value in values[1:])]


def _have_samples_first(values: Sequence[torch.Tensor], fewer: Sequence[torch.Tensor]) -> bool:
    """Return whether values between pipeline stages have a row for each sample. `fewer`: those of one sample less."""
    return all(
        (len(value) - 1, *value.shape[1:]) == tuple(less.shape) for value, less in zip(values, fewer, strict=True)
    )


def _first_pieces(network: TracedNetwork, inputs: TrainingInputs, microbatch: torch.Tensor) -> list[int]:
    """Return the first piece of each pipeline stage but the first: as named, or balanced by measured costs."""
    options, settings = inputs.options, inputs.settings
    num = options.num_pipeline_stages
    if network.num_pieces < num:
        raise StageError(
            f"the network can be split into {network.num_pieces} pieces at most, not into {num} pipeline stages"
        )
    if options.split_at is not None:
        return named_split_points(network, options.split_at)

    def measure() -> list[int]:
        with torch.random.fork_rng(), settings.autocast():
            return balanced(measure_costs_s(network, microbatch, settings.device), num)

    def is_valid(firsts: list[float]) -> bool:
        in_range = all(isinstance(first, int) and 0 < first < network.num_pieces for first in firsts)
        return in_range and firsts == sorted(set(firsts))

    firsts = measure_once(Path(inputs.ctx.scratch) / _FILE, inputs.workers, num - 1, measure, is_valid)
    return [round(first) for first in firsts]
