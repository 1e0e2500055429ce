"""What `ptpipe shards` writes of any data set is that data set when it is read back."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import ptpipe_data as front
from ptpipe import Context, StageError, UsageError
from ptpipe_data import shard_writer
from ptpipe_data.shard_writer import ShardSize, write_shards
from ptpipe_data.shards_command import shards as command
from ptpipe_torch import (
    ArrayColumn,
    ArrayInfo,
    Classification,
    Data,
    DatasetInfo,
    ImageFileColumn,
    ImageInfo,
    RaggedColumn,
    Segmentation,
    Split,
    TokensInfo,
)
from ptpipe_torch.data.column import SubsetColumn, flatten
from ptpipe_torch.data.shards import TarColumn

NUM = 40
RNG = np.random.default_rng(3)
MANY = ShardSize(num_samples=7)


def every(ids: list[str], inputs: dict[str, Any], targets: dict[str, Any]) -> dict[str, Split]:
    """30 samples of train, the others of test."""
    split = Split(np.array(ids, dtype=np.str_), inputs, targets)
    return {"train": split.subset(np.arange(30)), "test": split.subset(np.arange(30, NUM))}


def images_of_files(folder: Path) -> Data:
    names = [f"größe {number}/a.b.{('png', 'JPG')[number % 2]}" for number in range(NUM)]
    for name in names:
        (folder / name).parent.mkdir(parents=True)
        Image.fromarray(RNG.integers(0, 256, (12, 14, 3), dtype=np.uint8)).save(folder / name)
    images = ImageFileColumn(folder, np.array([name.encode() for name in names]), 8, 9, 1)
    image = ImageInfo(shape_CHW=(1, 8, 8), mean=(0.5,), std=(0.3,))
    splits = every(names, {"images": images}, {"labels": ArrayColumn(np.arange(NUM) % 2)})
    return Data(DatasetInfo("files", {"images": image}, Classification(class_names=("a", "b"))), splits)


def stretched(folder: Path) -> Data:
    data = images_of_files(folder)
    train = data.splits["train"].inputs["images"]
    assert isinstance(train, SubsetColumn) and isinstance(train.source, ImageFileColumn)
    column = replace(train.source, size=(6, 10), resize=None)
    ids = [id_ for split in ("train", "test") for id_ in data.splits[split].ids.tolist()]
    info = replace(data.info, inputs={"images": ImageInfo(shape_CHW=(1, 6, 10), mean=(0.5,), std=(0.3,))})
    return Data(info, every(ids, {"images": column}, {"labels": ArrayColumn(np.arange(NUM) % 2)}))


def masks(_: Path) -> Data:
    image = ImageInfo(shape_CHW=(3, 6, 5), mean=(0.5,) * 3, std=(0.3,) * 3)
    images = ArrayColumn(RNG.integers(0, 256, (NUM, 6, 5, 3), dtype=np.uint8))
    targets = {"masks": ArrayColumn(RNG.integers(0, 3, (NUM, 6, 5), dtype=np.uint8))}
    task = Segmentation(class_names=("a", "b", "c"), shape_HW=(6, 5))
    splits = every([f"/x//{number}" for number in range(NUM)], {"images": images}, targets)
    return Data(DatasetInfo("masks", {"images": image}, task), splits)


def texts(_: Path) -> Data:
    lengths_N = RNG.integers(1, 40, NUM)
    tokens = RaggedColumn(RNG.integers(1, 50, lengths_N.sum()), np.cumsum([0, *lengths_N]), 0)
    numbers = ArrayColumn(RNG.normal(size=(NUM, 20)).astype(np.float32))
    inputs = {
        "tokens": TokensInfo(vocabulary_size=50, max_length=64),
        "numbers": ArrayInfo(dtype="float32", shape=(20,)),
    }
    task = Classification(class_names=("ham", "spam"), positive_class="spam")
    splits = every(
        [str(number) for number in range(NUM)],
        {"tokens": tokens, "numbers": numbers},
        {"labels": ArrayColumn(np.arange(NUM) % 2)},
    )
    return Data(DatasetInfo("texts", inputs, task), splits, assets={"tokenizer.json": b"{}"})


KINDS: dict[str, Callable[[Path], Data]] = {
    "images of files": images_of_files,
    "stretched": stretched,
    "masks": masks,
    "texts": texts,
}


def config(root: Path, **options: Any) -> front.ShardsConfig:
    return front.ShardsConfig(**{"path": str(root), "num_workers": 0, "calibration_size": 4, **options})


def by_id(split: Split) -> dict[str, list[bytes]]:
    return {
        id_: [column.take(np.array([row])).tobytes() for column in split.columns.values()]
        for row, id_ in enumerate(split.ids.tolist())
    }


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_data_set(tmp_path: Path, ctx: Context, kind: str) -> None:
    data = KINDS[kind](tmp_path / "source")
    written = write_shards(data, tmp_path / "out", MANY, seed=5)
    assert [(of.split, of.num_samples, of.num_shards) for of in written] == [
        ("train", 30, 5), ("val", 0, 0), ("test", 10, 2),
    ]  # fmt: skip
    read = front.load_shards(config(tmp_path / "out"), ctx)
    assert read.info == data.info and read.assets == data.assets
    for name in ("train", "val", "test"):
        assert by_id(read.splits[name]) == by_id(data.splits[name]), name
    assert read.splits["train"].ids.tolist() != data.splits["train"].ids.tolist(), "shuffled"
    assert read.splits["test"].ids.tolist() == data.splits["test"].ids.tolist()
    source, _ = flatten(next(iter(read.splits["train"].inputs.values())))
    assert isinstance(source, TarColumn)
    (tmp_path / "stored").mkdir()
    read.save(tmp_path / "stored")
    assert by_id(Data.load(tmp_path / "stored").splits["train"]) == by_id(data.splits["train"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_data_set_is_the_same_bytes(tmp_path: Path, ctx: Context, kind: str) -> None:
    data = KINDS[kind](tmp_path / "source")
    for name in ("a", "b"):
        write_shards(data, tmp_path / name, MANY, seed=5)
    read = front.load_shards(config(tmp_path / "a"), ctx)
    assert write_shards(read, tmp_path / "c", MANY, seed=5)
    for path in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes(), path.name
        assert (tmp_path / "c" / path.name).exists()


def test_image_files_are_copied_as_they_are(tmp_path: Path) -> None:
    data = images_of_files(tmp_path / "source")
    write_shards(data, tmp_path / "out", ShardSize(), seed=5)
    with tarfile.open(tmp_path / "out" / "test-000000.tar") as tar:
        members = tar.getmembers()
        contents = {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(0, 0, "")}
    assert len(members) == 20 and not any(".." in name or name.startswith("/") for name in contents)
    for number in range(30, NUM):
        name = f"größe {number}/a.b.{('png', 'JPG')[number % 2]}"
        (content,) = [content for at, content in contents.items() if f"{number}/a%2Eb" in at and "images" in at]
        assert content == (tmp_path / "source" / name).read_bytes()


@pytest.mark.parametrize("id_", ["a.b", "%2E", "a b/日\n", "日" * 900, "/", "..", "x" * 500 + "." * 100])
def test_any_id_is_read_back(tmp_path: Path, ctx: Context, id_: str) -> None:
    data = masks(tmp_path)
    test = data.splits["test"]
    split = Split(np.array([id_, *test.ids[1:]]), test.inputs, test.targets)
    write_shards(Data(data.info, {"train": split}), tmp_path / "out", MANY, seed=5)
    assert id_ in front.load_shards(config(tmp_path / "out"), ctx).splits["train"].ids.tolist()


def test_an_id_that_is_too_long(tmp_path: Path) -> None:
    data = masks(tmp_path)
    test = data.splits["test"]
    split = Split(np.array(["." * 400, *test.ids[1:]]), test.inputs, test.targets)
    with pytest.raises(StageError, match=r"is longer than 1024 characters: shorten the ids"):
        write_shards(Data(data.info, {"train": split}), tmp_path / "out", MANY, seed=5)


def test_shards_of_a_size(tmp_path: Path) -> None:
    write_shards(masks(tmp_path), tmp_path / "out", ShardSize(num_bytes=10_000), seed=5)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("train-*.tar")]
    assert len(sizes) == 8 and max(sizes) <= 20_480, "4 samples of 2,560 bytes each"


def test_batches_by_length(tmp_path: Path, ctx: Context) -> None:
    write_shards(texts(tmp_path), tmp_path / "out", MANY, seed=5)
    data = front.load_shards(config(tmp_path / "out", batch_by_length=True, batch_size=5, shuffle_buffer=10), ctx)
    order_N = data.epoch_order("train", 7, 0, 5)
    lengths_N = data.splits["train"].inputs["tokens"].lengths
    assert sorted(order_N) == list(range(30)) and lengths_N is not None
    assert np.ptp(lengths_N[order_N].reshape(6, 5), axis=1).sum() < 60


class Broken(ArrayColumn):
    def take(self, indices_B: np.ndarray) -> np.ndarray:
        if indices_B.max() > 20:
            raise KeyboardInterrupt
        return super().take(indices_B)


@pytest.mark.parametrize("batch", [1, 64])
def test_interrupted_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(shard_writer, "_BATCH", batch)
    data = masks(tmp_path)
    train = data.splits["train"]
    broken = Split(train.ids, {"images": Broken(train.inputs["images"].values())}, train.targets)
    data = Data(data.info, {"train": broken})
    with pytest.raises(KeyboardInterrupt):
        write_shards(data, tmp_path / "out", MANY, seed=5)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    """By the kernel's own limit on the size of a file, which fails a write as a full disk does."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    data = images_of_files(tmp_path / "images")
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(
            StageError, match=rf"^{re.escape(str(tmp_path / 'shards'))} can't be written: File too large$"
        ):
            write_shards(data, tmp_path / "shards", ShardSize(), 7)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(StageError, match="out exists already"):
        write_shards(masks(tmp_path), tmp_path / "out", MANY, seed=5)


