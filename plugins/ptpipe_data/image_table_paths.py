"""The files of image tables. Imports neither numpy nor pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ptpipe import JSON
from ptpipe_data import image_folder, table_paths

if TYPE_CHECKING:
    from ptpipe_data.image_config import ImageTableConfig


def find_images(config: ImageTableConfig) -> Path:
    """Return the folder of the images as an absolute path. Raises StageError where it is missing."""
    if config.folder is not None:
        return image_folder.find_root(config.folder)
    return table_paths.find_file(config.path).parent


def fingerprint(config: ImageTableConfig) -> JSON:
    """Return the digests of the tables, and what tells whether an image has changed."""
    return {"tables": table_paths.fingerprint(config), "images": image_folder.fingerprint(str(find_images(config)))}
