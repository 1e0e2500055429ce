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
from ptpipe_data.idx import read_idx_splits
from ptpipe_data.labelled_images import image_info, images_of, labels_of
from ptpipe_data.splitting import draw_splits
from ptpipe_torch.data.data import Data, DatasetInfo, Split

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
    info = _published_info(entry, train) if config.verify else _own_info(entry, train, test)
    return Data(info, splits, config.loader_options())


def _check_counts(entry: CatalogEntry, train: Split, test: Split, paths: list[str]) -> None:
    num_classes = len(entry.class_names)
    for split, num in zip((train, test), entry.num_per_class or (), strict=True):
        counts = np.bincount(labels_of(split), minlength=num_classes)
        if len(counts) != num_classes or not (counts == num).all():
            raise StageError(
                f"{', '.join(paths)}: altered: {entry.title} has {num} images of each class, not {counts.tolist()}"
            )


def _published_info(entry: CatalogEntry, train: Split) -> DatasetInfo:
    return image_info(entry.name, entry.class_names, images_of(train), entry.mean, entry.std)


def _own_info(entry: CatalogEntry, train: Split, test: Split) -> DatasetInfo:
    """Describe a user's own files by their content: the catalog's classes and statistics don't apply."""
    num_classes = 1 + int(max(labels_of(train).max(), labels_of(test).max()))
    mean, std = channel_stats(images_of(train))
    names = tuple(str(number) for number in range(num_classes))
    return image_info(f"own files in the format of {entry.name}", names, images_of(train), mean, std)
