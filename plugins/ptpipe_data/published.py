"""Data sets as their authors published them: files, digests, where they are looked for and loaded from.

Standard library only: keys are worked out from here without numpy.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from ptpipe import JSON, StageError


@dataclass(frozen=True)
class Part:
    """One published file."""

    file: str
    size_bytes: int
    md5: str
    unpacked: str
    """Name of the file or folder that it unpacks to, taken in its place."""
    unpacked_sha256: str | None = None
    """Digest of the unpacked file, where it is known for certain."""


@dataclass(frozen=True)
class Published:
    """A data set that the world knows by name."""

    name: str
    title: str
    format: Literal["idx", "cifar"]
    mirrors: tuple[str, ...]
    """URLs of folders; those that torchvision's dataset classes list."""
    parts: tuple[Part, ...]
    torchvision_folder: str
    """Where torchvision puts it, under its root."""
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Per channel, of the training images, as customary with this data set."""
    num_per_class: tuple[int, int] | None = None
    """Of training and of test images, where all classes have the same."""


MNIST = Published(
    name="mnist",
    title="MNIST",
    format="idx",
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
    parts=(
        Part(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-images-idx3-ubyte",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        Part(
            "train-labels-idx1-ubyte.gz",
            28_881,
            "d53e105ee54ea40749a09fcbcd1e9432",
            "train-labels-idx1-ubyte",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        Part(
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "9fb629c4189551a2d022fa330f9573f3",
            "t10k-images-idx3-ubyte",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        Part(
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "ec29112dd5afa0611ce80d1b7f02629c",
            "t10k-labels-idx1-ubyte",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    torchvision_folder="MNIST/raw",
    class_names=tuple("0123456789"),
    mean=(0.1307,),
    std=(0.3081,),
)

FASHION_MNIST = Published(
    name="fashion_mnist",
    title="Fashion-MNIST",
    format="idx",
    mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    parts=(
        Part("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "train-images-idx3-ubyte"),
        Part("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe", "train-labels-idx1-ubyte"),
        Part("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79", "t10k-images-idx3-ubyte"),
        Part("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310", "t10k-labels-idx1-ubyte"),
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

CIFAR10 = Published(
    name="cifar10",
    title="CIFAR-10",
    format="cifar",
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    parts=(Part("cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin"),),
    torchvision_folder=".",
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    num_per_class=(5000, 1000),
)


def cache_folder(name: str) -> Path:
    """Where downloads of that data set are kept for this user, by the custom of the platform."""
    if sys.platform == "darwin":
        default = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        default = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        default = Path.home() / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "ptpipe" / name


def places(published: Published, path: str | None) -> list[Path]:
    """Folders in which the data set is looked for, the first that has all of it counts."""
    if path is not None:
        root = Path(path).expanduser()
        return [root, root / published.torchvision_folder]
    root_name = os.environ.get("PTPIPE_DATA")
    if not root_name:
        return [cache_folder(published.name)]
    root = Path(root_name).expanduser()
    own, theirs = root / published.name, published.torchvision_folder
    return [own, own / theirs, root / theirs, cache_folder(published.name)]


def find(published: Published, path: str | None) -> dict[str, Path] | None:
    """For each part's file name, the file or folder that holds it; None where no place has all parts."""
    for folder in places(published, path):
        found = {part.file: _holder(part, folder) for part in published.parts}
        complete = {name: holder for name, holder in found.items() if holder is not None}
        if len(complete) == len(found):
            return complete
    return None


def fingerprint(published: Published, path: str | None, stand_in: str | None) -> JSON:
    """What of the data set is there, by content: the same for the published files and for those yet to be loaded.

    Where it isn't there and `stand_in` is given, that. Raises StageError where the user's own `path` lacks it.
    """
    found = find(published, path)
    if found is not None:
        return {part.file: _digest(part, found[part.file]) for part in published.parts}
    if path is not None:
        raise StageError(missing(published, path))
    if stand_in is not None:
        return {stand_in: f"scikit-learn {version('scikit-learn')}"}
    return {part.file: part.md5 for part in published.parts}


def missing(published: Published, path: str | None) -> str:
    """Say in one line what was looked for, and where."""
    wanted = ", ".join(part.file for part in published.parts)
    looked = ", ".join(str(folder) for folder in dict.fromkeys(folder.resolve() for folder in places(published, path)))
    there = [
        f"{folder} has only {', '.join(sorted(names))}"
        for folder in places(published, path)
        if (names := [part.file for part in published.parts if _holder(part, folder) is not None])
    ]
    unset = "" if path is not None or os.environ.get("PTPIPE_DATA") else " ($PTPIPE_DATA is not set)"
    partly = f"; {there[0]}" if there else ""
    return f"{published.title} is not there: looked in {looked}{unset} for {wanted}{partly}"


def file_digest(path: Path, algorithm: str) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _holder(part: Part, folder: Path) -> Path | None:
    # The archive first: its content is checked quicker and better.
    return next((folder / name for name in (part.file, part.unpacked) if (folder / name).exists()), None)


def _digest(part: Part, holder: Path) -> str:
    if holder.is_dir():
        files: Mapping[str, str] = {file.name: file_digest(file, "sha256") for file in sorted(holder.glob("*.bin"))}
        return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    if holder.name == part.file:
        return file_digest(holder, "md5")
    content = file_digest(holder, "sha256")
    return part.md5 if content == part.unpacked_sha256 else content
