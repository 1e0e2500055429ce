"""Folders of images and masks: `ROOT/images/*` with `ROOT/masks/*`, or both in `ROOT/train`, `ROOT/val`, `ROOT/test`.

Shape legend: N images, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from ptpipe import Context, StageError
from ptpipe_data.channel_stats import channel_stats
from ptpipe_data.classes import balanced_weights
from ptpipe_data.image_files import check_headers, list_files
from ptpipe_data.image_folder import IMAGENET, find_root
from ptpipe_data.masks import count_classes
from ptpipe_data.paths import dataset_name, split_folders
from ptpipe_data.scratch_arrays import MakeArray, scratch_arrays
from ptpipe_data.splitting import draw_missing_splits
from ptpipe_torch import ArrayColumn, Data, DatasetInfo, ImageInfo, Resizing, Segmentation, Split
from ptpipe_torch.data.images import in_8_bits, open_image_file, upright

if TYPE_CHECKING:
    from ptpipe_data.config import SegmentationFolderConfig

_IMAGES, _MASKS = "images", "masks"
_TEST_FRACTION = 0.1
_MODES = ("1", "L", "P")
"""Pillow's modes of masks: a byte a pixel, for `P` the number of a palette's colour."""


def load_segmentation_folder(config: SegmentationFolderConfig, ctx: Context) -> Data:
    """Return the data set in `config.path`. Raises StageError, with the path, for files that don't fit together."""
    root = find_root(config.path)
    pairs = {name: _pairs(root / folder, ctx) for name, folder in split_folders(root).items()}
    check_headers(root, (str(path) for of in pairs.values() for pair in of for path in pair), ctx.notice)
    shape_HW = config.image_size or _size_of(pairs["train"][0][0], config)
    with scratch_arrays(ctx.scratch) as make_array:
        reader = _Reader(config, ctx, root, shape_HW, make_array, sum(map(len, pairs.values())))
        found = {name: reader.split(name, of) for name, of in pairs.items()}
    splits = draw_missing_splits(found, config, ctx.seed, test_fraction=_TEST_FRACTION)
    mean, std = IMAGENET[3] if config.normalize == "imagenet" else channel_stats(splits["train"].inputs[_IMAGES])
    ignore = _ignored_number(config)
    counts_K = count_classes(splits["train"].targets[_MASKS], config.class_names, ignore, ctx)
    task = Segmentation(
        class_names=config.class_names,
        shape_HW=shape_HW,
        ignore=ignore,
        class_weights=balanced_weights(counts_K) if config.class_weights == "balanced" else (),
    )
    resizing = Resizing() if config.image_size else None
    images = ImageInfo(shape_CHW=(3, *shape_HW), mean=mean, std=std, resizing=resizing)
    info = DatasetInfo(dataset_name(root), {_IMAGES: images}, task)
    return Data(info, splits, config.loader_options())


def _ignored_number(config: SegmentationFolderConfig) -> int:
    """Return what pixels that don't count have in place of a class's number."""
    ignored = config.ignored_value
    if ignored is None or (config.values and ignored < len(config.class_names)):
        return 255  # there are at most 255 classes
    return ignored


def _pairs(folder: Path, ctx: Context) -> list[tuple[Path, Path]]:
    """Return the files of each image and its mask: those of the same name and subfolder, whatever their suffix."""
    folders = [folder / kind for kind in (_IMAGES, _MASKS)]
    images, masks = (_files(of, ctx) for of in folders)
    for have, need, where in ((images, masks, folders[1]), (masks, images, folders[0])):
        if missing := sorted(have.keys() - need.keys()):
            raise StageError(
                f"{have[missing[0]]} has no counterpart {missing[0]!r} in {where}: an image and its mask have the same "
                "name, in the same subfolder if any"
            )
    return [(images[key], masks[key]) for key in sorted(images)]


