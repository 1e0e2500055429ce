"""The options of `parallel:` and the degrees that they come to. Importing this imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from ptpipe import StageConfig, StageError

Mode: TypeAlias = Literal["single", "dp", "ddp", "fsdp", "pp", "ddp+pp"]
ChunkSchedule: TypeAlias = Literal["gpipe", "1f1b", "interleaved_1f1b"]
Compress: TypeAlias = Literal["none", "bf16", "fp16"]

_WORKERS: tuple[Mode, ...] = ("ddp", "fsdp", "pp", "ddp+pp")
_CHUNKS: tuple[Mode, ...] = ("pp", "ddp+pp")
# Option to the modes that know it.
_OPTIONS_OF: dict[str, tuple[Mode, ...]] = {
    "workers": _WORKERS,
    "comm": _WORKERS,
    "timeout_s": _WORKERS,
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
    "chunks": _CHUNKS,
    "microbatches": _CHUNKS,
    "schedule": _CHUNKS,
    "split_at": _CHUNKS,
}
_CHUNKS_PER_RANK = 2
"""Of interleaved_1f1b, where the number of workers doesn't say."""


@dataclass(frozen=True)
class Degrees:
    """In how many ways the work is divided; their product is the number of workers."""

    replicas: int = 1
    """Copies of the network, each of which takes its share of every batch."""
    shards: int = 1
    """Parts that each parameter is cut into; a worker also takes its share of every batch."""
    ranks_of_chunks: int = 1
    """Workers that one copy of the network is spread over."""
    chunks_per_rank: int = 1

    @property
    def world_size(self) -> int:
        """Workers in all."""
        return self.replicas * self.shards * self.ranks_of_chunks

    @property
    def shares(self) -> int:
        """Parts that a batch is divided into."""
        return self.replicas * self.shards

    @property
    def chunks(self) -> int:
        """Pieces that the network is cut into."""
        return self.ranks_of_chunks * self.chunks_per_rank

    def check(self, num_workers: int) -> None:
        """Raise StageError where there are more or fewer workers."""
        if num_workers != self.world_size:
            raise StageError(
                f"parallel wants {self.world_size} workers ({self.replicas} replicas x {self.shards} shards x "
                f"{self.ranks_of_chunks} ranks of chunks), and there are {num_workers}"
            )


