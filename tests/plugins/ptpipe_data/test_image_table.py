from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import parquet

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe_torch import ArrayColumn, Data, MultiLabel, Regression, Resizing

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
NAMES = ("image", "colour", "is_red", "is_warm", "brightness", "person")


def rows(numbers: Iterable[int]) -> list[tuple[str, ...]]:
    """Rows of a table; the person is on three images."""
    found = []
    for number in numbers:
        name = sorted(COLOURS)[number % 3]
        is_red = str(int(name == "red"))
        found.append((f"shots/{number:03d}.png", name, is_red, is_red, str(number / 2), str(number // 3)))
    return found


def write_csv(path: Path, table: Sequence[Sequence[str]], names: Sequence[str] = NAMES) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, *table])
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "shots").mkdir(parents=True)
    for path, colour, *_ in rows(range(60)):
        Image.new("RGB", (20, 24), COLOURS[colour]).save(folder / path)
    return write_csv(folder / "train.csv", rows(range(60)))


def config(path: Path, **options: object) -> front.ImageTableConfig:
    given = {"path": str(path), "image_size": 16, "num_workers": 0, "calibration_size": 4, "val_size": 6}
    return front.ImageTableConfig(**{**given, "task": "classification", "targets": ["colour"], **options})


def pixels_of(data: Data, split: str) -> np.ndarray:
    return data.splits[split].inputs["images"].values()


def test_classes_in_a_column(table: Path, ctx: Context) -> None:
    data = front.load_image_table(config(table, test_size=12), ctx)
    assert data.info.name == "photos" and data.info.task.class_names == ("blue", "green", "red")
    assert data.info.columns["images"].resizing == Resizing(shorter_side=16)
    assert [len(split) for split in data.splits.values()] == [42, 6, 12, 4]
    colour_of = {path: colour for path, colour, *_ in rows(range(60))}
    for name, split in data.splits.items():
        for id_, label, pixels_HWC in zip(
            split.ids, split.targets["labels"].values(), pixels_of(data, name), strict=True
        ):
            assert colour_of[id_] == data.info.task.class_names[label]
            assert (pixels_HWC == COLOURS[colour_of[id_]]).all()


def test_labels_and_numbers(table: Path, ctx: Context) -> None:
    data = front.load_image_table(config(table, task="multi_label", targets=["is_red", "is_warm"]), ctx)
    assert isinstance(data.info.task, MultiLabel) and data.info.task.label_names == ("is_red", "is_warm")
    (labels,) = data.splits["test"].targets.values()
    is_red_N = (pixels_of(data, "test")[:, 0, 0] == COLOURS["red"]).all(axis=1)
    assert (labels.values() == np.stack([is_red_N, is_red_N], axis=1)).all() and is_red_N.any()

    data = front.load_image_table(config(table, task="regression", targets=["brightness"], loss="mae"), ctx)
    assert isinstance(data.info.task, Regression)
    (values,) = data.splits["test"].targets.values()
    assert values.values()[:, 0].tolist() == [int(id_[-7:-4]) / 2 for id_ in data.splits["test"].ids]


@pytest.mark.parametrize("in_memory", [False, True])
def test_pixels_are_those_of_an_image_folder(tmp_path: Path, table: Path, ctx: Context, *, in_memory: bool) -> None:
    for name in ("a", "b"):
        (tmp_path / "folder" / name).mkdir(parents=True)
    pixels_HW3 = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    for number in range(20):
        Image.fromarray(np.roll(pixels_HW3, number)).save(tmp_path / "folder" / "ab"[number % 2] / f"{number}.jpg")
    paths = sorted(path.relative_to(tmp_path / "folder") for path in (tmp_path / "folder").rglob("*.jpg"))
    write_csv(tmp_path / "names.csv", [(path.as_posix(), path.parent.name) for path in paths], ("image", "kind"))
    shared = {"val_size": 4, "test_size": 4, "image_size": 24, "resize": 30, "normalize": "measured", "num_workers": 0}
    folder = front.load_image_folder(front.ImageFolderConfig(path=str(tmp_path / "folder"), **shared), ctx)
    options = {**shared, "folder": str(tmp_path / "folder"), "targets": ["kind"], "in_memory": in_memory}
    named = front.load_image_table(config(tmp_path / "names.csv", **options), ctx)
    assert named.info.columns == folder.info.columns
    for name, split in folder.splits.items():
        if name == "calibration":
            continue  # of another size
        assert named.splits[name].ids.tolist() == split.ids.tolist()
        assert (pixels_of(named, name) == pixels_of(folder, name)).all()
        assert (named.splits[name].targets["labels"].values() == split.targets["labels"].values()).all()


