"""Image files that the rows of a table name, with targets in its columns.

Shape legend: N images of a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ptpipe import Context
from ptpipe_data.duplicates import report_shared_files
from ptpipe_data.image_files import SUFFIXES, check_headers, check_name, suffix_of, walk
from ptpipe_data.image_folder import normalization
from ptpipe_data.image_table_paths import find_images
from ptpipe_data.labelled_images import decode_images, image_files, image_info
from ptpipe_data.paths import dataset_name
from ptpipe_data.table_csv import AS_WRITTEN
from ptpipe_data.table_file import TableFile, read_files
from ptpipe_data.table_targets import TableReader, draw_rows, rows_of, source_of
from ptpipe_torch import ArrayColumn, Column, Data, Split
from ptpipe_torch.data.column import SubsetColumn

if TYPE_CHECKING:
    from ptpipe_data.image_config import ImageTableConfig

_IMAGES = "images"


def load_image_table(config: ImageTableConfig, ctx: Context) -> Data:
    """Return the data set. Classes are those of train alone.

    Raises StageError, with the row, for an image that is not in the folder, or that two rows name.
    """
    # 007 is text in a CSV file; numbers of a JSON file are whole already.
    files = read_files(config, pa.schema([pa.field(config.image, pa.string(), metadata=AS_WRITTEN)]))
    for notice in (text for file in files.values() for text in file.notices):
        ctx.notice(notice)
    root = find_images(config)
    paths = _paths(config, files, root)
    check_headers(root, sorted(path for of in paths.values() for path in of), ctx.notice)
    drawn = draw_rows(files, config, ctx.seed)
    task, targets = TableReader(files, rows_of(drawn["train"])).task(config, config.targets)
    images: Mapping[str, Column] = {name: image_files(root, of, config) for name, of in paths.items()}
    if config.in_memory:
        images = decode_images(images, ctx)
    (target,) = task.targets
    splits = {}
    for name, split in drawn.items():
        source, rows_N = source_of(name, config, files), rows_of(split)
        ids = np.array(paths[source], dtype=np.str_)[rows_N]
        pixels, values = SubsetColumn(images[source], rows_N), ArrayColumn(targets[source][rows_N])
        splits[name] = Split(ids, {_IMAGES: pixels}, {target: values})
    report_shared_files(root, splits, ctx)
    train = splits["train"].inputs[_IMAGES]
    name = dataset_name(files["train"].path)
    info = image_info(name, task, train, *normalization(train, config), resizing=config.resizing)
    return Data(info, splits, config.loader_options())


def _paths(config: ImageTableConfig, files: Mapping[str, TableFile], root: Path) -> dict[str, list[str]]:
    """Return the path of each row's image, relative to `root`, in each file."""
    present = {path for path, _ in walk(root)}
    paths, first_rows = {}, dict[str, str]()
    for name, file in files.items():
        paths[name] = [_relative(text, config.suffix or "", root, present) for text in file.texts(config.image)]
        _check_present(file, config.image, paths[name], root, present)
        for row, path in enumerate(paths[name]):
            if path in first_rows:
                problem = f"the image of {first_rows[path]}, too: an image has one row, with all of its targets"
                raise file.error(config.image, row, problem)
            first_rows[path] = f"{file.path}, row {file.row_name(row)}"
    return paths


def _relative(text: str, suffix: str, root: Path, present: Set[str]) -> str:
    """Return the path that a value means, as `walk` has it."""
    path = normpath(f"{text}{suffix}")
    if path.startswith(("/", "../")):
        file = root / path
        found = (os.path.relpath(*of) for of in ((file, root), (file.resolve(), root.resolve())))
        return next((relative for relative in found if relative in present), path)
    return path if path in present else normpath(path.replace("\\", "/"))  # as Windows writes it


def _check_present(file: TableFile, column: str, paths: Sequence[str], root: Path, present: Set[str]) -> None:
    """Raise StageError for the first row whose image is not there, or can't be read."""
    missing = [row for row, path in enumerate(paths) if path not in present]
    if missing:
        count = f" ({len(missing):,} of {len(paths):,} rows have none)" if len(missing) > 1 else ""
        problem = f"which is no image file in {root}{count}{_hint(paths[missing[0]], root, present)}"
        raise file.error(column, missing[0], problem)
    for row, path in enumerate(paths):
        check_name(root, path)
        if suffix_of(path) not in SUFFIXES:
            raise file.error(column, row, "an image of a format that is not read: convert it to JPEG or PNG")


def _hint(path: str, root: Path, present: Set[str]) -> str:
    """Return what to do about an image that is not there, where that is known."""
    if (root / path).is_file():
        return ": it is hidden, or its suffix is no image's"
    for suffix in sorted(SUFFIXES):
        if f"{path}{suffix}" in present:
            return f"; there is {path}{suffix}: set `suffix` to {suffix}"
    for other in sorted(present):
        if other.endswith(f"/{path}"):
            return f"; there is {other}: set `folder` to {root / other.removesuffix(path)}"
    return "" if path.startswith("..") or not present else "; the column's paths are relative to `folder`"
