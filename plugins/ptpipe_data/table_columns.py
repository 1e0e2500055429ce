"""Columns of tables: standardized numbers, and numbered categories.

Shape legend: B rows of a batch, F numeric columns, D categorical columns.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from ptpipe_torch import BATCH, ColumnInfo, InputForm, RawForm, TensorSpec
from ptpipe_torch.data.meaning import OTHER_STATISTICS, OTHER_WORDS, Misfit, have_same_statistics

if TYPE_CHECKING:
    import torch


_STATISTICS = re.compile(r": mean (\S+), std (\S+)$")


class NumbersInfo(ColumnInfo):
    """The numeric columns, float32 (B, F), as (value - mean) / std: in float64, before they are stored.

    Float32 could not tell the seconds of a day from each other where they are counted from 1970.
    """

    names: tuple[str, ...] = Field(min_length=1)
    mean: tuple[float, ...]
    """Of each column, over train."""
    std: tuple[Annotated[float, Field(gt=0)], ...]

    @model_validator(mode="after")
    def _has_statistics(self) -> Self:
        if not len(self.mean) == len(self.std) == len(self.names):
            raise ValueError("mean and std have a number for each column")
        return self

    @property
    def meaning(self) -> tuple[str, ...]:
        columns = zip(self.names, self.mean, self.std, strict=True)
        return (*self.names, *(f"{name}: mean {mean:.12g}, std {std:.12g}" for name, mean, std in columns))

    def misfit(self, words: Sequence[str], *, retrained: bool = False) -> Misfit | None:
        """A training learns any statistics; former models, and files that normalize themselves, have none."""
        names, found = words[: len(self.names)], words[len(self.names) :]
        matches = [_STATISTICS.search(word) for word in found]
        pairs = [(float(match[1]), float(match[2])) for match in matches if match]
        if tuple(names) != self.names:
            return Misfit(names, self.names, OTHER_WORDS)
        if len(pairs) != len(found) or len(found) not in (0, len(names)):
            return super().misfit(words)
        if retrained or not found or have_same_statistics(pairs, zip(self.mean, self.std, strict=True)):
            return None
        return Misfit(found, self.meaning[len(self.names) :], OTHER_STATISTICS)

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, "float32", (BATCH, len(self.names)))

    def raw_form(self, name: str, form: InputForm) -> RawForm:
        """The numbers of the table, float64; a missing one is not replaced."""
        pairs = list(zip(self.mean, self.std, strict=True))
        check = self.conversion(name)

        def restored(values_BF: torch.Tensor, channels_last: bool) -> torch.Tensor:
            import torch

            mean_F, std_F = (torch.tensor(of, dtype=torch.float64) for of in (self.mean, self.std))
            return check(values_BF, channels_last).double() * std_F + mean_F

        return RawForm(
            TensorSpec(name, "float64", (BATCH, len(self.names))),
            restored,
            tuple(1 / std for _, std in pairs),
            tuple(-mean / std for mean, std in pairs),
            "float64",
            meaning=self.names,
        )


class CategoriesInfo(ColumnInfo):
    """The categorical columns, int64 (B, D): the position of a value in its column's list, counted from 1.

    0 is a value that train does not have.
    """

    names: tuple[str, ...] = Field(min_length=1)
    categories: tuple[tuple[str, ...], ...]
    """Of each column: the values that train has, sorted."""

    @model_validator(mode="after")
    def _has_categories(self) -> Self:
        if len(self.categories) != len(self.names):
            raise ValueError("categories has a list for each column")
        return self

    @property
    def meaning(self) -> tuple[str, ...]:
        lists = zip(self.names, self.categories, strict=True)
        return tuple(f"{name}: {len(values)} categories {_digest(values)}" for name, values in lists)

    @property
    def vocabulary_sizes(self) -> tuple[int, ...]:
        return tuple(1 + len(values) for values in self.categories)

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, "int64", (BATCH, len(self.names)))


def _digest(values: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
