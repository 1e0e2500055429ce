"""Shards in WebDataset's convention, written by the standard library, and what `ptpipe shards` writes."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe_torch import Data, Resizing

from ...datasets import class_names_of, labels_of

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def config(root: Path, **options: object) -> front.ShardsConfig:
    return front.ShardsConfig(
        **{"path": str(root), "image_size": 16, "num_workers": 0, "calibration_size": 4, **options}
    )


def png(colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 24), colour).save(file, "PNG")
    return file.getvalue()


PNGS = {name: png(colour) for name, colour in COLOURS.items()}


def pack(path: Path, members: Mapping[str, bytes], format_: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format_) as tar:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


def labelled(number: int, **more: bytes) -> dict[str, bytes]:
    """The members of one sample, of the colour that its number has."""
    name = list(COLOURS)[number % 3]
    contents = {"png": PNGS[name], "cls": str(number % 3).encode(), **more}
    return {f"pictures/{number:04}.{extension}": content for extension, content in contents.items()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three shards of train, of 10 samples, and one of val and test."""
    folder = tmp_path / "colours"
    numbers = iter(range(1000))
    for name, size in {"train-0": 10, "train-1": 10, "train-2": 10, "val-0": 5, "test-0": 7}.items():
        samples = [labelled(next(numbers)) for _ in range(size)]
        pack(folder / f"{name}.tar", {key: value for sample in samples for key, value in sample.items()})
    return folder


def sizes(data: Data) -> list[int]:
    return [len(split) for split in data.splits.values()]


def check_colours(data: Data) -> None:
    for split in data.splits.values():
        pixels_NHWC = split.inputs["images"].take(np.arange(len(split)))
        for pixels_HWC, label in zip(pixels_NHWC, labels_of(split), strict=True):
            assert (pixels_HWC == list(COLOURS.values())[label]).all()


def test_images_and_classes(root: Path, ctx: Context) -> None:
    data = front.load_shards(config(root), ctx)
    assert (data.info.name, class_names_of(data.info), sizes(data)) == ("colours", ("0", "1", "2"), [30, 5, 7, 4])
    assert data.splits["train"].ids[:2].tolist() == ["train-0.tar/pictures/0000", "train-0.tar/pictures/0001"]
    check_colours(data)
    assert data.loader.shuffle_buffer == 10_000
    assert data.info.inputs["images"].resizing == Resizing(shorter_side=16)


def test_splits_that_have_no_shards_are_drawn(root: Path, ctx: Context) -> None:
    (root / "val-0.tar").unlink()
    (root / "test-0.tar").unlink()
    data = front.load_shards(config(root, val_size=6, train_size=15), ctx)
    assert sizes(data) == [15, 6, 3, 4]
    check_colours(data)


def test_other_names(root: Path, ctx: Context) -> None:
    data = front.load_shards(config(root, train="train-[01].tar", test="train-2.tar", class_names=list(COLOURS)), ctx)
    assert (sizes(data), class_names_of(data.info)) == ([20, 5, 10, 4], tuple(COLOURS))
    with pytest.raises(StageError, match=r"train-2\.tar is a shard of train and of test"):
        front.load_shards(config(root, test="train-2.tar"), ctx)
    with pytest.raises(StageError, match=r"has no shards of train: other-\*\.tar$"):
        front.load_shards(config(root, train="other-*.tar"), ctx)


@pytest.mark.parametrize("class_names", [None, ["red", "green", "blue"]])
def test_classes_in_json(tmp_path: Path, ctx: Context, class_names: list[str] | None) -> None:
    members = {}
    for number in range(12):
        name = list(COLOURS)[number % 3]
        members |= {f"{number}.jpg": PNGS[name], f"{number}.json": json.dumps({"colour": name, "size": 1}).encode()}
    pack(tmp_path / "train-0.tar", members)
    data = front.load_shards(config(tmp_path, label="json.colour", class_names=class_names, val_size=0), ctx)
    assert class_names_of(data.info) == tuple(class_names or COLOURS)
    for split in data.splits.values():
        pixels_NHWC = split.inputs["images"].take(np.arange(len(split)))
        for pixels_HWC, label in zip(pixels_NHWC, labels_of(split), strict=True):
            assert (pixels_HWC == COLOURS[class_names_of(data.info)[label]]).all()


def test_classes_whose_names_are_digits(tmp_path: Path, ctx: Context) -> None:
    """`7` is a name among names, and among class_names."""
    members = {}
    for number, label in enumerate(["7", "cat", "3", "7"]):
        members |= {f"{number}.png": PNGS["red"], f"{number}.cls": label.encode()}
    pack(tmp_path / "train-0.tar", members)
    pack(tmp_path / "test-0.tar", {"9.png": PNGS["red"], "9.cls": b"3"})
    for names, labels in ((None, [1, 2, 0, 1]), (["cat", "7", "3"], [1, 0, 2, 1])):
        data = front.load_shards(config(tmp_path, val_size=0, class_names=names), ctx)
        assert class_names_of(data.info) == tuple(names or ["3", "7", "cat"])
        assert labels_of(data.splits["train"]).tolist() == labels