def damage_description(root: Path, **facts: Any) -> None:
    path = root / "data.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (lambda root: (root / "data.json").write_text("["), "data.json describes no shards: "),
    "nested": (lambda root: (root / "data.json").write_text("[" * 100_000), "data.json describes no shards: "),
    "another version": (lambda root: damage_description(root, version=2), "data.json describes no shards: .*version"),
    "no columns": (lambda root: damage_description(root, columns={}), "data.json describes no shards: its columns are"),
    "a pickle": (
        lambda root: damage_description(root, columns={"images": {"kind": "pickle"}}),
        "data.json describes no shards: ",
    ),
    "a missing shard": (
        lambda root: (root / "train-000003.tar").unlink(),
        "4 shards of train have 23 samples; data.json says 30: some are missing",
    ),
    "an asset elsewhere": (
        lambda root: damage_description(root, assets={"../x": "0" * 64}),
        "data.json describes no shards: ",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder(tmp_path: Path, ctx: Context, damage: str) -> None:
    alter, message = DAMAGES[damage]
    write_shards(masks(tmp_path), tmp_path / "out", MANY, seed=5)
    alter(tmp_path / "out")
    with pytest.raises(StageError, match=message):
        front.load_shards(config(tmp_path / "out"), ctx)


def test_assets_are_verified(tmp_path: Path, ctx: Context) -> None:
    write_shards(texts(tmp_path), tmp_path / "out", MANY, seed=5)
    (tmp_path / "out" / "tokenizer.json").write_bytes(b"[]")
    with pytest.raises(StageError, match=r"tokenizer\.json is not what was written with these shards"):
        front.load_shards(config(tmp_path / "out"), ctx)


def test_an_array_of_another_shape(tmp_path: Path, ctx: Context) -> None:
    """The size of its member differs from what data.json says."""
    write_shards(masks(tmp_path), tmp_path / "out", MANY, seed=5)
    path = tmp_path / "out" / "test-000000.tar"
    with tarfile.open(path) as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    with tarfile.open(path, "w") as tar:
        for name, content in contents.items():
            content = content + b"x" if "images" in name else content
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    with pytest.raises(StageError, match=re.escape(f"{path}: sample %2Fx%2F%2F30 ")):
        front.load_shards(config(tmp_path / "out"), ctx)


def test_nothing_is_drawn_from_described_shards(tmp_path: Path, ctx: Context) -> None:
    data = masks(tmp_path)
    alone = Data(data.info, {"train": data.splits["train"]}, data.loader)
    write_shards(alone, tmp_path / "out", MANY, seed=5)
    for name in ("val_size", "test_size"):
        with pytest.raises(StageError, match=f"^{name} was decided when these shards were written: .*data.json has it"):
            front.load_shards(config(tmp_path / "out", **{name: 0.2}), ctx)
    read = front.load_shards(config(tmp_path / "out", val_size=0, test_size=0), ctx)
    assert [len(read.splits[name]) for name in ("train", "val", "test")] == [len(data.splits["train"]), 0, 0]


@pytest.mark.parametrize("option", [{"image_size": 32}, {"class_names": ["a"]}, {"label": "json.x"}])
def test_facts_come_from_the_description(tmp_path: Path, ctx: Context, option: dict[str, Any]) -> None:
    write_shards(masks(tmp_path), tmp_path / "out", MANY, seed=5)
    (name,) = option
    with pytest.raises(StageError, match=f"^{name} was decided when these shards were written: .*data.json has it"):
        front.load_shards(config(tmp_path / "out", **option), ctx)


MANIFEST = """
version: 1
name: writing
seed: 7
stages:
  digits: {uses: data.digits, with: {test_size: 50, train_size: 100}}
  net: {uses: model.small_cnn}
"""


class TestCommand:
    @pytest.fixture(autouse=True)
    def manifest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "m.yaml").write_text(MANIFEST, encoding="utf-8")

    @staticmethod
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(command, ["m.yaml", *arguments], standalone_mode=False)

    def test_it_writes_a_stages_data(self, tmp_path: Path) -> None:
        result = self.run("digits", "--output", "out", "--samples-per-shard", "40", "--json")
        assert (result.exception, result.return_value) == (None, 0)
        assert '"num_shards": 3' in result.stdout
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert names[:2] == ["data.json", "test-000000.tar"] and "train-000002.tar" in names
        again = self.run("digits", "--output", "deeper/out", "--shard-size-mb", "0.05")
        assert again.exception is None
        assert len(list((tmp_path / "deeper" / "out").glob("train-*.tar"))) > 3

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("digts", "--output", "out"), "m.yaml has no stage 'digts' .did you mean 'digits'"),
            (("net", "--output", "out"), "net .model.small_cnn. makes no data set"),
            (("digits", "--output", "."), "--output .: it exists already"),
        ],
    )
    def test_mistakes(self, arguments: tuple[str, ...], message: str) -> None:
        result = self.run(*arguments)
        assert isinstance(result.exception, UsageError) and re.search(message, str(result.exception))
        assert not os.path.lexists("out") and not os.path.lexists("artifacts")

    def test_a_stage_that_fails(self) -> None:
        result = self.run("digits", "--output", "out", "-s", "digits.val_size=5000")
        assert (result.exception, result.return_value) == (None, 1)
        assert not os.path.lexists("out")
