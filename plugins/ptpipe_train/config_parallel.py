"""Options of `train.supervised` that distribute a training. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from ptpipe import StageConfig
from ptpipe_train.degrees import Degrees

Mode: TypeAlias = Literal["single", "dp", "ddp", "fsdp", "pp", "ddp+pp"]
PipelineSchedule: TypeAlias = Literal["gpipe", "1f1b", "interleaved_1f1b"]
Compress: TypeAlias = Literal["none", "bf16", "fp16"]

_MULTI_WORKER: tuple[Mode, ...] = ("ddp", "fsdp", "pp", "ddp+pp")
PIPELINED: tuple[Mode, ...] = ("pp", "ddp+pp")
COMPILED: tuple[Mode, ...] = ("single", "ddp")
LAYERED: tuple[Mode, ...] = ("single", "ddp", "fsdp")
"""Each worker calls the layers of the network itself."""
# Each option of `parallel:` and the modes that accept it.
MODES_OF_OPTION: Mapping[str, tuple[Mode, ...]] = {
    "workers": _MULTI_WORKER,
    "comm": _MULTI_WORKER,
    "timeout_s": _MULTI_WORKER,
    "device_ids": ("dp",),
    "bucket_cap_mb": ("ddp",),
    "gradient_as_bucket_view": ("ddp",),
    "static_graph": ("ddp",),
    "sync_bn": ("ddp",),
    "find_unused": ("ddp",),
    "compress": ("ddp", "ddp+pp"),
    "wrap": ("fsdp",),
    "wrap_min_parameters": ("fsdp",),
    "reshard_after_forward": ("fsdp",),
    "cpu_offload": ("fsdp",),
    "pipeline_stages": PIPELINED,
    "microbatches": PIPELINED,
    "schedule": PIPELINED,
    "split_at": PIPELINED,
}
_INTERLEAVED_STAGES_PER_RANK = 2
"""Default of interleaved_1f1b, where `workers` doesn't determine it."""


