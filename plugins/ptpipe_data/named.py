"""From the files of a published data set to Data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ptpipe import Context, StageError
from ptpipe_data.cifar import read_cifar_pools
from ptpipe_data.idx import read_idx_pools
from ptpipe_data.published import Published
from ptpipe_data.splitting import draw_splits
from ptpipe_data.statistics import channel_statistics
from ptpipe_torch.data.data import Data, DatasetInfo, Split

if TYPE_CHECKING:
    from ptpipe_data import PublishedConfig

_READERS = {"idx": read_idx_pools, "cifar": read_cifar_pools}


def published_data(published: Published, found: Mapping[str, Path], config: PublishedConfig, ctx: Context) -> Data:
    """Read, check and split. Raises StageError for a damaged or altered file, naming it."""
    train, test, unverified = _READERS[published.format](published, found, config.verify)
    if unverified:
        _check_counts(published, train, test, unverified)
        ctx.notice(
            f"{', '.join(unverified)}: no digest of the unpacked {published.title} is published; "
            "format, sizes and number of images in each class are as they should be"
        )
    splits = draw_splits(train, test, config, ctx.seed)
    info = _facts(published, train) if config.verify else _own_facts(published, train, test)
    return Data(info, splits, config.loader_options())


def _check_counts(published: Published, train: Split, test: Split, paths: list[str]) -> None:
    num_classes = len(published.class_names)
    for split, num in zip((train, test), published.num_per_class or (), strict=True):
        counts = np.bincount(split.labels_N, minlength=num_classes)
        if len(counts) != num_classes or not (counts == num).all():
            raise StageError(
                f"{', '.join(paths)}: altered: {published.title} has {num} images of each class, not {counts.tolist()}"
            )


def _facts(published: Published, train: Split) -> DatasetInfo:
    return DatasetInfo(published.name, published.class_names, _shape(train), published.mean, published.std)


def _own_facts(published: Published, train: Split, test: Split) -> DatasetInfo:
    """Facts of a user's own files: nothing is known of them but what is in them."""
    num_classes = 1 + int(max(train.labels_N.max(), test.labels_N.max()))
    mean, std = channel_statistics(train.images)
    names = tuple(str(number) for number in range(num_classes))
    return DatasetInfo(f"own files in the format of {published.name}", names, _shape(train), mean, std)


def _shape(train: Split) -> tuple[int, int, int]:
    _, height, width, channels = train.images.take(np.arange(1)).shape
    return channels, height, width
