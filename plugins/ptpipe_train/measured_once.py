"""Values that rank 0 measures once and all ranks use, also after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ptpipe import write_atomically
from ptpipe_torch.distributed.worker_group import WorkerGroup


def measure_once(
    file: Path,
    workers: WorkerGroup,
    num_values: int,
    measure: Callable[[], Sequence[float]],
    is_valid: Callable[[list[float]], bool],
) -> list[float]:
    """Return `measure()` of rank 0 on every rank; read from the file where an earlier attempt has written it.

    Timings differ from run to run: without the file a restart might decide otherwise than the run that it resumes.
    Every rank must call this. `num_values`: length of the result; `is_valid`: whether the file's values can be used.
    """
    values = [0.0] * num_values
    if workers.rank == 0:
        kept = _read(file)
        if len(kept) == num_values and is_valid(kept):
            values = kept
        else:
            values = list(measure())
            write_atomically(file, json.dumps(values).encode())
    return workers.all_reduce(values)


def _read(file: Path) -> list[float]:
    with suppress(OSError, ValueError):
        values = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(values, list) and all(isinstance(value, int | float) for value in values):
            return values
    return []
