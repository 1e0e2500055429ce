"""Download published data sets from their mirrors into the user's cache, within a time limit.

The transfer runs in a thread, since name resolution takes no timeout; the caller gives up once no useful progress has
been made for a while, over all files and mirrors together.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError

from ptpipe import StageError
from ptpipe_data.catalog import CatalogEntry, RemoteFile
from ptpipe_torch.download import download_file

_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True)
class TimeLimits:
    """How long to wait for a network. Without one, a download fails after at most `stall_s + socket_s` seconds."""

    stall_s: float = 6.0
    """Give up when no further 64 KiB (or the rest of a file) arrived for this long."""
    socket_s: float = 3.0
    """Try the next mirror when one does not respond for this long."""


def download(entry: CatalogEntry, folder: Path, limits: TimeLimits = TimeLimits()) -> None:
    """Download the files of a data set that `folder` doesn't have yet, each verified by size and MD5.

    Raises StageError with the reason where that fails.
    """
    transfer = _Transfer(entry, folder, limits.socket_s, list(entry.mirrors))
    thread = threading.Thread(target=transfer.run, name=f"download {entry.name}", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < transfer.progress_at + limits.stall_s:
        thread.join(0.05)
    if thread.is_alive():
        transfer.is_cancelled = True
        thread.join(limits.socket_s)  # it removes its temporary file
        reasons = "".join(f"; {reason}" for reason in transfer.reasons)
        raise StageError(f"{entry.title} could not be downloaded: no response for {limits.stall_s:g} s{reasons}")
    if transfer.failure is not None:
        raise transfer.failure


@dataclass
class _Transfer:
    entry: CatalogEntry
    folder: Path
    socket_s: float
    mirrors: list[str]
    """The last one that worked comes first."""
    progress_at: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    reasons: list[str] = field(default_factory=list)
    """Why each mirror tried so far failed."""
    failure: Exception | None = None

    def run(self) -> None:
        """Download all files; store an exception in `failure`."""
        title = self.entry.title
        try:
            for file in self.entry.files:
                if not any(self._try(mirror, file) for mirror in list(self.mirrors)):
                    raise StageError(f"{title} could not be downloaded: {'; '.join(self.reasons)}")
        except OSError as error:
            self.failure = StageError(f"{title} could not be stored in {self.folder}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
            self.failure = error

    def _try(self, mirror: str, file: RemoteFile) -> bool:
        """Download one file from one mirror; if that fails, record the reason."""
        received = 0

        def on_block(done: int, _: int | None) -> None:
            nonlocal received
            if done // _BLOCK_BYTES > received // _BLOCK_BYTES:
                self.progress_at = time.monotonic()  # a server that trickles single bytes counts as stalled
            received = done
            if self.is_cancelled:
                raise TimeoutError("too slow")
            if received > file.size_bytes:
                raise ValueError("too long")

        url, target = mirror + file.name, self.folder / file.name
        try:
            download_file(url, target, on_block, timeout_s=self.socket_s, known_hash=f"md5:{file.md5}")
        except HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
        except URLError as error:
            reason = str(error.reason)
        except (HTTPException, TimeoutError, ConnectionError) as error:
            reason = str(error) or type(error).__name__
        except ValueError:  # also pooch's, where the hash differs
            reason = f"not the published file (received {received} of {file.size_bytes} bytes)"
        else:
            self.progress_at = time.monotonic()
            self.mirrors.sort(key=lambda other: other != mirror)
            return True
        self.reasons.append(f"{url}: {reason}")
        return False
