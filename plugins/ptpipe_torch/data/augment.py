"""Whole-batch augmentations whose randomness depends on seed, epoch and sample position alone.

A random number is a hash of (seed, epoch, augmentation, position, draw), so it doesn't depend on how samples are
grouped into batches or on which process augments them.

Shape legend: B images of a batch, H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from ptpipe import StageError, nearest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ptpipe_torch.data.column_info import ColumnInfo

    Pixels: TypeAlias = npt.NDArray[np.uint8]
    Floats: TypeAlias = npt.NDArray[np.float64]

_MAX_ROTATION_DEGREES = 10.0
_MIN_ZOOM_SIDE = 0.7
_MAX_ERASED_SIDE = 0.3


@dataclass(frozen=True, eq=False)
class Draws:
    """Random numbers for the samples of a batch, and what is uncovered by them."""

    key: int
    positions_B: npt.NDArray[np.int64]
    blank: int | None = None
    """Value of uncovered pixels of a mask, whose other values are never blended; None: an image, black."""

    def uniform(self, draw: int) -> Floats:
        """Return one value in [0, 1) per sample, float64 of shape (B,). `draw`: number of this draw, from 0.

        SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), figure 17.
        """
        import numpy as np

        counter = (self.positions_B.astype(np.uint64) << np.uint64(8)) + np.uint64(draw)
        mixed = np.uint64(self.key) + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, draw: int, low: int, high: int) -> npt.NDArray[np.int64]:
        """Return one integer from `low` to `high`, both included, per sample; int64 of shape (B,)."""
        import numpy as np

        return low + np.floor(self.uniform(draw) * (high - low + 1)).astype(np.int64)


def flip(pixels_BHWC: Pixels, draws: Draws) -> Pixels:
    """Mirror left and right with probability 1/2."""
    chosen = draws.uniform(0) < 0.5
    pixels_BHWC[chosen] = pixels_BHWC[chosen][:, :, ::-1]
    return pixels_BHWC


def shift(pixels_BHWC: Pixels, draws: Draws) -> Pixels:
    """Move by up to 1/14 of height and width (2 of 28 pixels) each way; uncovered pixels are black."""
    return _moved(pixels_BHWC, draws, 14)


def crop(pixels_BHWC: Pixels, draws: Draws) -> Pixels:
    """Crop at random from the image padded with black by 1/8 of its height and width (4 of 32 pixels).

    He, Zhang, Ren, Sun: Deep residual learning for image recognition (2015), section 4.2.
    """
    return _moved(pixels_BHWC, draws, 8)


def rotate(pixels_BHWC: Pixels, draws: Draws) -> Pixels:
    """Rotate by up to 10 degrees each way about the centre; uncovered pixels are black."""
    import numpy as np

    angle_B = np.deg2rad((2 * draws.uniform(0) - 1) * _MAX_ROTATION_DEGREES)
    still_B = np.zeros_like(angle_B)
    return _mapped(pixels_BHWC, (np.cos(angle_B), np.sin(angle_B)), (still_B, still_B), draws.blank)


def zoom(pixels_BHWC: Pixels, draws: Draws) -> Pixels:
    """Enlarge a square of 0.7 to 1 times the side, anywhere in the image, to the full size."""
    import numpy as np

    side_B = _MIN_ZOOM_SIDE + (1 - _MIN_ZOOM_SIDE) * draws.uniform(0)
    centre = ((1 - side_B) * (2 * draws.uniform(1) - 1), (1 - side_B) * (2 * draws.uniform(2) - 1))
    return _mapped(pixels_BHWC, (side_B, np.zeros_like(side_B)), centre, draws.blank)


def erase(pixels_BHWC: Pixels, draws: Draws) -> Pixels:
    """Blacken a square of 0.3 times the shorter side, centred anywhere.

    DeVries, Taylor: Improved regularization of convolutional neural networks with cutout (2017).
    """
    import numpy as np

    _, height, width, _ = pixels_BHWC.shape
    half = max(1, round(_MAX_ERASED_SIDE * min(height, width) / 2))
    rows_BH = np.abs(np.arange(height) - draws.integers(0, 0, height - 1)[:, None]) < half
    columns_BW = np.abs(np.arange(width) - draws.integers(1, 0, width - 1)[:, None]) < half
    pixels_BHWC[rows_BH[:, :, None] & columns_BW[:, None, :]] = draws.blank or 0
    return pixels_BHWC


AUGMENTATIONS: dict[str, Callable[[Pixels, Draws], Pixels]] = {
    "crop": crop,
    "erase": erase,
    "flip": flip,
    "rotate": rotate,
    "shift": shift,
    "zoom": zoom,
}


def check_augment(names: Sequence[str], inputs: Mapping[str, ColumnInfo], targets: Mapping[str, ColumnInfo]) -> None:
    """Raise StageError for a name that is no augmentation, or one that leaves other columns as they were.

    `inputs`, `targets`: by name.
    """
    for name in names:
        if name not in AUGMENTATIONS:
            close = nearest(name, AUGMENTATIONS)
            hint = f"did you mean {close!r}?" if close else f"known: {', '.join(AUGMENTATIONS)}"
            raise StageError(f"augment: {name!r} is not known ({hint})")
    for target, column in targets.items():
        column.check_augment(target, names)
    _refuse_unmoved([name for name in names if name != "erase"], inputs)


def _refuse_unmoved(names: Sequence[str], inputs: Mapping[str, ColumnInfo]) -> None:
    """Raise StageError where an input has the height and width of an image that `names` move, and would not move."""
    from ptpipe_torch.data.column_info import ColumnInfo

    shapes = {name: info.spec(name).sample_shape for name, info in inputs.items()}
    moved = [name for name, info in inputs.items() if type(info).augment is not ColumnInfo.augment]
    for name, shape in shapes.items():
        image = next((other for other in moved if shapes[other][-2:] in [*pairwise(shape)]), None)
        if names and image is not None and name not in moved:
            raise StageError(
                f"augment: {names[0]} moves {image}, and the input {name}, of the same height and width, would stay as "
                "it is: leave augment out, or give it as an image too"
            )


def augment(
    pixels_BHWC: Pixels,
    positions_B: npt.NDArray[np.int64],
    seed: Sequence[int],
    names: Iterable[str],
    blank: int | None = None,
) -> Pixels:
    """Return augmented pixels, uint8 of the same shape; `pixels_BHWC` may be overwritten.

    A mask is augmented as its image is: with the same arguments and a `blank`.

    `positions_B`: positions of the samples in their split. `seed`: non-negative integers, e.g. (seed, epoch).
    `names`: augmentations to apply, in this order. `blank`: see `Draws`.
    """
    import numpy as np

    for index, name in enumerate(names):
        (key,) = np.random.SeedSequence((*seed, index)).generate_state(1, np.uint64)
        pixels_BHWC = AUGMENTATIONS[name](pixels_BHWC, Draws(int(key), positions_B, blank))
    return pixels_BHWC


def _moved(pixels_BHWC: Pixels, draws: Draws, part: int) -> Pixels:
    """Return images moved by up to 1/`part` of their height and width."""
    import numpy as np

    num, height, width, channels = pixels_BHWC.shape
    down, right = (max(1, round(side / part)) for side in (height, width))
    padded = np.full((num, height + 2 * down, width + 2 * right, channels), draws.blank or 0, dtype=np.uint8)
    padded[:, down:-down, right:-right] = pixels_BHWC
    top_B, left_B = draws.integers(0, 0, 2 * down), draws.integers(1, 0, 2 * right)
    row_BH = np.arange(num)[:, None] * padded.shape[1] + top_B[:, None] + np.arange(height)
    start_BH = (row_BH * padded.shape[2] + left_B[:, None]) * channels
    # Overlapping views of one image row's length over the padded bytes: this gathers whole rows, not single pixels.
    runs = np.lib.stride_tricks.sliding_window_view(padded.reshape(-1), width * channels)
    moved: Pixels = runs[start_BH].reshape(pixels_BHWC.shape)
    return moved


def _mapped(
    pixels_BHWC: Pixels, rotation_B: tuple[Floats, Floats], centre_B: tuple[Floats, Floats], blank: int | None
) -> Pixels:
    """Resample at `centre + (cosine -sine; sine cosine) (x, y)`, coordinates in [-1, 1]; black or `blank` outside.

    `rotation_B`: cosine and sine. Images are interpolated bilinearly, masks take the nearest pixel.
    """
    import numpy as np
    import torch
    from torch.nn.functional import grid_sample

    _, height, width, _ = pixels_BHWC.shape
    y_H1, x_1W = ((np.arange(side) * 2 + 1) / side - 1 for side in (height, width))
    y_H1, x_1W, aspect = y_H1[:, None], x_1W[None, :], height / width
    cosine, sine, right, down = (values[:, None, None] for values in (*rotation_B, *centre_B))
    x_BHW = cosine * x_1W - sine * aspect * y_H1 + right
    y_BHW = sine / aspect * x_1W + cosine * y_H1 + down
    grid = np.stack([x_BHW, y_BHW], axis=-1)
    images_BCHW = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).float()
    grid_BHW2 = torch.from_numpy(grid).float()
    if blank is None:
        sampled_BCHW = grid_sample(images_BCHW, grid_BHW2, "bilinear", "zeros", align_corners=False)
    else:  # 0 is what grid_sample gives outside, and may be a class
        numbers_BCHW = grid_sample(images_BCHW + 1, grid_BHW2, "nearest", "zeros", align_corners=False)
        sampled_BCHW = torch.where(numbers_BCHW > 0, numbers_BCHW - 1, float(blank))
    sampled: Pixels = sampled_BCHW.round_().clamp_(0, 255).byte().permute(0, 2, 3, 1).contiguous().numpy()
    return sampled
