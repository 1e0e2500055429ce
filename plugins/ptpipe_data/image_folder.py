"""Image folders: `ROOT/CLASS/*`, split here, or `ROOT/train/CLASS/*` with optional `test` and `val`.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON, Context, StageError
from ptpipe_data.paths import change_stamp, find_path, split_folders
from ptpipe_torch.data.images import FORMATS

if TYPE_CHECKING:
    from ptpipe_data.image_config import EncodedImageConfig, ImageFolderConfig
    from ptpipe_data.scratch_arrays import MakeArray
    from ptpipe_torch import Column, Data, Split, Task

_SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
_MAX_DEPTH = 32
_MAX_PATH = 512
"""In an array of paths each takes as much memory as the longest."""
_MAX_LINKS = 2
"""Links to folders are followed where a split or a class is one. More, one inside another, may be a loop."""
IMAGENET = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.449,), (0.226,))}
"""Mean and standard deviation of torchvision's ImageNet models; for grayscale, averaged over the channels."""
_MEASURED_IMAGES = 512
_TEST_FRACTION = 0.1
_CHUNK_IMAGES = 64


def find_root(path: str) -> Path:
    """Return the folder as an absolute path. Raises StageError if it does not exist."""
    root = find_path(path)
    if not root.is_dir():
        raise StageError(f"{root} is not a folder")
    return root


def fingerprint(path: str) -> JSON:
    """Return the folder, the number of images, and a digest of their relative paths, sizes and times of change."""
    root = find_root(path)
    digest, num_files = hashlib.sha256(), 0
    for relative, entry in _walk(root, ""):
        digest.update(change_stamp(relative, entry.stat()))
        num_files += 1
    return {"root": str(root), "num_files": num_files, "digest": digest.hexdigest()}


def load_image_folder(config: ImageFolderConfig, ctx: Context) -> Data:
    """Return the data set in `config.path`. Raises StageError if the folder isn't laid out as one."""
    from ptpipe_data.classes import classification
    from ptpipe_data.labelled_images import image_info, images_of, labels_of
    from ptpipe_data.scratch_arrays import scratch_arrays
    from ptpipe_data.splitting import draw_missing_splits
    from ptpipe_torch import Data, Split, Unlabeled

    root = find_root(config.path)
    folders = split_folders(root)
    list_images = _list_unlabeled if config.unlabeled else _list_images
    listed = {name: list_images(root, folder) for name, folder in folders.items()}
    classes = sorted({class_name for files in listed.values() for class_name, _ in files})
    if missing := sorted(set(classes) - {class_name for class_name, _ in listed["train"]}):
        raise StageError(f"{root / folders['train']} has no images of the class {missing[0]}")
    found = {name: _lazy_split(root, files, classes, config) for name, files in listed.items()}
    if config.in_memory:
        with scratch_arrays(ctx.scratch) as make_array:
            found = {name: _decode(split, name, make_array, ctx) for name, split in found.items()}
    splits = draw_missing_splits(found, config, ctx.seed, test_fraction=_TEST_FRACTION)
    images = images_of(splits["train"])
    task: Task = Unlabeled()
    if config.unlabeled:
        splits = {name: Split(of.ids, of.inputs, {}) for name, of in splits.items()}
    else:
        task = classification(classes, config.classes, labels_of(splits["train"]))
    info = image_info(root.name, task, images, *normalization(images, config), resizing=config.resizing)
    return Data(info, splits, config.loader_options())


def list_files(folder: Path) -> list[str]:
    """Return the relative paths of the image files below a folder, sorted, without hidden ones.

    Raises StageError for a name that can't be printed, or is too long.
    """
    paths = [path for path, _ in _walk(folder, "")]
    for path in paths:
        _check_name(folder, path)
    return paths


def _check_name(folder: Path, path: str) -> None:
    if not path.isprintable():  # a name that is not UTF-8 has surrogates, which are not printable
        raise StageError(f"{str(folder / path)!r}: rename it; image names must be printable UTF-8")
    if len(path) > _MAX_PATH:
        raise StageError(f"{folder / path} is longer than {_MAX_PATH} characters: rename it")