@pytest.mark.parametrize("label", [b"-1", b"3.0", b"none"])
def test_a_few_names_among_numbers_are_mistakes(tmp_path: Path, ctx: Context, label: bytes) -> None:
    members = {name: content for number in range(39) for name, content in labelled(number).items()}
    pack(tmp_path / "train-0.tar", members | named(png=PNGS["red"], cls=label))
    message = f"train-0.tar/it has the class '{label.decode()}', and nearly all others a number: mend it, or name all"
    with pytest.raises(StageError, match=message):
        front.load_shards(config(tmp_path), ctx)
    names = ["0", "1", "2", label.decode()]
    assert class_names_of(front.load_shards(config(tmp_path, class_names=names), ctx).info) == tuple(names)


def test_classes_without_samples_are_reported(tmp_path: Path, ctx: Context, events) -> None:
    pack(tmp_path / "train-0.tar", {**labelled(0), **labelled(2), **labelled(5)})
    pack(tmp_path / "test-0.tar", labelled(3))
    front.load_shards(config(tmp_path, val_size=0), ctx)
    assert events.notices == ["train has nothing of 1 of 3 classes: 1"]
    pack(tmp_path / "train-0.tar", {**labelled(0), **labelled(3)})
    with pytest.raises(StageError, match=f"{tmp_path} has samples of one class, 0: a classification needs two"):
        front.load_shards(config(tmp_path, val_size=0), ctx)


def train_with(tmp_path: Path, sample: Mapping[str, bytes]) -> Path:
    pack(tmp_path / "train-0.tar", {**labelled(0), **sample, **labelled(2)})
    pack(tmp_path / "test-0.tar", labelled(1))
    return tmp_path


def named(**members: bytes) -> dict[str, bytes]:
    return {f"it.{extension}": content for extension, content in members.items()}