def test_files_of_their_own_and_groups(table: Path, ctx: Context) -> None:
    train, test = write_csv(table, rows(range(45))), write_csv(table.with_name("test.csv"), rows(range(45, 60)))
    data = front.load_image_table(config(train, test_path=str(test), val_size=9, group="person"), ctx)
    assert data.splits["test"].ids.tolist() == [path for path, *_ in rows(range(45, 60))]
    person_of = {row[0]: row[-1] for row in rows(range(60))}
    persons = {name: {person_of[id_] for id_ in data.splits[name].ids} for name in ("train", "val")}
    assert len(data.splits["val"]) == 9 and not persons["train"] & persons["val"]


@pytest.mark.parametrize(
    ("spelling", "options"),
    [
        (lambda path, folder: path.replace("/", "\\"), {}),
        (lambda path, folder: f"./{path}", {}),
        (lambda path, folder: str(folder / path), {}),
        (lambda path, folder: path.removesuffix(".png"), {"suffix": ".png"}),
        (lambda path, folder: path.removeprefix("shots/"), {"folder": "shots"}),
        (lambda path, folder: path[-7:-4], {"folder": "shots", "suffix": ".png"}),  # 007 is text, no number
    ],
)
def test_spellings_of_paths(table: Path, ctx: Context, spelling: Callable, options: dict[str, str]) -> None:
    write_csv(table, [(spelling(path, table.parent), *others) for path, *others in rows(range(60))])
    if "folder" in options:
        options = {**options, "folder": str(table.parent / options["folder"])}
    data = front.load_image_table(config(table, **options), ctx)
    ids = {id_ for name in ("train", "val", "test") for id_ in data.splits[name].ids}
    assert {Path(id_).name for id_ in ids} == {f"{number:03d}.png" for number in range(60)}


def test_numbers_in_a_json_file(table: Path, ctx: Context) -> None:
    for path in (table.parent / "shots").iterdir():
        path.rename(path.with_name(f"{int(path.stem)}.png"))
    lines = (f'{{"image": {int(path[-7:-4])}, "colour": "{colour}"}}' for path, colour, *_ in rows(range(60)))
    file = table.with_name("train.jsonl")
    file.write_text("\n".join(lines))
    data = front.load_image_table(config(file, folder=str(table.parent / "shots"), suffix=".png"), ctx)
    assert {id_ for split in data.splits.values() for id_ in split.ids} == {f"{number}.png" for number in range(60)}


@pytest.mark.parametrize("written", ["{folder}/shots/{name}", "../photos/shots/{name}"])
def test_folders_through_links(table: Path, ctx: Context, written: str) -> None:
    link = table.parent.parent / "link"
    link.symlink_to(table.parent)
    named = [written.format(folder=table.parent, name=Path(path).name) for path, *_ in rows(range(60))]
    write_csv(table, [(path, *others) for path, (_, *others) in zip(named, rows(range(60)), strict=True)])
    assert len(front.load_image_table(config(table, folder=str(link)), ctx).splits["train"]) == 42


def test_parquet(table: Path, ctx: Context) -> None:
    columns = zip(*rows(range(60)), strict=True)
    file = table.with_name("train.parquet")
    parquet.write_table(pa.table({name: list(of) for name, of in zip(NAMES, columns, strict=True)}), file)
    assert len(front.load_image_table(config(file), ctx).splits["train"]) == 42


def changed(row: int, **values: str) -> Callable[[Path], object]:
    def change(table: Path) -> None:
        changed_rows = [dict(zip(NAMES, of, strict=True)) for of in rows(range(60))]
        changed_rows[row] |= values
        write_csv(table, [[*of.values()] for of in changed_rows])

    return change


