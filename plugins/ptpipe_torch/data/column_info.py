"""What the values of a column are, the same in every split, and how a batch of them becomes a tensor.

Shape legend: B samples of a batch, C channels, H height, W width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from ptpipe import StageError
from ptpipe_torch.data.column import Column
from ptpipe_torch.data.meaning import OTHER_STATISTICS, OTHER_WORDS, Misfit, have_same_statistics
from ptpipe_torch.data.raw_form import Conversion, InputForm, RawForm
from ptpipe_torch.data.resizing import Resizing
from ptpipe_torch.facts import Facts
from ptpipe_torch.model.signature import BATCH, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class ColumnInfo(Facts, ABC):
    """Facts about a column. A class of one's own is stored by its name, and found in its plugin."""

    @property
    def vocabulary_sizes(self) -> tuple[int, ...]:
        """How many different integers each of the last axis' columns may have; empty where values aren't such."""
        return ()

    @property
    def meaning(self) -> tuple[str, ...]:
        """What the values stand for where numbers alone don't say it: a model fits columns of the same meaning alone.

        In words to be compared and shown, a digest where they are many; empty: nothing but numbers, or unknown.
        """
        return ()

    def misfit(self, words: Sequence[str], *, retrained: bool = False) -> Misfit | None:
        """Return why a model whose values stand for `words` does not take this column; None where it does.

        Both have a meaning. `retrained`: the model is going to be trained with the column.
        """
        return None if tuple(words) == self.meaning else Misfit(words, self.meaning, OTHER_WORDS)

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """Return what the network, or the task's loss, gets. `name`: the column's."""

    def check_values(self, name: str, column: Column) -> None:  # any value may be right
        """Raise StageError where the column of a split has a value that it can't have. `name`: split and column."""

    def check_augment(self, name: str, names: Sequence[str]) -> None:  # most columns don't move with an image
        """Raise StageError where an image can't be augmented so and this column still fit it.

        `name`: the column's. `names`: of the augmentations.
        """

    def augment(
        self, values_B: npt.NDArray[Any], positions_B: npt.NDArray[np.int64], seed: Sequence[int], names: Sequence[str]
    ) -> npt.NDArray[Any]:
        """Return the values of a training batch, augmented; they may be overwritten. See `ptpipe_torch.data.augment`.

        `values_B`: of the samples at `positions_B` of their split. `names`: of the augmentations. `seed`: non-negative
        integers. Columns that are augmented with the same arguments draw the same random numbers: a mask moves as its
        image does.
        """
        return values_B

    def conversion(self, name: str) -> Conversion:
        """Return the function that makes tensors of values; it is called batch after batch. `name`: the column's."""
        spec = self.spec(name)

        def checked(values_B: torch.Tensor, channels_last: bool) -> torch.Tensor:
            if not spec.fits(values_B.shape) or str(values_B.dtype) != f"torch.{spec.dtype}":
                found = f"{tuple(values_B.shape)} {str(values_B.dtype).removeprefix('torch.')}"
                raise StageError(f"column {name}: a batch of shape {found}, which is not {spec}")
            return values_B

        return checked

    def raw_form(self, name: str, form: InputForm) -> RawForm:
        """Return what a model takes that normalizes values itself; by default what `conversion` makes of them.

        `name`: the column's. `form`: decides where images have their channels.
        """
        return RawForm(self.spec(name), self.conversion(name))


class ArrayInfo(ColumnInfo):
    """Values that are taken as they are."""

    dtype: Literal["float32", "int64", "int32", "uint8", "bool"]
    shape: tuple[PositiveInt | Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], ...] = ()
    """Of a sample; a symbol where the size differs from batch to batch."""

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, self.dtype, (BATCH, *self.shape))


class ImageInfo(ColumnInfo):
    """Pixels, uint8 of shape (B, H, W, C), that are normalized on the device: (pixel / 255 - mean) / std."""

    shape_CHW: tuple[PositiveInt, PositiveInt, PositiveInt]
    mean: tuple[float, ...]
    """Per channel, of pixels scaled to [0, 1]."""
    std: tuple[Annotated[float, Field(gt=0)], ...]
    resizing: Resizing | None = None
    """How the data set made images of this size of its files; None: they have it, or how is not known."""

    @model_validator(mode="after")
    def _has_channels(self) -> Self:
        if not len(self.mean) == len(self.std) == self.shape_CHW[0]:
            raise ValueError("mean and std have a number for each channel")
        return self

    @property
    def meaning(self) -> tuple[str, ...]:
        return tuple(f"{name} {', '.join(f'{value:g}' for value in of)}" for name, of in self._statistics.items())

    def misfit(self, words: Sequence[str], *, retrained: bool = False) -> Misfit | None:
        """A training learns any statistics."""
        given = dict(word.partition(" ")[::2] for word in words)
        try:
            mean_C, std_C = ([float(number) for number in given[name].split(",")] for name in self._statistics)
            found = zip(mean_C, std_C, strict=True)
            fits = retrained or have_same_statistics(found, zip(self.mean, self.std, strict=True))
        except (KeyError, ValueError):
            return super().misfit(words)
        return None if fits else Misfit(words, self.meaning, OTHER_STATISTICS)

    @property
    def _statistics(self) -> dict[str, tuple[float, ...]]:
        return {"mean": self.mean, "std": self.std}

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, "float32", (BATCH, *self.shape_CHW))

    def augment(
        self, values_B: npt.NDArray[Any], positions_B: npt.NDArray[np.int64], seed: Sequence[int], names: Sequence[str]
    ) -> npt.NDArray[Any]:
        from ptpipe_torch.data.augment import augment

        return augment(values_B, positions_B, seed, names)

    def conversion(self, name: str) -> Conversion:
        from ptpipe_torch.data.normalization import Normalization

        check, normalize = self._stored.conversion(name), Normalization(*self.scale_and_offset)
        return lambda values_B, channels_last: normalize(check(values_B, channels_last), channels_last)

    def raw_form(self, name: str, form: InputForm) -> RawForm:
        """Bytes, as they are stored (`nhwc`) or with channels as the second axis (`nchw`)."""
        scale_C, offset_C = self.scale_and_offset
        check = self._stored.conversion(name)
        if form == "nhwc":
            return RawForm(
                self._stored.spec(name),
                check,
                scale_C,
                offset_C,
                transpose=(0, 3, 1, 2),
                resizing=self.resizing,
                meaning=(),
            )

        def channels_second(pixels_BHWC: torch.Tensor, channels_last: bool) -> torch.Tensor:
            return check(pixels_BHWC, channels_last).permute(0, 3, 1, 2).contiguous()

        spec = TensorSpec(name, "uint8", (BATCH, *self.shape_CHW))
        return RawForm(spec, channels_second, scale_C, offset_C, resizing=self.resizing, meaning=())

    @property
    def scale_and_offset(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The normalization of each channel as one multiplication of a byte and one addition."""
        return (
            tuple(1 / (255 * std) for std in self.std),
            tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True)),
        )

    @property
    def _stored(self) -> ArrayInfo:
        channels, height, width = self.shape_CHW
        return ArrayInfo(dtype="uint8", shape=(height, width, channels))