def _walk(folder: Path, relative: str, num_links: int = 0) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield relative path and entry of each image file below a folder, sorted by name, without hidden ones.

    `num_links`: how many links to folders led to `folder`.
    """
    if num_links > _MAX_LINKS or relative.count("/") > _MAX_DEPTH:
        reason = "its links to folders may be a loop" if num_links > _MAX_LINKS else "folders are nested too deeply"
        raise StageError(f"{str(folder)!r}: {reason}")
    try:
        with os.scandir(folder) as entries:
            found = [(entry, entry.is_dir(), entry.is_file()) for entry in entries if not entry.name.startswith(".")]
    except OSError as error:  # also a link to itself
        raise StageError(f"{error.filename!r} can't be read: {error.strerror}") from error
    for entry, is_folder, is_file in sorted(found, key=lambda item: item[0].name):
        path = f"{relative}{entry.name}"
        if is_folder:
            yield from _walk(folder / entry.name, f"{path}/", num_links + entry.is_symlink())
        elif os.path.splitext(entry.name)[1].lower() in _SUFFIXES:  # noqa: PTH122 - a Path per file is slow
            if not is_file:
                raise StageError(f"{entry.path!r} is neither a file nor a folder: remove it")
            yield path, entry


def _list_images(root: Path, name: str) -> list[tuple[str, str]]:
    """Return class name and path relative to `root` of each image in the folder `root/name`."""
    prefix = f"{name}/" if name else ""
    files = [path for path, _ in _walk(root / name, prefix)]
    listed = []
    for path in files:
        _check_name(root, path)
        class_name, slash, _ = path[len(prefix) :].partition("/")
        if not slash:
            raise StageError(
                f"{root / path} is not in a class folder ({root / name} must contain one folder per class)"
            )
        listed.append((class_name, path))
    if not listed:
        raise StageError(f"{root / name} has no images in class folders ({', '.join(sorted(_SUFFIXES))})")
    with_images = {class_name for class_name, _ in listed}
    for entry in sorted((root / name).iterdir()):
        if entry.is_dir() and entry.name not in with_images and not entry.name.startswith("."):
            raise StageError(f"{entry if entry.name.isprintable() else repr(str(entry))} has no images")
    return listed


def _list_unlabeled(root: Path, name: str) -> list[tuple[str, str]]:
    """Return the same of images in any folders, or none, with no name of a class."""
    files, prefix = list_files(root / name), f"{name}/" if name else ""
    if not files:
        raise StageError(f"{root / name} has no images ({', '.join(sorted(_SUFFIXES))})")
    return [("", f"{prefix}{path}") for path in files]


def _lazy_split(root: Path, files: list[tuple[str, str]], classes: list[str], config: ImageFolderConfig) -> Split:
    """Return a split whose images are decoded when they are taken."""
    import numpy as np

    from ptpipe_data.labelled_images import labelled_images
    from ptpipe_torch import ImageFileColumn

    numbers = {class_name: number for number, class_name in enumerate(classes)}
    labels_N = np.array([numbers[class_name] for class_name, _ in files], dtype=np.int64)
    paths_N = np.array([path.encode() for _, path in files], dtype=np.bytes_)
    images = ImageFileColumn(root, paths_N, config.image_size, config.shorter_side, config.channels, config.max_pixels)
    return labelled_images(np.array([path for _, path in files], dtype=np.str_), images, labels_N)


def _decode(split: Split, name: str, make_array: MakeArray, ctx: Context) -> Split:
    """Return the same samples with their pixels in one array."""
    import numpy as np

    from ptpipe_data.labelled_images import images_of, labelled_images, labels_of
    from ptpipe_torch import ArrayColumn

    images = images_of(split)
    shape_HWC = images.take(np.arange(1)).shape[1:]
    pixels_NHWC = make_array(name, (len(split), *shape_HWC))
    for start in range(0, len(split), _CHUNK_IMAGES):
        stop = min(start + _CHUNK_IMAGES, len(split))
        pixels_NHWC[start:stop] = images.take(np.arange(start, stop))
        ctx.progress(stop, len(split), "images")
    return labelled_images(split.ids, ArrayColumn(pixels_NHWC), labels_of(split))


def normalization(images: Column, config: EncodedImageConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation by the options. `images`: of train."""
    import numpy as np

    from ptpipe_data.channel_stats import channel_stats
    from ptpipe_torch.data.column import SubsetColumn

    if config.mean is not None and config.std is not None:
        return config.mean, config.std
    if config.normalize == "imagenet":
        return IMAGENET[config.channels]
    sample = np.linspace(0, len(images) - 1, min(len(images), _MEASURED_IMAGES)).astype(np.int64)
    return channel_stats(SubsetColumn(images, sample))
