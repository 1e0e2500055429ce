"""Values as an application has them, before a data set's normalization. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ptpipe_torch.data.resizing import Resizing
from ptpipe_torch.model.signature import TensorSpec

if TYPE_CHECKING:
    import torch

Conversion: TypeAlias = "Callable[[torch.Tensor, bool], torch.Tensor]"
"""From a batch of a column's values, on the device that the tensor shall be on, and whether tensors of four axes are
wanted in channels-last, to the tensor."""
InputForm: TypeAlias = Literal["normalized", "nhwc", "nchw"]
"""What a model takes: tensors as networks take them, or raw values, of images with channels as the last or the second
axis. Columns that are no images have one raw form."""
NORMALIZED: Final = "normalized"


@dataclass(frozen=True)
class RawForm:
    """Raw values of a column: `normalized = raw * scale + offset`, rounded to float32 after it."""

    spec: TensorSpec
    """Of the raw values."""
    conversion: Conversion
    """To raw values, of what is stored."""
    scale_C: tuple[float, ...] = ()
    """For each place of axis 1 of the normalized values; empty: raw values are the normalized ones."""
    offset_C: tuple[float, ...] = ()
    dtype: Literal["float32", "float64"] = "float32"
    """What is computed in."""
    transpose: tuple[int, ...] = ()
    """The axes of raw values in the order of the normalized ones; empty: they have that order."""
    resizing: Resizing | None = None
    """How images of other sizes become those of `spec`; None: not known, or they are no images."""
    meaning: tuple[str, ...] | None = None
    """What raw values stand for, as `ColumnInfo.meaning`; None: what normalized ones do."""
