"""The samples of tar shards, listed from headers alone.

Shape legend: N samples of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ptpipe import Context, StageError
from ptpipe_data.shards_paths import status_of
from ptpipe_data.tar import TarMember, tar_members
from ptpipe_torch.data.shards import MAX_MEMBER_BYTES, Shard, TarMembers

Sample: TypeAlias = Mapping[str, TarMember]
"""The members of a sample by extension."""


@dataclass
class ShardScanner:
    """Lists the members of shards, reading headers alone."""

    root: Path
    ctx: Context
    num_shards: int
    num_done: int = 0

    def scan(self, paths: Sequence[Path], choose: Callable[[Sample], Mapping[str, TarMember]]) -> ScannedShards:
        """List the samples of shards. `choose`: from the members of a sample to those of the columns, by column."""
        scanned = ScannedShards(self.root)
        for number, path in enumerate(paths):
            scanned.shards.append(Shard(name=path.name, size_bytes=status_of(path).st_size))
            keys, rows = [], []
            for key, sample in _samples(path):
                chosen = _chosen(path, key, sample, choose)
                keys.append(key.encode())
                rows.append([(number, member.offset, member.size) for member in chosen.values()])
                scanned.columns = tuple(chosen)
            scanned.keys.append(np.array(keys, dtype=np.bytes_))
            scanned.members.append(np.array(rows, dtype=np.int64).reshape(len(rows), -1 if rows else 0, 3))
            self.num_done += 1
            self.ctx.progress(self.num_done, self.num_shards, "shards")
        return scanned


@dataclass
class ScannedShards:
    """Samples and members of the shards of one split."""

    root: Path
    shards: list[Shard] = field(default_factory=list)
    columns: tuple[str, ...] = ()
    keys: list[npt.NDArray[np.bytes_]] = field(default_factory=list)
    members: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """For each shard, of shape (N, columns, 3)."""

    def __len__(self) -> int:
        return sum(map(len, self.keys))

    def of(self, column: str) -> TarMembers:
        """Return where the members of a column are."""
        number = self.columns.index(column)
        members_N3 = np.concatenate([members[:, number] for members in self.members if len(members)])
        return TarMembers(self.root, tuple(self.shards), np.concatenate(self.keys), members_N3)

    def ids(self) -> Iterator[str]:
        """Yield a name for each sample that no other shard's has: `train-000000.tar/0001`."""
        for shard, keys in zip(self.shards, self.keys, strict=True):
            yield from (f"{shard.name}/{key.decode()}" for key in keys)


def _samples(path: Path) -> Iterator[tuple[str, Sample]]:
    """Yield key and members of each sample: neighbouring files of the same key."""
    key, sample = "", dict[str, TarMember]()
    for member in tar_members(path):
        if member.key != key:
            if sample:
                yield key, sample
            key, sample = member.key, {}
        if member.extension in sample:
            raise StageError(f"{path}: sample {key} has two members .{member.extension}")
        if member.size > MAX_MEMBER_BYTES:
            raise StageError(f"{path}: sample {key}: .{member.extension} has {member.size:,} bytes, which is too much")
        sample[member.extension] = member
    if sample:
        yield key, sample


def _chosen(
    path: Path, key: str, sample: Sample, choose: Callable[[Sample], Mapping[str, TarMember]]
) -> Mapping[str, TarMember]:
    try:
        return choose(sample)
    except LookupError as error:
        has = ", ".join(f".{extension}" for extension in sample)
        raise StageError(f"{path}: sample {key} has {error.args[0]}; it has {has}") from error
