"""Tar shards whose headers lie, and stored data sets that refer to shards which they shouldn't."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .attack import Attack
from .images import png

BLOCK, MIB = 512, 1 << 20


def header(name: str, size: int, kind: bytes = b"0", **fields: bytes) -> bytes:
    """A header, some fields of which are replaced: `size_field=b"..."`."""
    block = bytearray(BLOCK)
    values = {"name": name.encode(), "size_field": b"%011o\0" % size, "kind": kind, "magic": b"ustar\x0000"} | fields
    for place, field in ((0, "name"), (124, "size_field"), (156, "kind"), (257, "magic")):
        block[place : place + len(values[field])] = values[field]
    block[148:156] = values.get("checksum", b"%06o\0 " % (sum(block) + 8 * 32))
    return bytes(block)


def member(name: str, content: bytes, kind: bytes = b"0") -> bytes:
    return header(name, len(content), kind) + content + bytes(-len(content) % BLOCK)


def sample(number: int) -> bytes:
    return member(f"{number}.png", png(20, 20)) + member(f"{number}.cls", b"%d" % (number % 2))


END = bytes(2 * BLOCK)
SOUND = b"".join(map(sample, range(4)))


def pax(**records: bytes) -> bytes:
    """An extended header of records, whose lengths are right."""
    content = b""
    for keyword, value in records.items():
        rest = b" %s=%s\n" % (keyword.replace("_", ".").encode(), value)
        length = len(rest) + 1
        while len(b"%d" % length) + len(rest) != length:
            length += 1
        content += b"%d" % length + rest
    return member("pax", content, b"x")


def write(folder: Path, content: bytes, sparse_bytes: int = 0) -> None:
    """Write a shard; `sparse_bytes` of zeros, which take no disk, follow the content."""
    (folder / "shards").mkdir()
    with (folder / "shards" / "train-0.tar").open("wb") as file:
        file.write(content)
        if sparse_bytes:
            file.truncate(len(content) + sparse_bytes)


HUGE = header("9.png", 0, size_field=b"\x80" + (1 << 40).to_bytes(11))
TARS: dict[str, tuple[bytes, str]] = {
    "a member of 1 TB": (SOUND + HUGE + END, "train-0.tar is truncated within the sample 9, its .png: that ends at"),
    "a member of 2^88 bytes": (
        SOUND + header("9.png", 0, size_field=b"\x80" + b"\xff" * 11),
        r"train-0\.tar is truncated within the sample 9",
    ),
    "a negative size": (
        SOUND + header("9.png", 0, size_field=b"\xff" * 12),
        r"damaged after the sample 3: a size is b'\\xff",
    ),
    "a size of letters": (SOUND + header("9.png", 0, size_field=b"zzz"), "damaged after the sample 3: a size is"),
    "another checksum": (SOUND + header("9.png", 0, checksum=b"000001\0 "), "damaged, or no tar file: at byte 8,192"),
    "a checksum of text": (SOUND + header("9.png", 0, checksum=b"        "), "damaged, or no tar file"),
    "a sparse member": (SOUND + member("9.png", b"x", b"S"), "sparse member, after the sample 3"),
    "a sparse member by pax": (SOUND + pax(GNU_sparse_map=b"0,1") + member("9.png", b""), "sparse member"),
    "pax, a size of 1 TB": (SOUND + pax(size=b"1099511627776") + member("9.png", b"x") + END, "truncated within"),
    "pax, a size of 10^5 digits": (SOUND + pax(size=b"9" * 100_000), "damaged extended header after the sample 3"),
    "pax, a negative size": (SOUND + pax(size=b"-512") + member("9.png", b""), "damaged extended header"),
    "pax, a record that never ends": (SOUND + member("p", b"99999999999 path=x\n", b"x"), "damaged extended header"),
    "pax, a record of no length": (SOUND + member("p", b"0 path=x\n", b"x"), "damaged extended header"),
    "pax, a record without a value": (SOUND + member("p", b"6 abcd\n", b"x"), "damaged extended header"),
    "pax, 1 GB of records": (SOUND + header("p", 1 << 30, b"x"), "an extended header of 1,073,741,824 bytes"),
    "a long name of 1 GB": (SOUND + header("p", 1 << 30, b"L"), "an extended header of 1,073,741,824 bytes"),
    "a name of 10^6 characters": (
        SOUND + member("p", b"a" * 1_000_000 + b".png", b"L") + member("9.png", b""),
        "names of members are printable UTF-8 of at most 1024 characters, not 'aaa",
    ),
    "a name of escapes": (SOUND + member("\x1b[2J.png", b""), r"names of members are .* not '\\x1b\[2J\.png'"),
    "a name of a newline by pax": (SOUND + pax(path=b"a\nb.png") + member("9.png", b""), r"not 'a\\nb\.png'"),
    "an image of 2^62 pixels": (
        member("0.png", png(2**31 - 1, 2**31 - 1, rows=1)) + member("0.cls", b"0") + sample(1) + END,
        r"train-0\.tar: sample 0 has .*more (pixels )?than max_pixels",
    ),
    "a label of 2 MB": (
        SOUND + member("9.png", png(9, 9)) + member("9.cls", b"1" * 2 * MIB) + END,
        "sample 9 has a label of over 1 MB",
    ),
    "a label of 10^5 digits": (
        SOUND + member("9.png", png(9, 9)) + member("9.cls", b"1" * 100_000) + END,
        "sample 9: its class is '111",
    ),
    "no end": (SOUND, "truncated after the sample 3: it has no end-of-archive marker"),
    "a gzip file": (b"\x1f\x8b\x08\0" + bytes(2000), r"compressed \(gzip\)"),
    "text": (b"text\n" * 1000, "damaged, or no tar file: at byte 0"),
    "nothing": (b"", "truncated at its beginning"),
}


def linked(folder: Path, target: str | None) -> None:
    """A link or a pipe in the place of a shard."""
    (folder / "shards").mkdir()
    path = folder / "shards" / "train-0.tar"
    os.mkfifo(path) if target is None else path.symlink_to(target)


SPECIAL = {
    "a pipe": (None, r"train-0\.tar can't be read: not a regular file"),
    "a link to a device": ("/dev/zero", r"train-0\.tar can't be read: not a regular file"),
    "a link to a private file": ("/etc/passwd", r"train-0\.tar is damaged, or no tar file"),
    "a link to itself": ("train-0.tar", r"StageError: .*train-0\.tar can't be read"),
}

Change = Callable[[dict[str, Any]], object]


def stored(folder: Path, change: Change | None = None) -> None:
    """Store a data set that refers to a shard, then change the description of its column."""
    import numpy as np

    import ptpipe_data as data

    from .loaders import context

    write(folder, SOUND + END)
    config = data.ShardsConfig(path=str(folder / "shards"), image_size=16, val_size=0, test_size=1, num_workers=0)
    (folder / "stored").mkdir()
    data.load_shards(config, context(folder)).save(folder / "stored")
    assert np.load(folder / "stored" / "column_0.npy").shape == (4, 3)
    if change is not None:
        path = folder / "stored" / "data.json"
        record = json.loads(path.read_text())
        change(record["columns"][0])
        path.write_text(json.dumps(record))


def shard(**facts: Any) -> Change:
    return lambda column: column["shards"][0].update(facts)


def form(**facts: Any) -> Change:
    return lambda column: column["format"].update(facts)


STORED: dict[str, Change] = {
    "no shards": lambda column: column.update(shards=[]),
    "no format": lambda column: column.update(format=None),
    "a format of no kind": form(kind="pickle"),
    "pixels without limit": form(max_pixels=0),
    "10^9 pixels a side": form(size=10**9),
    "a shard elsewhere": shard(name="../stored/data.json"),
    "a shard above": shard(name=".."),
    "an absolute shard": shard(name="/etc/passwd"),
    "a shard of escapes": shard(name="\x1b[2J"),
    "a shard that is not there": shard(name="train-1.tar"),
    "another size": shard(size_bytes=1 << 62),
    "a negative size": shard(size_bytes=-1),
    "another folder": lambda column: column.update(root="/"),
    "arrays": lambda column: column.update(format={"kind": "array", "dtype": "uint8", "shape": [16, 16, 3]}),
    "arrays of 2^120 values": lambda column: column.update(
        format={"kind": "array", "dtype": "uint8", "shape": [1 << 60, 1 << 60]}
    ),
    "arrays of objects": lambda column: column.update(format={"kind": "array", "dtype": "object", "shape": []}),
    "rows": lambda column: column.update(format={"kind": "ragged", "dtype": "uint8", "padding": 0}),
    "rows of 2^40 values": lambda column: column.update(
        format={"kind": "ragged", "dtype": "uint8", "padding": 0, "length": 1 << 40}
    ),
}

ATTACKS = [
    *(
        Attack(f"shard, {name}", partial(write, content=content), "shards", f"StageError: .*{expect}")
        for name, (content, expect) in TARS.items()
    ),
    Attack(
        "shard, a member of 1 GB",
        partial(write, content=SOUND + header("9.png", 1 << 30), sparse_bytes=(1 << 30) + 4096),
        "shards",
        r"StageError: .*train-0\.tar: sample 9: \.png has 1,073,741,824 bytes, which is too much",
    ),
    *(
        Attack(f"shard, {name}", partial(linked, target=target), "shards", expect)
        for name, (target, expect) in SPECIAL.items()
    ),
    Attack("shard, a pipe, its key", partial(linked, target=None), "shards_key", None),
    Attack("shard, sound", partial(write, content=SOUND + END), "shards", None),
    *(
        Attack(f"stored shards, {name}", partial(stored, change=change), "stored_shards", "(Integrity|Stage)Error: .")
        for name, change in STORED.items()
    ),
    Attack("stored shards, sound", stored, "stored_shards", None),
]