def _files(folder: Path, ctx: Context) -> Mapping[str, Path]:
    """Return the images below a folder by their path in it, without suffix."""
    if not folder.is_dir():
        raise StageError(f"{folder} is missing: images and masks lie in folders of these names, side by side")
    files: dict[str, Path] = {}
    for path in list_files(folder, ctx.notice):
        key = path.removesuffix(PurePosixPath(path).suffix)
        if key in files:
            raise StageError(f"{files[key]} and {folder / path} have the same name but for the suffix: remove one")
        files[key] = folder / path
    if not files:
        raise StageError(f"{folder} has no images")
    return files


def _size_of(path: Path, config: SegmentationFolderConfig) -> tuple[int, int]:
    image = _decoded(path, config)
    return image.height, image.width


def _decoded(path: Path, config: SegmentationFolderConfig) -> Image.Image:
    """Return a decoded image, upright. Raises StageError, with the path, where that is impossible."""
    with open_image_file(path, config.max_pixels) as image:
        return upright(image)


@dataclass
class _Reader:
    """Decodes pairs of files into arrays that are mapped from the scratch folder."""

    config: SegmentationFolderConfig
    ctx: Context
    root: Path
    shape_HW: tuple[int, int]
    make_array: MakeArray
    num_pairs: int
    num_done: int = 0

    def split(self, name: str, pairs: Sequence[tuple[Path, Path]]) -> Split:
        """Return the pairs of one folder."""
        images_NHWC = self.make_array(f"{name}.{_IMAGES}", (len(pairs), *self.shape_HW, 3))
        masks_NHW = self.make_array(f"{name}.{_MASKS}", (len(pairs), *self.shape_HW))
        for row, (image, mask) in enumerate(pairs):
            images_NHWC[row], masks_NHW[row] = self._pair(image, mask)
            self.num_done += 1
            self.ctx.progress(self.num_done, self.num_pairs, "images")
        ids = np.array([image.relative_to(self.root).as_posix() for image, _ in pairs], dtype=np.str_)
        return Split(ids, {_IMAGES: ArrayColumn(images_NHWC)}, {_MASKS: ArrayColumn(masks_NHW)})

    def _pair(self, image_path: Path, mask_path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        image, mask = _decoded(image_path, self.config), _decoded(mask_path, self.config)
        if image.size != mask.size:
            sizes = [f"{path} has {of.width} x {of.height}" for path, of in ((image_path, image), (mask_path, mask))]
            raise StageError(f"{' and '.join(sizes)} pixels: an image and its mask have the same size")
        size = (self.shape_HW[1], self.shape_HW[0])
        if image.size != size and not self.config.image_size:
            raise StageError(
                f"{image_path} has {image.width} x {image.height} pixels, others {size[0]} x {size[1]}: set image_size"
            )
        if mask.mode not in _MODES:
            raise StageError(f"{mask_path} has the mode {mask.mode}; masks have one byte a pixel, the class's number")
        mask_HW = np.asarray(mask.resize(size, Image.Resampling.NEAREST), dtype=np.uint8)
        if mask.mode == "1" and self.config.values:
            mask_HW = mask_HW * np.uint8(255)  # black and white, as other formats have them
        pixels = in_8_bits(image, str(image_path), channels=3)
        return np.asarray(Resizing().fit(pixels, self.shape_HW)), self._classes(mask_HW, mask_path)

    def _classes(self, mask_HW: npt.NDArray[np.uint8], path: Path) -> npt.NDArray[np.uint8]:
        """Return the number of each pixel's class, or what is ignored."""
        values, ignore = self.config.values, self.config.ignored_value
        known = values or range(len(self.config.class_names))
        wrong = [int(value) for value in np.unique(mask_HW) if value not in known and value != ignore]
        if wrong:
            numbered = f"have the values {list(values)}" if values else f"are numbered 0 to {known[-1]}"
            also = "" if ignore is None else f", and {ignore} is ignored (option `ignore`)"
            remedy = "" if values else "; option `values` gives classes other values"
            raise StageError(f"{path} has pixels of {wrong[0]}; classes {numbered}{also}{remedy}")
        if not values:
            return mask_HW
        numbers = np.full(256, _ignored_number(self.config), dtype=np.uint8)
        numbers[list(values)] = range(len(values))
        return numbers[mask_HW]