def without_suffix(table: Path) -> None:
    write_csv(table, [(path.removesuffix(".png"), *others) for path, *others in rows(range(60))])


def without_folder(table: Path) -> None:
    write_csv(table, [(path.removeprefix("shots/"), *others) for path, *others in rows(range(60))])


def hide(table: Path) -> None:
    (table.parent / "shots" / "003.png").rename(table.parent / "shots" / ".003.png")
    changed(3, image="shots/.003.png")(table)


def as_gif(table: Path) -> None:
    (table.parent / "shots" / "003.png").rename(table.parent / "shots" / "003.gif")
    changed(3, image="shots/003.gif")(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(2, image="shots/x.png"), r"train\.csv, row 3, column 'image': 'shots/x\.png', which is no image file"),
        (changed(2, image="../../x.png"), r"row 3.*which is no image file in .*photos$"),
        (changed(2, image=""), r"row 3, column 'image': '?.*(missing value|no image file)"),
        (changed(7, image="shots/002.png"), r"row 8.*'shots/002\.png', the image of .*train\.csv, row 3, too"),
        (without_suffix, r"row 1.*\(60 of 60 rows have none\); there is shots/000\.png: set `suffix` to \.png"),
        (without_folder, r"row 1.*; there is shots/000\.png: set `folder` to .*photos/shots$"),
        (hide, r"row 4.*which is no image file in .*photos: it is hidden"),
        (as_gif, r"row 4.*an image of a format that is not read: convert it to JPEG or PNG"),
        (changed(2, colour=""), r"row 3, column 'colour'.*missing"),
        (lambda table: (table.parent / "shots" / "004.png").write_bytes(b""), r"004\.png is empty; remove or replace"),
        (lambda table: os.truncate(table, 0), r"train\.csv"),
    ],
)
def test_what_is_wrong_is_named(table: Path, ctx: Context, change: Callable, message: str) -> None:
    change(table)
    with pytest.raises(StageError, match=message):
        front.load_image_table(config(table), ctx)


def test_an_image_of_two_files(table: Path, ctx: Context) -> None:
    test = write_csv(table.with_name("test.csv"), rows([3]))
    with pytest.raises(StageError, match=r"test\.csv, row 1.*the image of .*train\.csv, row 4, too"):
        front.load_image_table(config(table, test_path=str(test)), ctx)


def test_unknown_columns_and_folders(table: Path, ctx: Context, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"no column 'picture'"):
        front.load_image_table(config(table, image="picture"), ctx)
    with pytest.raises(StageError, match=re.escape(f"{tmp_path / 'nowhere'} does not exist")):
        front.load_image_table.fingerprint(config(table, folder=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["colour", "is_red"]}, "a classification has one target"),
        ({"targets": ["image"]}, "'image' is the column of images, and among the targets"),
        ({"task": "multi_label", "targets": ["is_red", "is_red"]}, "'is_red' is named twice"),
        ({"task": "regression", "targets": ["brightness"], "classes": {"weights": "balanced"}}, "classes is an option"),
        ({"suffix": "jpg"}, "suffix"),
    ],
)
def test_options_that_do_not_fit(table: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(table, **options)


def test_key(table: Path) -> None:
    before = front.load_image_table.fingerprint(config(table))
    assert before == front.load_image_table.fingerprint(config(table, folder=str(table.parent)))
    Image.new("RGB", (20, 24), (1, 2, 3)).save(table.parent / "shots" / "000.png")
    after = front.load_image_table.fingerprint(config(table))
    assert after != before
    changed(2, colour="blue")(table)
    assert front.load_image_table.fingerprint(config(table)) != after


def test_copies_of_images_are_reported(table: Path, ctx: Context, events: Any) -> None:
    front.load_image_table(config(table, test_size=20), ctx)
    assert any("samples are also in train" in notice for notice in events.notices)


def test_decoded_images_are_arrays(table: Path, ctx: Context) -> None:
    data = front.load_image_table(config(table, in_memory=True), ctx)
    assert isinstance(data.splits["train"].inputs["images"].source, ArrayColumn)
