"""HTTP downloads into a cache folder: pooch's temporary file, hash check and rename, without its console output."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pooch

_BLOCK_BYTES = 64 << 10


def download_file(
    url: str,
    target: Path,
    on_block: Callable[[int, int | None], None],
    *,
    timeout_s: float,
    known_hash: str | None = None,
    verify: Callable[[Path], None] | None = None,
) -> None:
    """Download `url` to `target`, unless `target` already has the known hash (or exists, where none is known).

    The file appears under its name complete and verified, or not at all; several processes may download it at once.

    Args:
        url: HTTP or HTTPS address.
        target: path of the file; its folder is created.
        on_block: called with the bytes received so far and the announced total (None if unknown). An exception that
            it raises aborts the download.
        timeout_s: limit in seconds for connecting and for each read. It does not cover name resolution.
        known_hash: `algorithm:hexdigest`. ValueError where the downloaded file has another one.
        verify: further check of the downloaded file before it gets its name; raises to reject it.

    Raises OSError (urllib.error.URLError for most network errors) or http.client.HTTPException.
    """
    stream = partial(_stream, on_block=on_block, timeout_s=timeout_s, verify=verify)
    target.parent.mkdir(parents=True, exist_ok=True)  # pooch's own way to create it fails when two processes do
    with _quiet(pooch.get_logger()):
        pooch.retrieve(url, known_hash, fname=target.name, path=target.parent, downloader=stream)


def _stream(
    url: str,
    temporary: str,
    _: object,
    *,
    on_block: Callable[[int, int | None], None],
    timeout_s: float,
    verify: Callable[[Path], None] | None,
) -> None:
    """Write the response to pooch's temporary file: a pooch downloader."""
    request = urllib.request.Request(url, headers={"User-Agent": "ptpipe"})  # noqa: S310 - a published address
    path = Path(temporary)
    path.unlink()  # pooch creates it readable by its owner only; a new file follows the umask: caches are shared
    with _opened(request, timeout_s) as response, path.open("xb") as file:
        total = int(response.headers.get("Content-Length") or 0) or None
        while block := response.read1(_BLOCK_BYTES):  # returns what has arrived: a slow server can be aborted
            file.write(block)
            on_block(file.tell(), total)
        file.flush()
        os.fsync(file.fileno())
    if verify is not None:
        verify(path)


def _opened(request: urllib.request.Request, timeout_s: float) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)  # noqa: S310 - a published address
    except HTTPError as error:
        error.close()  # it is the response, too
        raise


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Drop what pooch logs below warnings: its logger writes to stderr, over the progress display."""

    def is_warning(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    logger.addFilter(is_warning)  # unlike a level, it can be removed in any order: downloads run in threads
    try:
        yield
    finally:
        logger.removeFilter(is_warning)
