"""Files that a stage read beyond those of its key: what its result keeps of them, and which have changed since."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from ptpipe.plan.module_files import is_own_code
from ptpipe.reads import ReadFile

_SYSTEM = ("/proc/", "/sys/", "/run/", "/etc/", "/usr/lib/", "/usr/share/")
_MAX_FILES = 20_000
"""Of a stage: every plan looks at them, for about 0.1 s."""
_MAX_DIGESTED_BYTES = 4 * 2**30
"""Of a file: a part of a larger one may be all that was read. It counts by its size and times."""
_MAX_LISTED = 100
_MAX_REASONS = 5


def kept_files(read: Mapping[str, ReadFile], artifacts: Path) -> tuple[dict[str, ReadFile], list[str]]:
    """Return the files that a stage's result depends on, by path, and notices about them, a line each.

    `read`: as `FilesRead` has them. `artifacts`: the store's root, whose files are left out, as those of libraries and
    of the system, and temporary files that exist no more. Paths inside the working directory are relative to it.
    """
    apart = (*_SYSTEM, f"{artifacts}/", f"{os.path.realpath(artifacts)}/")
    own = {path: file for path, file in read.items() if not path.startswith(apart) and is_own_code(path)}
    there = [path for path in own if ReadFile.of(path) is not None]
    kept, notices = {}, []
    for path in there[:_MAX_FILES]:
        file = own[path]
        shown = path.removeprefix(f"{os.getcwd()}/")  # noqa: PTH109 - a Path for each of thousands of files is slow
        if not file.is_at(path):
            notices.append(f"{shown} changed while the stage ran: the next run reruns the stage")
        elif file.size_bytes <= _MAX_DIGESTED_BYTES:
            file = file._replace(sha256=_sha256(path, *file[:4]))
        kept[shown] = file
    if len(there) > _MAX_FILES:
        notices.append(f"it read {len(there)} files: only a change of the first {_MAX_FILES} of them reruns it")
    return kept, notices


def changed_files(files: Mapping[str, ReadFile]) -> tuple[str, ...]:
    """Return a line for each file that has changed since a stage read it, and for the rest of many."""
    lines = list(_changed(files))
    more = len(lines) - _MAX_REASONS
    return tuple(lines if more <= 0 else [*lines[:_MAX_REASONS], f"and {more} more of the files it read changed"])


def listed_digests(files: Mapping[str, ReadFile]) -> dict[str, str]:
    """Return the SHA-256 of each file by name, for records and statements; of many files, that of the list of these.

    A file outside the working directory is called by its own name, without the folder, which may be private. A file
    without a digest has its size and time instead.
    """
    digests: dict[str, str] = {}
    alike: Counter[str] = Counter()
    for path, file in files.items():
        name = os.path.basename(path) if path.startswith("/") else path  # noqa: PTH119 - as above
        alike[name] += 1
        shown = f"{name} ({alike[name]})" if alike[name] > 1 else name
        digests[shown] = file.sha256 or f"{file.size_bytes} bytes, modified at {file.mtime_ns} ns"
    if len(digests) <= _MAX_LISTED:
        return digests
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return {f"{len(digests)} files": hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()}


def _changed(files: Mapping[str, ReadFile]) -> Iterator[str]:
    for path, file in files.items():
        now = ReadFile.of(path)
        if now is None:
            yield f"a file it read is missing: {path}"
        elif file[:4] != now[:4] and not _has_bytes(path, now, file):
            yield f"a file it read changed: {path}"


def _has_bytes(path: str, now: ReadFile, file: ReadFile) -> bool:
    """Return whether a file that was touched, copied or checked out again has the bytes that it had."""
    if not file.sha256 or now.size_bytes != file.size_bytes:
        return False
    try:
        return _sha256(path, *now[:4]) == file.sha256
    except OSError:  # it can't be read, or no more
        return False


@lru_cache(maxsize=2 * _MAX_FILES)
def _sha256(path: str, *stamp: int) -> str:
    with open(path, "rb") as content:  # noqa: PTH123 - as above
        return hashlib.file_digest(content, "sha256").hexdigest()