class Parallel(StageConfig):
    """How the training is spread over devices and processes."""

    mode: Mode = Field(
        "single",
        description="single: one process; dp: one process, torch's DataParallel over its CUDA devices; ddp: a process "
        "a device, each with a copy of the network; fsdp: likewise, each with a shard of every parameter; pp: a chunk "
        "of the network a process; ddp+pp: copies of chunks",
    )
    workers: int | None = Field(
        None, ge=1, le=4096, description="processes in all; null: as many as chunks need (pp only)"
    )
    comm: Literal["auto", "gloo", "nccl"] | None = Field(
        None,
        description="how processes talk; null and auto: nccl with CUDA devices, else gloo, and ddp's gradients through "
        "shared memory where all are on one machine's CPUs",
    )
    timeout_s: float | None = Field(
        None, gt=0, description="how long a process waits for the others before it gives up; null: 300"
    )
    device_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="dp: numbers of the CUDA devices; null: all"
    )
    bucket_cap_mb: float | None = Field(None, gt=0, description="ddp: gradients sent at once; null: torch's own, 25")
    gradient_as_bucket_view: bool | None = Field(None, description="ddp: gradients live in the buckets; null: true")
    static_graph: bool | None = Field(None, description="ddp: the same parameters are used in every step; null: false")
    sync_bn: bool | None = Field(None, description="ddp: batch norm over all processes, on CUDA; null: false")
    find_unused: bool | None = Field(None, description="ddp: some parameters go unused in a step; null: false")
    compress: Compress | None = Field(None, description="gradients are sent as bf16 or fp16; null: none")
    wrap: tuple[str, ...] | None = Field(
        None, description="fsdp: types of layers (`Bottleneck`) that are gathered and freed one by one"
    )
    wrap_min_parameters: int | None = Field(
        None, ge=1, description="fsdp: layers with at least this many parameters are gathered and freed one by one"
    )
    reshard_after_forward: bool | None = Field(
        None, description="fsdp: free gathered parameters between forward and backward; null: true"
    )
    cpu_offload: bool | None = Field(None, description="fsdp: shards rest in the CPU's memory; null: false")
    chunks: int | None = Field(None, ge=2, le=1024, description="pp: pieces that the network is cut into; null: 2")
    microbatches: int | None = Field(
        None, ge=1, le=4096, description="pp: parts of each batch that follow one another; null: twice the chunks"
    )
    schedule: ChunkSchedule | None = Field(
        None,
        description="pp: order of forward and backward passes; null: 1f1b. interleaved_1f1b has several chunks "
        "a process, 2 unless workers says otherwise",
    )
    split_at: tuple[str, ...] | None = Field(
        None, description="pp: names of the layers that begin a chunk, all but the first; null: by measured cost"
    )

    @model_validator(mode="after")
    def _only_its_own(self) -> Self:
        for option, modes in _OPTIONS_OF.items():
            if getattr(self, option) is not None and self.mode not in modes:
                raise ValueError(f"{option} is an option of mode {' and '.join(modes)}, not of {self.mode}")
        if self.mode in ("ddp", "fsdp", "ddp+pp") and self.workers is None:
            raise ValueError(f"mode {self.mode} needs workers: the number of processes in all")
        if self.split_at is not None and len(self.split_at) != self.num_chunks - 1:
            raise ValueError(f"split_at names where {self.num_chunks - 1} of {self.num_chunks} chunks begin")
        if self.split_at is not None and len(set(self.split_at)) < len(self.split_at):
            raise ValueError("split_at names a layer twice")
        _ = self.degrees
        return self

    @property
    def num_chunks(self) -> int:
        """Pieces of the network."""
        return (self.chunks or 2) if self.mode in _CHUNKS else 1

    @property
    def num_microbatches(self) -> int:
        """Parts of a replica's share of a batch."""
        return self.microbatches or 2 * self.num_chunks

    @property
    def degrees(self) -> Degrees:
        """What the options come to. Raises ValueError where workers and chunks don't fit."""
        match self.mode:
            case "ddp":
                return Degrees(replicas=self.workers or 1)
            case "fsdp":
                return Degrees(shards=self.workers or 1)
            case "pp" | "ddp+pp":
                return self._degrees_of_chunks()
            case _:
                return Degrees()

    @property
    def parts(self) -> int:
        """Parts of a batch, each of which goes through the network by itself."""
        return self.degrees.shares * (self.num_microbatches if self.mode in _CHUNKS else 1)

    def check_batch_size(self, batch_size: int) -> None:
        """Raise ValueError where a batch can't be divided so."""
        shares = self.degrees.shares
        if batch_size < shares:
            raise ValueError(f"a batch of {batch_size} can't be shared by {shares} workers")
        if self.mode in _CHUNKS and batch_size % self.parts:
            raise ValueError(
                f"a batch of {batch_size} can't be cut into {shares} equal shares of {self.num_microbatches} equal "
                "micro-batches"
            )

    def _degrees_of_chunks(self) -> Degrees:
        per_rank = _CHUNKS_PER_RANK if self.schedule == "interleaved_1f1b" else 1
        if self.mode == "pp" and self.workers is not None:
            if self.schedule != "interleaved_1f1b" and self.workers != self.num_chunks:
                raise ValueError(f"{self.num_chunks} chunks need {self.num_chunks} workers, not {self.workers}")
            per_rank = self.num_chunks // self.workers
        ranks = self.num_chunks // per_rank if per_rank else 0
        if ranks * per_rank != self.num_chunks or (self.schedule == "interleaved_1f1b" and (per_rank < 2 or ranks < 2)):
            raise ValueError(
                f"{self.num_chunks} chunks can't be spread evenly: interleaved_1f1b has two or more workers, and two "
                "or more chunks a worker"
            )
        workers = self.workers or ranks
        if workers % ranks:
            raise ValueError(f"workers must be a multiple of {ranks}, the workers of one copy, not {workers}")
        if self.num_microbatches < self.num_chunks and self.schedule != "gpipe":
            raise ValueError(f"{self.num_chunks} chunks need at least as many microbatches, not {self.microbatches}")
        if self.schedule == "interleaved_1f1b" and self.num_microbatches % ranks:
            raise ValueError(f"microbatches must be a multiple of {ranks} for interleaved_1f1b")
        return Degrees(replicas=workers // ranks, ranks_of_chunks=ranks, chunks_per_rank=per_rank)
