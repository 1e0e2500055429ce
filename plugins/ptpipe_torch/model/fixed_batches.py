"""Batches of any size for models that take one batch size alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt


def run_in_pieces(
    run: Callable[[Mapping[str, npt.NDArray[Any]]], Sequence[npt.NDArray[Any]]],
    feed: Mapping[str, npt.NDArray[Any]],
    size: int | None,
) -> Sequence[npt.NDArray[Any]]:
    """Return the outputs for a batch of any size.

    `run`: returns the outputs of a batch of `size` samples, as arrays that later calls leave alone; None: of any. The
    last sample fills the last piece up.
    """
    import numpy as np

    num_samples = len(next(iter(feed.values())))
    if size is None or num_samples == size:
        return run(feed)
    pieces = []
    for start in range(0, num_samples, size):
        rows = np.minimum(np.arange(start, start + size), num_samples - 1)
        pieces.append(run({name: array[rows] for name, array in feed.items()}))
    return [np.concatenate(outputs)[:num_samples] for outputs in zip(*pieces, strict=True)]
