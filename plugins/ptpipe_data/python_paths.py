"""The files that a function of the user's reads. Imports no numpy."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from ptpipe import JSON
from ptpipe_data.catalog import file_digest
from ptpipe_data.paths import change_stamp, find_path


def fingerprint(paths: Iterable[str]) -> JSON:
    """Return the digest of each file, and of the names, sizes and times of change of what is in each folder.

    None without any path. Raises StageError where one does not exist.
    """
    digests: dict[str, JSON] = {}
    for path in paths:
        found = find_path(path)
        digests[path] = _folder_digest(found) if found.is_dir() else file_digest(found, "sha256")
    return digests or None


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            status = os.lstat(os.path.join(root, name))  # noqa: PTH118  # a Path per file is slow
            relative = os.path.relpath(os.path.join(root, name), folder)  # noqa: PTH118
            digest.update(change_stamp(relative, status))
    return digest.hexdigest()
