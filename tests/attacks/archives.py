"""Compressed data sets: little that unpacks to much, headers that lie, members that point elsewhere."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from .attack import Attack

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
MIB = 1 << 20


def header(*sizes: int) -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)


def zeros_gzip(start: bytes, num_mib: int, end: bytes = b"") -> bytes:
    """A gzip file of `start`, that many MiB of zeros and `end`, in a moment: the zeros are packed once."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    last = packer.compress(end) + packer.flush()
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + first + block * num_mib + last + bytes(8)


def idx(folder: Path, **changes: bytes) -> None:
    """Write four small files, some of them replaced: `train_images=...`."""
    for name, content in zip(IDX, (header(9, 6, 6) + bytes(324), header(9) + bytes(9)) * 2, strict=True):
        packed = changes.get("_".join(name.split("-")[:2]), gzip.compress(content))
        (folder / f"{name}.gz").write_bytes(packed)


def idx_bomb(folder: Path, start: bytes, num_mib: int, file: str = "train_images") -> None:
    idx(folder, **{file: zeros_gzip(start, num_mib)})


def idx_special(folder: Path, target: str | None, suffix: str = ".gz") -> None:
    """A link or a pipe in the place of a file."""
    idx(folder)
    (folder / f"{IDX[0]}.gz").unlink()
    path = folder / f"{IDX[0]}{suffix}"
    if target is None:
        os.mkfifo(path)
    else:
        path.symlink_to(target)


def idx_sparse(folder: Path, num_bytes: int, suffix: str = "") -> None:
    idx(folder)
    (folder / f"{IDX[0]}.gz").unlink()
    with (folder / f"{IDX[0]}{suffix}").open("wb") as file:
        file.write(header(2**32 - 1, 28, 28))
        file.truncate(num_bytes)


def tiny_images(folder: Path) -> None:
    number = 15_000_000
    for images, labels in ((IDX[0], IDX[1]), (IDX[2], IDX[3])):
        (folder / f"{images}.gz").write_bytes(gzip.compress(header(number, 1, 1) + bytes(number), 1))
        (folder / f"{labels}.gz").write_bytes(gzip.compress(header(number) + bytes(number), 1))


def tar_header(name: str, size: int, kind: bytes = b"0", link: str = "") -> bytes:
    field = b"%011o\0" % size if 0 <= size < 8**11 else b"\xff" + size.to_bytes(11, "big", signed=True)
    head = name.encode().ljust(100, b"\0")[:100] + b"0000644\0" + b"0000000\0" * 2 + field + b"0" * 11 + b"\0"
    tail = kind + link.encode().ljust(100, b"\0") + b"ustar\00000"
    tail = tail.ljust(512 - len(head) - 8, b"\0")
    checksum = sum(head) + sum(tail) + 8 * 32
    return head + b"%06o\0 " % checksum + tail


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def cifar(folder: Path, members: Iterable[bytes] = (), batches: bool = True) -> None:
    """A small, right archive, behind other members."""
    target = io.BytesIO()
    with gzip.open(target, "wb", 1) as file:
        for member in members:
            file.write(member)
        for name in BATCHES if batches else ():
            file.write(tar_header(f"cifar-10-batches-bin/{name}", 30730) + padded(bytes(30730)))
        file.write(bytes(1024))
    (folder / "cifar-10-binary.tar.gz").write_bytes(target.getvalue())


def cifar_bomb(folder: Path, start: bytes, num_mib: int) -> None:
    (folder / "cifar-10-binary.tar.gz").write_bytes(zeros_gzip(start, num_mib))


def many_members(number: int) -> bytes:
    return b"".join(tar_header(f"member {index}", 0) for index in range(number))


def sparse_member(folder: Path) -> None:
    """A batch of 900 MiB of nothing, as GNU tar stores it."""
    head = bytearray(tar_header(BATCHES[0], 0, b"S"))
    head[386 : 386 + 24] = b"%011o\0%011o\0" % (900 * MIB, 0)
    head[483:495] = b"%011o\0" % (900 * MIB)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    cifar(folder, [bytes(head)], batches=False)


def links(folder: Path) -> None:
    kinds: dict[str, Callable[[tarfile.TarInfo], object]] = {}
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE):
        kinds[kind.decode()] = lambda info, kind=kind: setattr(info, "type", kind)
    cifar(folder, [tar_header(name, 0, kind.encode(), "/etc/passwd") for kind in kinds for name in BATCHES])


BIG = header(60000, 28, 28)
HUGE = header(4 << 20, 28, 28)
PAX = tar_header("pax", 2 << 30, b"x")
ALTERED = "StageError: .*cifar-10-binary.tar.gz is truncated or altered: it is not the published CIFAR-10"
DAMAGED = "StageError: .*cifar-10-binary.tar.gz is damaged or truncated: "
OUTSIDE = ("../../../evil.bin", "/tmp/evil.bin", "a/../../evil.bin", f"../{BATCHES[0]}.py")
BOMBS = {
    "a small header": (BIG, r"StageError: .*unpacks to more than the 47040016 bytes"),
    "a large header": (HUGE, r"StageError: .*announces more than \d+ bytes, suspiciously many"),
    "a header of 2^96": (header(*[2**32 - 1] * 3), r"StageError: .*announces more than \d+ bytes, suspiciously many"),
    "255 dimensions": (
        bytes([0, 0, 8, 255]) + b"\xff" * 1020,
        r"StageError: .*announces more than \d+ bytes, suspiciously many",
    ),
    "no header": (b"", r"StageError: .*of IDX type 0x00"),
}

