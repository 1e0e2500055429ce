"""Fetch published files from their mirrors into the user's cache, and know when to give up.

The work is done in a thread, because looking up a host's name can't be given a time limit; whoever waits for it gives
up when nothing useful has come for a while, over all files and mirrors together.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from ptpipe import StageError
from ptpipe_data.published import Part, Published, file_digest

_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True)
class Patience:
    """How long to wait for a network. Without one, `silence_s + socket_s` is the longest a download lasts."""

    silence_s: float = 6.0
    """Give up when no further 64 KiB (or the rest of a file) have come for so long."""
    socket_s: float = 3.0
    """Try the next mirror when one does not answer for so long."""


def download(published: Published, folder: Path, patience: Patience = Patience()) -> None:
    """Put the published files into the folder, each whole and with the published MD5, or not at all.

    Raises StageError with the reason where they can't be had.
    """
    transfer = _Transfer(published, folder, patience.socket_s)
    thread = threading.Thread(target=transfer.run, name=f"download {published.name}", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < transfer.useful_at + patience.silence_s:
        thread.join(0.05)
    if thread.is_alive():
        transfer.given_up.set()
        thread.join(patience.socket_s)  # so that it can remove its half-written file
        said = "".join(f"; {reason}" for reason in transfer.reasons)
        raise StageError(f"{published.title} could not be downloaded: no answer for {patience.silence_s:g} s{said}")
    if transfer.failure is not None:
        raise transfer.failure


@dataclass
class _Transfer:
    published: Published
    folder: Path
    socket_s: float
    useful_at: float = field(default_factory=time.monotonic)
    given_up: threading.Event = field(default_factory=threading.Event)
    reasons: list[str] = field(default_factory=list)
    """Why each mirror tried so far gave nothing."""
    failure: Exception | None = None
    mirrors: list[str] = field(default_factory=list)
    """The one that gave something last comes first."""

    def run(self) -> None:
        """Fetch what is not there yet; leave an exception in `failure`."""
        try:
            self.mirrors = list(self.published.mirrors)
            for part in self.published.parts:
                self._fetch(part)
        except OSError as error:
            self.failure = StageError(
                f"{self.published.title} could not be kept in {self.folder}: {error.strerror or error}"
            )
        except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
            self.failure = error

    def _fetch(self, part: Part) -> None:
        target = self.folder / part.file
        if target.exists() and file_digest(target, "md5") == part.md5:
            return
        for mirror in list(self.mirrors):
            reason = self._try(mirror + part.file, part, target)
            if reason is None:
                self.useful_at = time.monotonic()
                self.mirrors.sort(key=lambda other: other != mirror)
                return
            self.reasons.append(f"{mirror}{part.file}: {reason}")
        raise StageError(f"{self.published.title} could not be downloaded: {'; '.join(self.reasons)}")

    def _try(self, url: str, part: Part, target: Path) -> str | None:
        """Fetch one file from one mirror. Answers why it could not, or None."""
        request = urllib.request.Request(url, headers={"User-Agent": "ptpipe"})  # noqa: S310 - URLs of our own table
        try:
            with urllib.request.urlopen(request, timeout=self.socket_s) as response:  # noqa: S310
                return self._keep(response, part, target)
        except urllib.error.HTTPError as error:
            with error:
                return f"HTTP {error.code} {error.reason}"
        except urllib.error.URLError as error:
            return str(error.reason)
        except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
            return str(error) or type(error).__name__

    def _keep(self, response: http.client.HTTPResponse, part: Part, target: Path) -> str | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=f".{part.file}-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                digest = hashlib.md5(usedforsecurity=False)
                while block := response.read1(_BLOCK_BYTES):
                    digest.update(block)
                    file.write(block)
                    if self.given_up.is_set():
                        return "gave up"
                    if file.tell() > part.size_bytes:
                        return f"what came is longer than the published {part.size_bytes} bytes"
                    if file.tell() // _BLOCK_BYTES > (file.tell() - len(block)) // _BLOCK_BYTES:
                        self.useful_at = time.monotonic()
                size_bytes = file.tell()
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != part.md5:
                return f"what came is not the published file ({size_bytes} of {part.size_bytes} bytes)"
            Path(temporary).replace(target)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return None
