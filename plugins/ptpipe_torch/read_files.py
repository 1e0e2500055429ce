"""Files that a function of the user's reads: they belong to a stage's result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ptpipe import Context, ReadLog


@contextmanager
def reads_recorded(ctx: Context, known: Iterable[Path] = ()) -> Iterator[None]:
    """Make the result of a stage depend on the files that Python, or torch for safetensors, opens inside the `with`.

    `ctx`: the stage's. `known`: files and folders that are in its fingerprint.
    """
    with ReadLog() as log, _maps_added(log):
        yield
    ctx.reads(log, known)


@contextmanager
def _maps_added(log: ReadLog) -> Iterator[None]:
    """Add to a log the files that torch maps to memory, which Python does not hear: safetensors, and with mmap=True."""
    from_file = torch.UntypedStorage.from_file

    def heard(filename: Any, *args: Any, **kwargs: Any) -> Any:
        log.add(filename)
        return from_file(filename, *args, **kwargs)

    torch.UntypedStorage.from_file = staticmethod(heard)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.UntypedStorage.from_file  # what it inherits