ATTACKS = [
    *(
        Attack(f"IDX, 3 GiB behind {name}, {load}", partial(idx_bomb, start=start, num_mib=3072), load, expect)
        for name, (start, expect) in BOMBS.items()
        for load in ("mnist", "own_mnist")
    ),
    Attack("IDX, 3 GiB, its key", partial(idx_bomb, start=BIG, num_mib=3072), "mnist_key", None),
    Attack(
        "IDX, 3 GiB of labels",
        partial(idx_bomb, start=header(3 << 30), num_mib=3072, file="t10k_labels"),
        "own_mnist",
        "StageError: .*t10k-labels.*suspiciously many",
    ),
    Attack("IDX, 15 million images of a pixel", tiny_images, "own_mnist", "StageError: .*at most 5000000"),
    *(
        Attack(
            f"IDX, a file of 1 TiB without blocks{suffix}, {load}",
            partial(idx_sparse, num_bytes=1 << 40, suffix=suffix),
            load,
            "StageError: .*ubyte.* is too large: 1099511627776 bytes",
        )
        for load in ("mnist", "own_mnist")
        for suffix in ("", ".gz")
    ),
    *(
        Attack(f"IDX, a pipe{suffix}, {load}", partial(idx_special, target=None, suffix=suffix), load, expect)
        for suffix in ("", ".gz")
        for load, expect in (
            ("mnist", "StageError: .*not a regular file"),
            ("mnist_key", "Error: .*not a regular file"),
        )
    ),
    Attack(
        "IDX, a link to /dev/zero", partial(idx_special, target="/dev/zero"), "mnist", "StageError: .*not a regular"
    ),
    Attack(
        "CIFAR, pax header of 2 GiB", partial(cifar_bomb, start=PAX, num_mib=2048), "own_cifar", f"{DAMAGED}.*header of"
    ),
    Attack("CIFAR, pax header of 2 GiB, verified", partial(cifar_bomb, start=PAX, num_mib=2048), "cifar", ALTERED),
    Attack(
        "CIFAR, long name of 2 GiB",
        partial(cifar_bomb, start=tar_header("n", 2 << 30, b"L"), num_mib=2048),
        "own_cifar",
        f"{DAMAGED}.*header of",
    ),
    Attack(
        "CIFAR, 3 GiB before a batch",
        partial(cifar_bomb, start=tar_header("zeros", 3 << 30), num_mib=3072),
        "own_cifar",
        f"{DAMAGED}.*unpacks to more than",
    ),
    Attack(
        "CIFAR, a batch of 3 GiB",
        partial(cifar_bomb, start=tar_header(BATCHES[0], 3 << 30), num_mib=3072),
        "own_cifar",
        f"{DAMAGED}.*unpacks to more than",
        peak_mb=400,
        is_thorough=True,
    ),
    Attack(
        "CIFAR, a batch of 2^60",
        partial(cifar_bomb, start=tar_header(BATCHES[0], 2**60), num_mib=1),
        "own_cifar",
        f"{DAMAGED}.",
    ),
    Attack(
        "CIFAR, a batch of 900 MiB of holes", sparse_member, "own_cifar", "StageError: .*does not contain data_batch_1"
    ),
    Attack(
        "CIFAR, a negative size",
        lambda folder: cifar(folder, [tar_header("a", 0), tar_header("b", -512)]),
        "own_cifar",
        f"{DAMAGED}|StageError: .*does not contain data_batch_1",  # from Python 3.13 on, tarfile ends there
    ),
    Attack(
        "CIFAR, 20,000 members",
        lambda folder: cifar(folder, [many_members(20_000)]),
        "own_cifar",
        f"{DAMAGED}.*more than 1000 members",
    ),
    Attack(
        "CIFAR, 5,000 headers in a row",
        lambda folder: cifar(folder, [tar_header("x", 512, b"x") + padded(b"9 a=b\n")] * 5000),
        "own_cifar",
        DAMAGED,
    ),
    Attack("CIFAR, links and devices called batches", links, "own_cifar", None),
    Attack(
        "CIFAR, names outside",
        lambda folder: cifar(folder, [tar_header(name, 9) + padded(b"import os") for name in OUTSIDE]),
        "own_cifar",
        None,
    ),
    Attack(
        "CIFAR, no archive",
        lambda folder: (folder / "cifar-10-binary.tar.gz").write_bytes(b"PK\3\4" + bytes(99)),
        "own_cifar",
        DAMAGED,
    ),
    Attack(
        "CIFAR, a pipe",
        lambda folder: os.mkfifo(folder / "cifar-10-binary.tar.gz"),
        "own_cifar",
        "StageError: .*regular",
    ),
]
