"""Whether the values of a column stand for what those of a model do. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_ELSE = "the same numbers stand for something else there"
OTHER_WORDS = f"{_ELSE}. Use the same tokenizer, categories or classes for both"
OTHER_STATISTICS = (
    f"{_ELSE}. Give both the same normalization (options such as `mean` and `std`), or one data stage its own val and "
    "test (`val_path`, `test_path`)"
)
_TOLERANCE = 0.05
"""Of means and standard deviations, in standard deviations: networks hardly notice such a shift."""


class Misfit(NamedTuple):
    """Why a model does not take a column."""

    found: Sequence[str]
    """What the model's values stand for, in words, as far as it differs."""
    needed: Sequence[str]
    """What the column's values stand for."""
    problem: str
    """What is wrong, and what to do: the end of an error."""


def have_same_statistics(found: Iterable[tuple[float, float]], needed: Iterable[tuple[float, float]]) -> bool:
    """Return whether pairs of mean and standard deviation are the same, as those of other samples of the same data."""
    return all(
        abs(mean - own_mean) <= _TOLERANCE * own_std and abs(std - own_std) <= _TOLERANCE * own_std
        for (mean, std), (own_mean, own_std) in zip(found, needed, strict=True)
    )
