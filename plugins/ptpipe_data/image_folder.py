"""Image folders: `ROOT/CLASS/*`, split here, or `ROOT/train/CLASS/*` with optional `test` and `val`.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON, Context, StageError
from ptpipe_data.image_files import SUFFIXES, check_headers, list_files, suffix_of, walk
from ptpipe_data.paths import dataset_name, split_folders
from ptpipe_torch.paths import change_stamp, find_path

if TYPE_CHECKING:
    from ptpipe_data.image_config import EncodedImageConfig, ImageFolderConfig
    from ptpipe_torch import Column, Data, Split, Task

IMAGENET = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.449,), (0.226,))}
"""Mean and standard deviation of torchvision's ImageNet models; for grayscale, averaged over the channels."""
_MEASURED_IMAGES = 512
_TEST_FRACTION = 0.1


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
    for relative, entry in walk(root):
        if suffix_of(relative) in SUFFIXES:
            digest.update(change_stamp(relative, entry.stat()))
            num_files += 1
    return {"root": str(root), "num_files": num_files, "digest": digest.hexdigest()}


def load_image_folder(config: ImageFolderConfig, ctx: Context) -> Data:
    """Return the data set in `config.path`. Raises StageError if the folder isn't laid out as one."""
    from ptpipe_data.classes import classification
    from ptpipe_data.duplicates import report_shared_files
    from ptpipe_data.labelled_images import image_info, images_of, labels_of
    from ptpipe_data.splitting import draw_missing_splits
    from ptpipe_torch import Data, Split, Unlabeled

    root = find_root(config.path)
    folders = split_folders(root)
    list_images = _list_unlabeled if config.unlabeled else _list_images
    listed = {name: list_images(root, folder, ctx) for name, folder in folders.items()}
    check_headers(root, (path for files in listed.values() for _, path in files), ctx.notice)
    classes = sorted({class_name for files in listed.values() for class_name, _ in files})
    if missing := sorted(set(classes) - {class_name for class_name, _ in listed["train"]}):
        raise StageError(f"{root / folders['train']} has no images of the class {missing[0]}")
    if len(classes) == 1 and not config.unlabeled:
        raise StageError(
            f"{root / folders['train']} has images in one folder alone, {classes[0]}: a classification needs a folder "
            f"for each of its classes (is {root / folders['train'] / classes[0]} the `path`?); without classes: "
            "unlabeled"
        )
    found = {name: _lazy_split(root, files, classes, config) for name, files in listed.items()}
    if config.in_memory:
        found = _decoded(found, ctx)
    splits = draw_missing_splits(found, config, ctx.seed, test_fraction=_TEST_FRACTION)
    images = images_of(splits["train"])
    task: Task = Unlabeled()
    if config.unlabeled:
        splits = {name: Split(of.ids, of.inputs, {}) for name, of in splits.items()}
    else:
        _refuse_untrained(splits, config, classes)
        report_shared_files(root, splits, ctx)
        task = classification(classes, config.classes, labels_of(splits["train"]))
    info = image_info(dataset_name(root), task, images, *normalization(images, config), resizing=config.resizing)
    return Data(info, splits, config.loader_options())


def _refuse_untrained(splits: Mapping[str, Split], config: ImageFolderConfig, classes: list[str]) -> None:
    """Raise StageError where all images of a class were drawn for val and test."""
    import numpy as np

    from ptpipe_data.labelled_images import labels_of

    counts_K = np.bincount(labels_of(splits["train"]), minlength=len(classes))
    if config.train_size is not None or counts_K.all():  # what is left out is the user's choice
        return
    number = int(counts_K.argmin())
    ids = [id_ for name in ("val", "test") for id_ in splits[name].ids[labels_of(splits[name]) == number]]
    raise StageError(
        f"train has no image of the class {classes[number]}: {', '.join(ids[:3])} were drawn for val and test. Add "
        "images of this class or lower val_size and test_size; or choose yourself, by folders train, val and test"
    )


def _list_images(root: Path, name: str, ctx: Context) -> list[tuple[str, str]]:
    """Return class name and path relative to `root` of each image in the folder `root/name`."""
    prefix = f"{name}/" if name else ""
    listed = []
    for path in list_files(root / name, ctx.notice):
        class_name, slash, _ = path.partition("/")
        if not slash:
            raise StageError(
                f"{root / name / path} is not in a class folder ({root / name} must contain one folder per class)"
            )
        listed.append((class_name, f"{prefix}{path}"))
    if not listed:
        raise StageError(f"{root / name} has no images in class folders ({', '.join(sorted(SUFFIXES))})")
    with_images = {class_name for class_name, _ in listed}
    for entry in sorted((root / name).iterdir()):
        if entry.is_dir() and entry.name not in with_images and not entry.name.startswith("."):
            raise StageError(f"{entry if entry.name.isprintable() else repr(str(entry))} has no images")
    return listed


def _list_unlabeled(root: Path, name: str, ctx: Context) -> list[tuple[str, str]]:
    """Return the same of images in any folders, or none, with no name of a class."""
    files, prefix = list_files(root / name, ctx.notice), f"{name}/" if name else ""
    if not files:
        raise StageError(f"{root / name} has no images ({', '.join(sorted(SUFFIXES))})")
    return [("", f"{prefix}{path}") for path in files]


def _lazy_split(root: Path, files: list[tuple[str, str]], classes: list[str], config: ImageFolderConfig) -> Split:
    """Return a split whose images are decoded when they are taken."""
    import numpy as np

    from ptpipe_data.labelled_images import image_files, labelled_images

    numbers = {class_name: number for number, class_name in enumerate(classes)}
    labels_N = np.array([numbers[class_name] for class_name, _ in files], dtype=np.int64)
    paths = [path for _, path in files]
    return labelled_images(np.array(paths, dtype=np.str_), image_files(root, paths, config), labels_N)


def _decoded(splits: Mapping[str, Split], ctx: Context) -> dict[str, Split]:
    """Return the same samples with their pixels in arrays."""
    from ptpipe_data.labelled_images import decode_images, images_of, labelled_images, labels_of

    pixels = decode_images({name: images_of(split) for name, split in splits.items()}, ctx)
    return {name: labelled_images(of.ids, pixels[name], labels_of(of)) for name, of in splits.items()}


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
