"""Start the workers of a stage that wants several, on torch elastic. Importing this imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ptpipe import Check, hookimpl
from ptpipe.events import Event
from ptpipe.execution.call import Call


@hookimpl
def ptpipe_launch(call: Call, tell: Callable[[Event], None]) -> Mapping[str, Path] | None:
    """Do a stage of several workers, unless a cluster has started them already."""
    if call.workers == 1 or call.nodes.started:
        return None
    from ptpipe_elastic.launch import launch

    return launch(call, tell)


@hookimpl
def ptpipe_doctor(workers: int) -> Iterable[Check]:
    """Look at torch.distributed; with workers, let so many processes work together."""
    from ptpipe_elastic.diagnosis import findings

    return findings(workers)


@hookimpl
def ptpipe_time_all_reduce(workers: int, sizes_bytes: Sequence[int]) -> Sequence[float]:
    """Time it by messages: nccl where each worker has a CUDA device of its own, else gloo.

    The memory that ddp's workers share on the CPUs of one machine is quicker, and tells nothing of more machines.
    """
    from ptpipe_elastic.timing import time_all_reduce

    return time_all_reduce(workers, sizes_bytes)