FAULTS: dict[str, tuple[dict[str, bytes], dict[str, object], str]] = {
    "no class": (named(png=b""), {}, r"sample it has no \.cls, where its class is \(option `label`\); it has \.png"),
    "no image": (named(cls=b"0", txt=b""), {}, r"sample it has 0 images .* it has \.cls, \.txt"),
    "two images": (named(cls=b"0", png=b"", jpg=b""), {}, "sample it has 2 images"),
    "an unknown class": (
        named(png=b"", cls=b"bleu"),
        {"class_names": list(COLOURS)},
        "train-0.tar/it has the class 'bleu', which is none .did you mean 'blue'",
    ),
    "a class too many": (named(png=b"", cls=b"3"), {"class_names": list(COLOURS)}, "train-0.tar/it has the class '3'"),
    "a class of a billion": (named(png=b"", cls=b"1000000000"), {}, "a sample has the class 1000000000; see class_nam"),
    "a class of bytes": (named(png=b"", cls=b"\xff"), {}, "sample it: its class is no text"),
    "an empty class": (named(png=b"", cls=b" \n"), {}, "sample it: its class is '', neither a number nor a name"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_is_none(tmp_path: Path, ctx: Context, fault: str) -> None:
    sample, options, message = FAULTS[fault]
    with pytest.raises(StageError, match=message):
        front.load_shards(config(train_with(tmp_path, sample), **options), ctx)


JSON_FAULTS: dict[str, tuple[bytes, str]] = {
    "nested": (b"[" * 100_000, "its json has no field label"),
    "no object": (b"[1]", "its json has no field label"),
    "another field": (b'{"Label": 1}', "its json has no field label"),
    "a list": (b'{"label": [1]}', r"its class is '\[1\]', neither a number nor a name"),
    "a truth": (b'{"label": true}', "its class is 'True'"),
    "a fraction": (b'{"label": 1.5}', "its class is '1.5'"),
    "a negative number": (
        b'{"label": -1}',
        "its class is -1; classes are numbered 0, 1, 2",
    ),
}


@pytest.mark.parametrize("fault", JSON_FAULTS)
def test_json_without_a_class(tmp_path: Path, ctx: Context, fault: str) -> None:
    content, message = JSON_FAULTS[fault]
    pack(tmp_path / "train-0.tar", {"it.png": PNGS["red"], "it.json": content})
    with pytest.raises(StageError, match=rf"train-0\.tar: sample it: {message}"):
        front.load_shards(config(tmp_path, label="json.label"), ctx)


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_other_programs_pack(tmp_path: Path, ctx: Context, format_: int) -> None:
    """Long names, folders, links, names without an extension, hidden files, names that are not ASCII."""
    long = "d" * 80 + "/" + "e" * 60
    with tarfile.open(tmp_path / "train-0.tar", "w", format=format_) as tar:
        folder = tarfile.TarInfo("d" * 80)
        folder.type = tarfile.DIRTYPE
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(folder)
        tar.addfile(link)
        for name, content in {
            "README": b"text",
            ".hidden.png": b"x",
            f"{long}.png": PNGS["red"],
            f"{long}.cls": b"1",
            "../../größe.1.png": b"",
            "../../größe.PNG": PNGS["blue"],
            "../../größe.cls": b"0",
        }.items():
            if name.endswith(".1.png"):
                continue
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    pack(tmp_path / "test-0.tar", labelled(0))
    data = front.load_shards(config(tmp_path, val_size=0, calibration_size=0), ctx)
    assert data.splits["train"].ids.tolist() == [f"train-0.tar/{long}", "train-0.tar/../../größe"]
    pixels = data.splits["train"].inputs["images"].take(np.arange(2))
    assert (pixels[0] == COLOURS["red"]).all() and (pixels[1] == COLOURS["blue"]).all()
    assert {path.name for path in tmp_path.iterdir()} == {"train-0.tar", "test-0.tar", "scratch"}


@pytest.mark.parametrize("size", [0, 100, 512, 700, 1024, 1300, 2048, 2500, 3072, 3500, 4096, 5000])
def test_a_truncated_shard_is_named_with_its_sample(tmp_path: Path, ctx: Context, size: int) -> None:
    path = pack(tmp_path / "train-0.tar", {f"{key}.{kind}": b"x" * 600 for key in "ab" for kind in ("png", "cls")})
    content = path.read_bytes()
    path.write_bytes(content[:size])
    # Headers at 0, 1536, 3072 and 4608; contents of 600 bytes behind them.
    member, offset = divmod(size, 1536)
    key, kind = "aabb"[member], ("png", "cls")[member % 2]
    if offset < 512:
        where = f"after the sample {'aabb'[member - 1]}" if member else "at its beginning"
        message = rf"train-0\.tar is truncated {where}: it has no end-of-archive marker at byte {member * 1536:,}"
    elif offset < 512 + 600:
        end = member * 1536 + 512 + 600
        message = rf"train-0\.tar is truncated within the sample {key}, its \.{kind}: that ends at byte {end:,}, "
    else:
        message = rf"train-0\.tar is truncated after the sample {key}"
    with pytest.raises(StageError, match=message):
        front.load_shards(config(tmp_path), ctx)


@pytest.mark.parametrize(
    ("name", "compress"), [("gzip", gzip.compress), ("bzip2", bz2.compress), ("xz", lzma.compress)]
)
def test_compressed_shards_are_refused(
    tmp_path: Path, ctx: Context, name: str, compress: Callable[[bytes], bytes]
) -> None:
    path = pack(tmp_path / "train-0.tar", labelled(0))
    path.write_bytes(compress(path.read_bytes()))
    with pytest.raises(StageError, match=rf"train-0\.tar is compressed \({name}\).* decompress it"):
        front.load_shards(config(tmp_path), ctx)
    path.rename(tmp_path / "train-0.tar.gz")
    with pytest.raises(StageError, match=r"no shards of train: train-\*\.tar; train-0\.tar\.gz is compressed"):
        front.load_shards(config(tmp_path), ctx)


def test_a_change_of_a_shard_is_another_key(root: Path) -> None:
    stage = front.load_shards
    before = stage.fingerprint(config(root))
    assert stage.fingerprint(config(root)) == before
    status = (root / "train-1.tar").stat()
    content = bytearray((root / "train-1.tar").read_bytes())
    content[1000] ^= 1
    (root / "train-1.tar").write_bytes(content)
    os.utime(root / "train-1.tar", ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = stage.fingerprint(config(root))
    assert changed != before
    (root / "data.json").write_text("{}")
    assert stage.fingerprint(config(root)) != changed


def test_no_samples(tmp_path: Path, ctx: Context) -> None:
    pack(tmp_path / "train-0.tar", {"README": b"text"})
    with pytest.raises(StageError, match=r"train-0\.tar: the shards of train have no samples"):
        front.load_shards(config(tmp_path), ctx)
    (tmp_path / "train-0.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(StageError, match=re.escape("train-0.tar is damaged, or no tar file: at byte 0")):
        front.load_shards(config(tmp_path), ctx)


def test_a_sample_twice(tmp_path: Path, ctx: Context) -> None:
    pack(tmp_path / "train-0.tar", {**labelled(0), **labelled(1)})
    with tarfile.open(tmp_path / "train-0.tar", "a") as tar:
        for name, content in labelled(0).items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    with pytest.raises(StageError, match="3 samples but only 2 different ids"):
        front.load_shards(config(tmp_path, val_size=0, test_size=0), ctx)
