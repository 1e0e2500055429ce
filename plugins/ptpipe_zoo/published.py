"""Published weights: their files in torch.hub's cache, verified and downloaded. Imports neither torch nor numpy."""

from __future__ import annotations

import os
import re
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from ptpipe import StageError
from ptpipe_torch.files import file_digest

_TIMEOUT_S = 10.0
_DIGEST_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.")
"""torch.hub's convention: a file's name has the first digits of its SHA-256."""


def cached_file(url: str) -> Path:
    """Return where torch.hub keeps the file of a URL, whether it is there or not."""
    # As torch.hub._get_torch_home: importing torch would take longer than all of a plan.
    home = os.environ.get("TORCH_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "torch")  # noqa: PTH118
    return Path(home).expanduser() / "hub" / "checkpoints" / Path(urlsplit(url).path).name


def verify(path: Path, url: str) -> None:
    """Raise StageError unless the file's digest begins with the digits in the name that the URL ends in."""
    published, digest = _DIGEST_IN_NAME.search(urlsplit(url).path), file_digest(path)
    if published and not digest.startswith(published[1]):
        begin = digest[: len(published[1])]
        raise StageError(f"{path} is not the file published as {url}: its SHA-256 begins with {begin}; delete it")


def fetch(url: str) -> None:
    """Download a published file into torch.hub's cache, unless it is there; verify it in either case.

    Raises StageError if the download fails or the file is not the published one.
    """
    path = cached_file(url)
    if path.exists():
        verify(path, url)
        return
    from ptpipe_torch.download import download_file

    def verify_download(file: Path) -> None:
        try:
            verify(file, url)
        except StageError as error:
            raise StageError(f"{url} was downloaded damaged, or is another file now; try again") from error

    try:
        download_file(url, path, lambda done, total: None, timeout_s=_TIMEOUT_S, verify=verify_download)
    except (OSError, HTTPException) as error:
        raise StageError(f"can't download {url} ({error}): specify a local file with weights_file") from error
