"""Parallel degrees of a training: over how many workers what is divided. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass

from ptpipe import StageError


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees; their product is the number of workers."""

    replicas: int = 1
    """Copies of the network; each takes its shard of every batch."""
    shards: int = 1
    """Shards of each parameter; each worker also takes its shard of every batch."""
    pipeline_ranks: int = 1
    """Workers that one copy of the network is spread over."""
    pipeline_stages_per_rank: int = 1

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.replicas * self.shards * self.pipeline_ranks

    @property
    def batch_shards(self) -> int:
        """Shards of a batch, one for each data-parallel worker."""
        return self.replicas * self.shards

    @property
    def pipeline_stages(self) -> int:
        """Pieces that the network is split into."""
        return self.pipeline_ranks * self.pipeline_stages_per_rank

    def check(self, num_workers: int) -> None:
        """Raise StageError unless there are exactly as many workers as the degrees require."""
        if num_workers != self.world_size:
            raise StageError(
                f"parallel needs {self.world_size} workers ({self.replicas} replicas x {self.shards} shards x "
                f"{self.pipeline_ranks} pipeline ranks), but there are {num_workers}"
            )
