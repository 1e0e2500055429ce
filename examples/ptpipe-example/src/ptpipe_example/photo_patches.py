"""A data set of one's own: `data.photo_patches`, photographs cut into small squares.

Shape legend: N patches, H height, W width, 3 colours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from ptpipe import JSON, Context, Stage, StageConfig, StageError, hookimpl, stage
from ptpipe_torch import ArrayColumn, Classification, Data, DatasetInfo, ImageInfo, LoaderOptions, Split

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Columns of a photograph, from the left: neighbouring patches look alike, so each split gets a part of its own.
_PARTS = {"train": (0.0, 0.6), "val": (0.6, 0.7), "test": (0.7, 1.0)}


class PhotoPatchesConfig(StageConfig):
    """Options of `data.photo_patches`."""

    photos: tuple[str, ...] = Field(
        default=(), description="image files, each a class; left out: the two photographs that scikit-learn brings"
    )
    size: int = Field(default=16, ge=4, le=64, description="edge of a patch in pixels")
    batch_size: int = Field(default=64, ge=1, description="patches in a batch")

    @field_validator("photos")
    @classmethod
    def _tell_apart(cls, photos: tuple[str, ...]) -> tuple[str, ...]:
        names = {Path(photo).stem for photo in photos}
        if len(photos) == 1 or len(names) < len(photos):
            raise ValueError("must name two photographs or more, under different names")
        return photos


def digest_photos(config: PhotoPatchesConfig) -> JSON:
    """What the stage reads outside the store. A photograph that is missing is reported by the preflight."""
    files = [Path(photo) for photo in config.photos]
    return {file.stem: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def find_missing(config: PhotoPatchesConfig) -> Iterable[str]:
    """What is missing on this machine, a line each."""
    return [f"there is no photograph {photo}" for photo in config.photos if not Path(photo).is_file()]


@stage("data.photo_patches", packages=("scikit-learn", "pillow"), fingerprint=digest_photos, preflight=find_missing)
def photo_patches(config: PhotoPatchesConfig, ctx: Context) -> Data:
    """Cut photographs into square patches; the class of a patch is the photograph that it is from.

    The left 60 % of each photograph are for training, the next 10 % for validation, the rest is the test.
    """
    import numpy as np

    parts: dict[str, list[Split]] = {name: [] for name in _PARTS}
    photos = read_photos(config)
    for label, (name, photo_HW3) in enumerate(photos.items()):
        for part, split in cut(name, label, photo_HW3, config.size).items():
            parts[part].append(split)
    splits = {part: join(pieces) for part, pieces in parts.items()}
    drawn = np.random.default_rng(ctx.seed).permutation(len(splits["train"]))[:256]
    splits["calibration"] = splits["train"].subset(np.sort(drawn))
    pixels_N3 = splits["train"].inputs["images"].values().reshape(-1, 3) / 255
    images = ImageInfo(
        shape_CHW=(3, config.size, config.size),
        mean=tuple(pixels_N3.mean(axis=0).tolist()),
        std=tuple(std or 1.0 for std in pixels_N3.std(axis=0).tolist()),  # 0: the same in every pixel
    )
    info = DatasetInfo("photo patches", {"images": images}, Classification(class_names=tuple(photos)))
    return Data(info, splits, LoaderOptions(batch_size=config.batch_size))


def read_photos(config: PhotoPatchesConfig) -> dict[str, npt.NDArray[np.uint8]]:
    """The photographs by class name, uint8 (H, W, 3)."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError
    from sklearn.datasets import load_sample_images

    if not config.photos:
        bundled = load_sample_images()
        return {Path(name).stem: pixels for name, pixels in zip(bundled.filenames, bundled.images, strict=True)}
    try:
        return {Path(photo).stem: np.asarray(Image.open(photo).convert("RGB")) for photo in config.photos}
    except (OSError, UnidentifiedImageError) as error:
        raise StageError(f"can't read a photograph: {error}") from error


def cut(name: str, label: int, photo_HW3: npt.NDArray[np.uint8], size: int) -> dict[str, Split]:
    """The patches of one photograph, by split."""
    import numpy as np

    rows, columns = photo_HW3.shape[0] // size, photo_HW3.shape[1] // size
    if rows < 1 or columns < 10:
        raise StageError(f"{name} has {columns} columns of patches of {size} pixels: 10 at least are needed")
    grid = photo_HW3[: rows * size, : columns * size].reshape(rows, size, columns, size, 3).swapaxes(1, 2)
    splits = {}
    for part, (start, stop) in _PARTS.items():
        chosen = range(round(start * columns), round(stop * columns))
        patches_NHW3 = np.ascontiguousarray(grid[:, chosen]).reshape(-1, size, size, 3)
        ids = np.array([f"{name}/{row:04}/{column:04}" for row in range(rows) for column in chosen])
        labels_N = np.full(len(ids), label, dtype=np.int64)
        splits[part] = Split(ids, {"images": ArrayColumn(patches_NHW3)}, {"labels": ArrayColumn(labels_N)})
    return splits


def join(pieces: list[Split]) -> Split:
    """One split of several."""
    import numpy as np

    pixels_NHW3 = np.concatenate([piece.inputs["images"].values() for piece in pieces])
    labels_N = np.concatenate([piece.targets["labels"].values() for piece in pieces])
    ids = np.concatenate([piece.ids for piece in pieces])
    return Split(ids, {"images": ArrayColumn(pixels_NHW3)}, {"labels": ArrayColumn(labels_N)})


@hookimpl
def ptpipe_stages() -> list[Stage[..., Any]]:
    """Offer the kinds of this file."""
    return [photo_patches]