class Parallel(StageConfig):
    """How the training is distributed over devices and processes."""

    renamed_options: ClassVar[Mapping[str, str]] = {"chunks": "pipeline_stages"}
    unkeyed_options: ClassVar[frozenset[str]] = frozenset({"timeout_s"})

    mode: Mode = Field(
        "single",
        description="single: one process; dp: one process, torch's DataParallel over its CUDA devices; ddp: one "
        "process per device, each with a copy of the network; fsdp: one process per device, each with a shard of every "
        "parameter; pp: one pipeline stage of the network per process; ddp+pp: replicas of such pipelines",
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="total number of processes; null: as many as the pipeline stages need (pp only)",
    )
    comm: Literal["auto", "gloo", "nccl"] | None = Field(
        None,
        description="communication backend; null and auto: nccl with CUDA devices, else gloo, and shared memory for "
        "ddp's gradients where all processes run on the CPUs of one machine",
    )
    timeout_s: float | None = Field(
        None, gt=0, description="seconds that a process waits for the others before it fails; null: 300"
    )
    device_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="dp: indices of the CUDA devices; null: all"
    )
    bucket_cap_mb: float | None = Field(
        None, gt=0, description="ddp: MiB of gradients that are all-reduced at once; null: torch's default, 25"
    )
    gradient_as_bucket_view: bool | None = Field(
        None, description="ddp: gradients are views of the communication buckets; null: true"
    )
    static_graph: bool | None = Field(None, description="ddp: every step uses the same parameters; null: false")
    sync_bn: bool | None = Field(
        None, description="ddp: batch norm over the batch of all processes, on CUDA devices; null: false"
    )
    find_unused: bool | None = Field(None, description="ddp: allow parameters that are unused in a step; null: false")
    compress: Compress | None = Field(None, description="communicate gradients in bf16 or fp16; null: none")
    wrap: tuple[str, ...] | None = Field(
        None, description="fsdp: types of layers (`Bottleneck`) that are gathered and freed one by one"
    )
    wrap_min_parameters: int | None = Field(
        None, ge=1, description="fsdp: layers with at least this many parameters are gathered and freed one by one"
    )
    reshard_after_forward: bool | None = Field(
        None, description="fsdp: free gathered parameters between forward and backward; null: true"
    )
    cpu_offload: bool | None = Field(None, description="fsdp: keep the shards in CPU memory; null: false")
    pipeline_stages: int | None = Field(
        None, ge=2, le=1024, description="pp: number of pipeline stages that the network is split into; null: 2"
    )
    microbatches: int | None = Field(
        None, ge=1, le=4096, description="pp: micro-batches of each batch; null: twice the pipeline stages"
    )
    schedule: PipelineSchedule | None = Field(
        None,
        description="pp: order of forward and backward passes; null: 1f1b. interleaved_1f1b has several pipeline "
        "stages per process, 2 unless `workers` implies another number",
    )
    split_at: tuple[str, ...] | None = Field(
        None,
        description="pp: names of the layers that begin a pipeline stage, except the first; null: balanced by measured "
        "cost",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for option, modes in MODES_OF_OPTION.items():
            if getattr(self, option) is not None and self.mode not in modes:
                raise ValueError(f"{option} is an option of mode {' and '.join(modes)}, not of {self.mode}")
        if self.mode in ("ddp", "fsdp", "ddp+pp") and self.workers is None:
            raise ValueError(f"mode {self.mode} needs workers: the total number of processes")
        num = self.num_pipeline_stages
        if self.split_at is not None and len(self.split_at) != num - 1:
            raise ValueError(f"split_at must name where {num - 1} of {num} pipeline stages begin")
        if self.split_at is not None and len(set(self.split_at)) < len(self.split_at):
            raise ValueError("split_at names a layer twice")
        _ = self.degrees
        return self

    @property
    def num_pipeline_stages(self) -> int:
        """Pieces of the network; 1 in modes without a pipeline."""
        return (self.pipeline_stages or 2) if self.mode in PIPELINED else 1

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a replica's shard of a batch."""
        return self.microbatches or 2 * self.num_pipeline_stages

    @property
    def degrees(self) -> Degrees:
        """Parallel degrees. Raise ValueError where workers and pipeline stages don't fit together."""
        match self.mode:
            case "ddp":
                return Degrees(replicas=self.workers or 1)
            case "fsdp":
                return Degrees(shards=self.workers or 1)
            case "pp" | "ddp+pp":
                return self._pipeline_degrees()
            case _:
                return Degrees()

    @property
    def passes_per_batch(self) -> int:
        """Number of separate forward passes, over all workers, that one batch is divided into."""
        return self.degrees.batch_shards * (self.num_microbatches if self.mode in PIPELINED else 1)

    def check_batch_size(self, batch_size: int) -> None:
        """Raise ValueError where a batch of that size can't be divided among workers and micro-batches."""
        shards = self.degrees.batch_shards
        if batch_size < shards:
            raise ValueError(f"a batch of {batch_size} can't be shared by {shards} workers")
        if self.mode in PIPELINED and batch_size % self.passes_per_batch:
            raise ValueError(
                f"a batch of {batch_size} can't be divided into {shards} equal shards of {self.num_microbatches} equal "
                "micro-batches"
            )

    def _pipeline_degrees(self) -> Degrees:
        num = self.num_pipeline_stages
        interleaved = self.schedule == "interleaved_1f1b"
        per_rank = _INTERLEAVED_STAGES_PER_RANK if interleaved else 1
        if self.mode == "pp" and self.workers is not None:
            if not interleaved and self.workers != num:
                raise ValueError(f"{num} pipeline stages need {num} workers, not {self.workers}")
            per_rank = num // self.workers
        ranks = num // per_rank if per_rank else 0
        if ranks * per_rank != num or (interleaved and (per_rank < 2 or ranks < 2)):
            raise ValueError(
                f"{num} pipeline stages can't be distributed evenly: interleaved_1f1b has two or more workers, and two "
                "or more pipeline stages per worker"
            )
        workers = self.workers or ranks
        if workers % ranks:
            raise ValueError(f"workers must be a multiple of {ranks}, the workers of one replica, not {workers}")
        if self.num_microbatches < num and self.schedule != "gpipe":
            raise ValueError(f"{num} pipeline stages need at least {num} microbatches, not {self.microbatches}")
        if interleaved and self.num_microbatches % ranks:
            raise ValueError(f"microbatches must be a multiple of {ranks} for interleaved_1f1b")
        return Degrees(replicas=workers // ranks, pipeline_ranks=ranks, pipeline_stages_per_rank=per_rank)
