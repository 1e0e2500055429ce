"""Image folders: links, loops, pipes, names."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .attack import Attack
from .images import png


def photos(folder: Path) -> Path:
    root = folder / "photos"
    for class_name in ("cat", "dog"):
        (root / class_name).mkdir(parents=True)
        for number in range(2):
            (root / class_name / f"{number}.png").write_bytes(png(20, 20))
    return root


def with_link(folder: Path, name: str, target: str) -> None:
    (photos(folder) / name).symlink_to(target)


def with_pipe(folder: Path) -> None:
    os.mkfifo(photos(folder) / "cat" / "z.png")


def with_name(folder: Path, name: bytes) -> None:
    path = os.fsencode(photos(folder) / "cat") + b"/" + name
    with open(path, "wb") as file:  # noqa: PTH123  # the name is no text
        file.write(png(20, 20))


def with_class(folder: Path, name: str) -> None:
    (photos(folder) / name).mkdir()


def deep(folder: Path) -> None:
    place = photos(folder) / "cat"
    for _ in range(200):
        place /= "d"
    place.mkdir(parents=True)


def branching(folder: Path) -> None:
    """Two links in each of thirty folders to the next: 2^30 paths."""
    root = photos(folder)
    for number in range(30):
        (folder / f"{number}").mkdir()
        for name in "ab":
            (folder / f"{number}" / name).symlink_to(folder / f"{number + 1}")
    (folder / "30").mkdir()
    (root / "cat" / "next").symlink_to(folder / "0")


def linked(folder: Path) -> None:
    """Classes and images that are links elsewhere: a common way to compose a data set."""
    root = photos(folder)
    (root / "dog").rename(folder / "elsewhere")
    (root / "dog").symlink_to(folder / "elsewhere")
    (root / "cat" / "2.png").symlink_to(folder / "elsewhere" / "0.png")


LOOP = "StageError: '.*': its links to folders may be a loop"
SHAPES: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "composed of links": (linked, None),
    "a link to its own folder": (partial(with_link, name="cat/again", target="../.."), LOOP),
    "a class that is the root": (partial(with_link, name="again", target="."), LOOP),
    "2^30 paths of links": (branching, LOOP),
    "200 folders deep": (deep, "StageError: '.*': folders are nested too deeply"),
    "a pipe among the images": (with_pipe, r"StageError: '.*z\.png' is neither a file nor a folder"),
    "a link to nothing": (partial(with_link, name="cat/z.png", target="gone"), "StageError: .* is neither a file"),
    "a link to a device": (
        partial(with_link, name="cat/z.png", target="/dev/zero"),
        "StageError: .* is neither a file",
    ),
    "a link to itself": (
        partial(with_link, name="cat/z.png", target="z.png"),
        "StageError: .* (can't be read|neither)",
    ),
}
NAMES = {
    "a newline": b"a\nb.png",
    "escapes": b"\x1b]0;PWNED\x07.png",
    "a text direction": "a\u202egnp.png".encode(),
    "no UTF-8": b"\xff\xfe.png",
}

ATTACKS = [
    *(
        Attack(f"image folder, {name}{suffix}", make, load, expect)
        for name, (make, expect) in SHAPES.items()
        for load, suffix in (("image_folder", ""), ("image_folder_key", ", its key"))
    ),
    Attack(
        "image folder, a link to a private file",
        partial(with_link, name="cat/z.png", target="/etc/passwd"),
        "image_folder",
        r"StageError: .*z\.png can't be read as an image: it is none of [A-Z, ]+; remove or replace it$",
    ),
    *(
        Attack(f"image name, {name}", partial(with_name, name=content), "image_folder", "StageError: '.*': rename it")
        for name, content in NAMES.items()
    ),
    Attack(
        "class name, escapes", partial(with_class, name="\x1b[2J\n"), "image_folder", r"StageError: '.*x1b.* has no"
    ),
    Attack(
        "image name, long",
        lambda folder: with_name(folder, b"d" * 250 + b".png") or long_name(folder),
        "image_folder",
        "StageError: .*longer than 512 characters",
    ),
]


def long_name(folder: Path) -> None:
    place = folder / "photos" / "cat" / ("d" * 200) / ("e" * 200) / ("f" * 200)
    place.mkdir(parents=True)
    (place / "a.png").write_bytes(png(9, 9))
