"""Read a data set of the catalog from its local files: verify, split, normalize."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ptpipe import Context, StageError
from ptpipe_data.catalog import CatalogEntry
from ptpipe_data.channel_stats import channel_stats
from ptpipe_data.cifar import read_cifar_splits
from ptpipe_data.classes import classification
from ptpipe_data.idx import read_idx_splits
from ptpipe_data.labelled_images import image_info, images_of, labels_of
from ptpipe_data.splitting import draw_splits
from ptpipe_torch.data.data import Data, Split

if TYPE_CHECKING:
    from ptpipe_data.config import CatalogConfig

_READERS = {"idx": read_idx_splits, "cifar": read_cifar_splits}


def read_data(entry: CatalogEntry, found: Mapping[str, Path], config: CatalogConfig, ctx: Context) -> Data:
    """Read, verify and split the data set; `found` maps each published file's name to its local path.

    Raises StageError with the path of a damaged or altered file.
    """
    train, test, unverified = _READERS[entry.format](entry, found, config.verify)
    if unverified:
        _check_counts(entry, train, test, unverified)
        ctx.notice(
            f"{', '.join(unverified)}: no digest of the unpacked {entry.title} is published; "
            "verified only by format, sizes and number of images per class"
        )
    splits = draw_splits(train, test, config, ctx.seed)
    labels_N = labels_of(splits["train"])
    if config.verify:
        name, class_names, statistics = entry.name, entry.class_names, (entry.mean, entry.std)
    else:  # a user's own files: the catalog's classes and statistics don't apply
        name = f"own files in the format of {entry.name}"
        num_classes = 1 + int(max(labels_of(train).max(), labels_of(test).max()))
        class_names = tuple(map(str, range(num_classes)))
        statistics = channel_stats(images_of(train))
    task = classification(class_names, config.classes, labels_N)
    info = image_info(name, task, images_of(train), *statistics)
    return Data(info, splits, config.loader_options())


def _check_counts(entry: CatalogEntry, train: Split, test: Split, paths: list[str]) -> None:
    num_classes = len(entry.class_names)
    for split, num in zip((train, test), entry.num_per_class or (), strict=True):
        counts = np.bincount(labels_of(split), minlength=num_classes)
        if len(counts) != num_classes or not (counts == num).all():
            raise StageError(
                f"{', '.join(paths)}: altered: {entry.title} has {num} images of each class, not {counts.tolist()}"
            )
