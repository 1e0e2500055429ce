"""The members of tar files, listed from their headers alone: nothing is extracted.

Formats: POSIX.1-2017, pax (https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html), and GNU tar's long
names and large sizes (https://www.gnu.org/software/tar/manual/html_node/Standard.html).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ptpipe import StageError
from ptpipe_torch.files import open_regular

_BLOCK = 512
_MAX_EXTENDED = 1 << 20
"""Of an extended header, in bytes: it is read into memory."""
_MAX_DIGITS = 20
MAX_NAME = 1024
"""In an array of names each takes as much memory as the longest."""
_REGULAR = b"0", b"\0", b"7"
_WITHOUT_CONTENT = b"1", b"2", b"3", b"4", b"5", b"6"
"""Links, devices, folders and pipes: not followed, not made."""
_COMPRESSED: Mapping[bytes, str] = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


class TarMember(NamedTuple):
    """A file in a tar file."""

    key: str
    """Its path up to the first dot of the name: files of one key are a sample, in WebDataset's convention."""
    extension: str
    """What follows that dot, in lower case."""
    offset: int
    """Where the content begins."""
    size: int
    """In bytes."""


def tar_members(path: Path) -> Iterator[TarMember]:
    """Yield the files in a tar file, without those that have no key or no extension.

    Raises StageError, with the path and the sample, for one that is truncated, compressed or no tar file.
    """
    try:
        with open_regular(path) as file:
            yield from _Headers(path, file.fileno()).members()
    except OSError as error:
        raise StageError(f"{path} can't be read: {error.strerror}") from error


class _Headers:
    """Walks over the headers of a tar file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._end = os.fstat(descriptor).st_size
        self._position = 0
        self._last = ""
        self._extended: dict[str, str] = {}
        """What extended headers say of the next member."""

    def members(self) -> Iterator[TarMember]:
        while (block := self._next_block()) is not None:
            kind, size = block[156:157], self._size(block[124:136])
            if kind in (b"x", b"L"):
                self._extended |= self._read_extended(kind, size)
                continue
            extended, self._extended = self._extended, {}
            if kind in _WITHOUT_CONTENT:
                continue
            if kind == b"S" or any(name.startswith("GNU.sparse") for name in extended):
                raise StageError(f"{self._path} has a sparse member, {self._place}: pack it without")
            size = int(extended.get("size", size))
            member = self._member(extended.get("path") or self._name(block), size)
            self._last = f"the sample {member.key}" if member else self._last
            self._advance(size, f"the sample {member.key}, its .{member.extension}" if member else "a member")
            if member and kind in _REGULAR:
                yield member

    @property
    def _place(self) -> str:
        return f"after {self._last}" if self._last else "at its beginning"

    def _next_block(self) -> bytes | None:
        """Return the next header; None at the end."""
        block = os.pread(self._descriptor, _BLOCK, self._position)
        if not self._position:
            self._refuse_compressed(block)
        if len(block) < _BLOCK:
            # An archive ends with blocks of zeros: without them, it is not known what is missing.
            raise StageError(
                f"{self._path} is truncated {self._place}: it has no end-of-archive marker at byte {self._position:,}"
            )
        if not any(block):
            return None
        if _octal(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            raise StageError(
                f"{self._path} is damaged, or no tar file: at byte {self._position:,}, {self._place}, is no header"
            )
        self._position += _BLOCK
        return block

    def _refuse_compressed(self, block: bytes) -> None:
        for magic, name in _COMPRESSED.items():
            if block.startswith(magic):
                raise StageError(
                    f"{self._path} is compressed ({name}), so that its members can't be read by their positions: "
                    "decompress it (images are compressed already)"
                )

    def _member(self, name: str, size: int) -> TarMember | None:
        try:
            return _member(name, self._position, size)
        except ValueError as error:
            raise StageError(f"{self._path}: {error}") from error

    def _advance(self, size: int, what: str) -> None:
        if size > self._end - self._position:
            raise StageError(
                f"{self._path} is truncated within {what}: that ends at byte {self._position + size:,}, the file at "
                f"byte {self._end:,}"
            )
        self._position += -(-size // _BLOCK) * _BLOCK

    def _size(self, field: bytes) -> int:
        """Return a size: octal digits, or in GNU tar's form a binary number."""
        number = int.from_bytes(field[1:]) if field[:1] == b"\x80" else _octal(field)
        if number is None:
            raise StageError(f"{self._path} is damaged {self._place}: a size is {field!r}")
        return number

    def _read_extended(self, kind: bytes, size: int) -> dict[str, str]:
        if size > _MAX_EXTENDED:
            raise StageError(f"{self._path} has an extended header of {size:,} bytes, {self._place}")
        content = os.pread(self._descriptor, size, self._position)
        self._advance(size, f"an extended header {self._place}")
        if kind == b"L":
            return {"path": content.rstrip(b"\0").decode(errors="surrogateescape")}
        try:
            return _pax_records(content)
        except ValueError as error:
            raise StageError(f"{self._path} has a damaged extended header {self._place}: {error}") from error

    def _name(self, block: bytes) -> str:
        name, prefix = (block[begin:end].partition(b"\0")[0] for begin, end in ((0, 100), (345, 500)))
        # In GNU tar's own format, this is where times are.
        is_posix = block[257:263] == b"ustar\0"
        return (prefix + b"/" + name if is_posix and prefix else name).decode(errors="surrogateescape")


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0")
    return int(digits, 8) if digits and not digits.translate(None, b"01234567") else None


def _pax_records(content: bytes) -> dict[str, str]:
    """Return keywords and values of records `LENGTH KEYWORD=VALUE`. Raises ValueError where these are none."""
    records = {}
    while content:
        length, space, _ = content.partition(b" ")
        end = int(length) if space and length.isdigit() and len(length) < 10 else 0
        keyword, equals, value = content[len(length) + 1 : end].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise ValueError(f"no record at {content[:20]!r}")
        records[keyword.decode()] = value[:-1].decode(errors="surrogateescape")
        content = content[end:]
    size = records.get("size", "0")
    if not size.isdecimal() or len(size) > _MAX_DIGITS:
        raise ValueError(f"a size of {size[:100]!r}")
    return records


def _member(path: str, offset: int, size: int) -> TarMember | None:
    """Return a file by its path; None where that has no key or no extension. Raises ValueError for one that is none."""
    folder, slash, name = path.rpartition("/")
    stem, dot, extension = name.partition(".")
    if not stem or not dot or not extension:
        return None
    # A name that is not UTF-8 has surrogates, which are not printable.
    if not path.isprintable() or len(path) > MAX_NAME:
        raise ValueError(f"names of members are printable UTF-8 of at most {MAX_NAME} characters, not {path[:200]!r}")
    return TarMember(folder + slash + stem, extension.lower(), offset, size)
