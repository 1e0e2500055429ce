"""Catalog of published data sets: their files, digests and mirrors, and where local copies are searched for.

Imports neither numpy nor torch: the keys of stages are computed from it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ptpipe import JSON, StageError
from ptpipe_torch.files import file_digest

DIGITS_FILE = Path(__file__).with_name("digits.npz")


@dataclass(frozen=True)
class RemoteFile:
    """One published file of a data set."""

    name: str
    size_bytes: int
    md5: str
    unpacked_sha256: str | None = None
    """Digest of the unpacked file, where one is known."""
    unpacked_folder: str | None = None
    """The folder that an archive unpacks to."""

    @property
    def unpacked_name(self) -> str:
        """The file or folder that it unpacks to, accepted instead of it."""
        return self.unpacked_folder or self.name.removesuffix(".gz")


@dataclass(frozen=True)
class CatalogEntry:
    """A published data set."""

    name: str
    title: str
    format: Literal["idx", "cifar"]
    mirrors: tuple[str, ...]
    """URLs of folders, as in torchvision's dataset classes."""
    files: tuple[RemoteFile, ...]
    torchvision_folder: str
    """Where torchvision stores it, relative to its root."""
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Per channel, of the training images, as customary for this data set."""
    num_per_class: tuple[int, int] | None = None
    """Training and test images of each class, where all classes have the same number."""


MNIST = CatalogEntry(
    name="mnist",
    title="MNIST",
    format="idx",
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
    files=(
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz",
            28_881,
            "d53e105ee54ea40749a09fcbcd1e9432",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "9fb629c4189551a2d022fa330f9573f3",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "ec29112dd5afa0611ce80d1b7f02629c",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    torchvision_folder="MNIST/raw",
    class_names=tuple("0123456789"),
    mean=(0.1307,),
    std=(0.3081,),
)

FASHION_MNIST = CatalogEntry(
    name="fashion_mnist",
    title="Fashion-MNIST",
    format="idx",
    mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    files=(
        RemoteFile("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        RemoteFile("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        RemoteFile("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        RemoteFile("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    torchvision_folder="FashionMNIST/raw",
    class_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    mean=(0.2860,),
    std=(0.3530,),
    num_per_class=(6000, 1000),
)

CIFAR10 = CatalogEntry(
    name="cifar10",
    title="CIFAR-10",
    format="cifar",
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    files=(
        RemoteFile(
            "cifar-10-binary.tar.gz",
            170_052_171,
            "c32a1d4ab5d03f1284b67883e8d87530",
            unpacked_folder="cifar-10-batches-bin",
        ),
    ),
    torchvision_folder=".",
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    num_per_class=(5000, 1000),
)


def cache_folder(name: str) -> Path:
    """Return the folder of the user's cache that downloads of this data set are stored in."""
    from platformdirs import user_cache_path

    return user_cache_path("ptpipe", appauthor=False, opinion=False) / name


def search_folders(entry: CatalogEntry, path: str | None) -> Iterator[Path]:
    """Yield the folders in which the data set is searched for; the first that has all files is used.

    `path`: the user's own folder, searched instead of $PTPIPE_DATA and the cache.
    """
    if path is not None:
        root = Path(path).expanduser()
        yield from (root, root / entry.torchvision_folder)
        return
    if root_name := os.environ.get("PTPIPE_DATA"):
        root = Path(root_name).expanduser()
        own = root / entry.name
        yield from (own, own / entry.torchvision_folder, root / entry.torchvision_folder)
    yield cache_folder(entry.name)


def find_files(entry: CatalogEntry, path: str | None) -> dict[str, Path] | None:
    """Map each published file's name to the local file or folder with its content; None if no folder has all."""
    for folder in search_folders(entry, path):
        found = {file.name: _local_path(file, folder) for file in entry.files}
        complete = {name: local for name, local in found.items() if local is not None}
        if len(complete) == len(found):
            return complete
    return None


def fingerprint(entry: CatalogEntry, path: str | None, fallback: str | None) -> JSON:
    """Return digests of the data set's content: the same before and after its download.

    Where no copy is found and there is a `fallback`, the fallback's. Raises StageError if the user's own `path` is
    incomplete, and for a file that can't be read.
    """
    found = find_files(entry, path)
    if found is not None:
        try:
            return {file.name: _digest(file, found[file.name]) for file in entry.files}
        except OSError as error:
            raise StageError(f"{error.filename} can't be read: {error.strerror}") from error
    if path is not None:
        raise StageError(describe_missing(entry, path))
    if fallback is not None:
        return {fallback: file_digest(DIGITS_FILE)}
    return {file.name: file.md5 for file in entry.files}


def describe_missing(entry: CatalogEntry, path: str | None) -> str:
    """Return one line about what was searched for, and where."""
    folders = list(search_folders(entry, path))
    searched = ", ".join(str(folder) for folder in dict.fromkeys(folder.resolve() for folder in folders))
    incomplete = [
        f"{folder} has only {', '.join(sorted(names))}"
        for folder in folders
        if (names := [file.name for file in entry.files if _local_path(file, folder) is not None])
    ]
    unset = "" if path is not None or os.environ.get("PTPIPE_DATA") else " ($PTPIPE_DATA is not set)"
    wanted = ", ".join(file.name for file in entry.files)
    return f"{entry.title} not found: searched {searched}{unset} for {wanted}{'; '.join(['', *incomplete[:1]])}"


def _local_path(file: RemoteFile, folder: Path) -> Path | None:
    # The archive first: one MD5 verifies it, and it is less to read.
    return next((folder / name for name in (file.name, file.unpacked_name) if (folder / name).exists()), None)


def _digest(file: RemoteFile, local: Path) -> str:
    if local.is_dir():
        digests = sorted((member.name, file_digest(member)) for member in local.glob("*.bin"))
        return hashlib.sha256(repr(digests).encode()).hexdigest()
    if local.name == file.name:
        return file_digest(local, "md5")
    content = file_digest(local)
    return file.md5 if content == file.unpacked_sha256 else content
