"""Image files in class folders: `ROOT/CLASS/*` to be split, or `ROOT/train/CLASS/*` with `test` and `val` or without.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON, Context, StageError

if TYPE_CHECKING:
    from ptpipe_data import ImageFolderConfig
    from ptpipe_torch.data.data import Data, Split

_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_IMAGENET = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.449,), (0.226,))}
"""Of torchvision's ImageNet models; grey as the mean over channels."""
_MEASURED_IMAGES = 512
_TEST_SHARE = 0.1
_CHUNK_IMAGES = 64


def find_root(path: str) -> Path:
    """The folder that the user named, absolute. Raises StageError where there is none."""
    root = Path(path).expanduser().resolve()
    if not root.is_dir():
        raise StageError(f"{root} is no folder" if root.exists() else f"{root} is not there")
    return root


def folder_fingerprint(path: str) -> JSON:
    """Relative path, size and time of change of every image file, hashed, and where they are."""
    root = find_root(path)
    digest, num_files = hashlib.sha256(), 0
    for relative, entry in _walk(root, ""):
        status = entry.stat()
        digest.update(f"{relative}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
        num_files += 1
    return {"root": str(root), "num_files": num_files, "digest": digest.hexdigest()}


def image_folder(config: ImageFolderConfig, ctx: Context) -> Data:
    """The data set in a folder. Raises StageError for a folder that is not laid out as one."""
    from ptpipe_data.splitting import draw_splits, set_aside
    from ptpipe_torch.data.data import Data, DatasetInfo

    root = find_root(config.path)
    names = [name for name in ("train", "val", "test") if (root / name).is_dir()] if (root / "train").is_dir() else [""]
    listed = {name: _listed(root, name) for name in names}
    classes = sorted({class_name for files in listed.values() for class_name, _ in files})
    for name in names:
        lacking = sorted(set(classes) - {class_name for class_name, _ in listed[name]})
        if lacking and name in ("", "train"):
            raise StageError(f"{root / name} has no images of the class {lacking[0]}")
    pools = {name: _pool(root, files, classes, config) for name, files in listed.items()}
    if config.in_memory:
        pools = {name: _decoded(pool, name, ctx) for name, pool in pools.items()}
    train = pools.get("train", pools.get(""))
    assert train is not None
    if "test" in pools:
        splits = draw_splits(train, pools["test"], config, ctx.seed, val=pools.get("val"))
    else:
        test_size = _TEST_SHARE if config.test_size is None else config.test_size
        train, test = set_aside(train, test_size, ctx.seed, "test")
        splits = draw_splits(train, test, config.model_copy(update={"test_size": None}), ctx.seed, val=pools.get("val"))
    mean, std = _normalization(splits["train"], config)
    info = DatasetInfo(root.name, tuple(classes), (config.channels, config.image_size, config.image_size), mean, std)
    return Data(info, splits, config.loader_options())


def _walk(folder: Path, relative: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Image files below a folder with their relative paths, in the order of their names; hidden ones left out."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = f"{relative}{entry.name}"
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _walk(folder / entry.name, f"{path}/")
            elif os.path.splitext(entry.name)[1].lower() in _SUFFIXES:  # noqa: PTH122 - a Path a file is slow
                yield path, entry


def _listed(root: Path, name: str) -> list[tuple[str, str]]:
    """(class name, path relative to root) of every image of a split's folder."""
    prefix = f"{name}/" if name else ""
    files = [path for path, _ in _walk(root / name, prefix)]
    listed = []
    for path in files:
        class_name, slash, _ = path[len(prefix) :].partition("/")
        if not slash:
            raise StageError(
                f"{root / path} lies in no class folder (there is to be one folder a class in {root / name})"
            )
        if not path.isprintable():  # a name that is no UTF-8 has surrogates, which are not printable
            raise StageError(f"{str(root / path)!r}: rename it; names of images are to be printable UTF-8")
        listed.append((class_name, path))
    if not listed:
        raise StageError(f"{root / name} has no images in class folders ({', '.join(sorted(_SUFFIXES))})")
    with_images = {class_name for class_name, _ in listed}
    for entry in sorted((root / name).iterdir()):
        if entry.is_dir() and entry.name not in with_images and not entry.name.startswith("."):
            raise StageError(f"{entry} has no images")
    return listed


def _pool(root: Path, files: list[tuple[str, str]], classes: list[str], config: ImageFolderConfig) -> Split:
    import numpy as np

    from ptpipe_torch.data.data import Split
    from ptpipe_torch.data.images import FileImages

    numbers = {class_name: number for number, class_name in enumerate(classes)}
    labels_N = np.array([numbers[class_name] for class_name, _ in files], dtype=np.int64)
    paths_N = np.array([path.encode() for _, path in files], dtype=np.bytes_)
    images = FileImages(root, paths_N, config.image_size, config.resize or config.image_size, config.channels)
    return Split(np.array([path for _, path in files], dtype=np.str_), labels_N, images)


def _decoded(pool: Split, name: str, ctx: Context) -> Split:
    """The same samples with their pixels in one array, which is a file in scratch until it is stored."""
    import numpy as np

    from ptpipe_torch.data.data import Split
    from ptpipe_torch.data.images import ArrayImages

    shape_HWC = pool.images.take(np.arange(1)).shape[1:]
    path = ctx.scratch / f"{name or 'all'}.npy"
    pixels_NHWC = np.lib.format.open_memmap(path, "w+", np.uint8, (len(pool), *shape_HWC))
    for start in range(0, len(pool), _CHUNK_IMAGES):
        stop = min(start + _CHUNK_IMAGES, len(pool))
        pixels_NHWC[start:stop] = pool.images.take(np.arange(start, stop))
        ctx.progress(stop, len(pool), "images")
    return Split(pool.ids, pool.labels_N, ArrayImages(pixels_NHWC))


def _normalization(train: Split, config: ImageFolderConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    import numpy as np

    from ptpipe_data.statistics import channel_statistics
    from ptpipe_torch.data.images import SubsetImages

    if config.normalize == "imagenet":
        return _IMAGENET[config.channels]
    some = np.linspace(0, len(train) - 1, min(len(train), _MEASURED_IMAGES)).astype(np.int64)
    return channel_statistics(SubsetImages(train.images, some))
