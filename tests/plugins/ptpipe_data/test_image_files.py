from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ptpipe import Context, StageError
from ptpipe_data import ImageFolderConfig, load_image_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (20, 20), (number, 0, 0)).save(tmp_path / "pets" / name / f"{number}.png")
    return tmp_path / "pets"


def config(folder: Path, *, unlabeled: bool = False) -> ImageFolderConfig:
    return ImageFolderConfig(
        path=str(folder), image_size=16, num_workers=0, val_size=0, test_size=2, unlabeled=unlabeled
    )


def test_formats_that_are_not_read_are_counted(folder: Path, ctx: Context, events) -> None:
    image = Image.new("RGB", (20, 20))
    image.save(folder / "cat" / "8.jfif", format="JPEG")
    for name in ("8.gif", "9.GIF"):
        image.save(folder / "dog" / name, format="GIF")
    (folder / "dog" / "10.heic").write_bytes(b"x")
    (folder / "dog" / "notes.txt").write_text("x")
    data = load_image_folder(config(folder), ctx)
    assert len(data.splits["train"]) == 15, "with the JPEG called .jfif"
    assert events.notices == [f"{folder}: files that are not read: 2 .gif, 1 .heic; convert them to JPEG or PNG"]


def test_empty_and_damaged_files_are_named_together(folder: Path, ctx: Context) -> None:
    for name in ("cat/0", "cat/1", "cat/2", "dog/0", "dog/1", "dog/2"):
        (folder / f"{name}.png").write_bytes(b"" if name.startswith("cat") else b"no image")
    with pytest.raises(StageError) as caught:
        load_image_folder(config(folder), ctx)
    assert str(caught.value) == (
        f"{folder}/cat/0.png is empty. 6 files are no images: also cat/1.png, cat/2.png, "
        "dog/0.png, dog/1.png and 1 more; remove or replace them"
    )


@pytest.mark.parametrize("unlabeled", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_damaged_files_are_found_in_every_split(
    folder: Path, tmp_path: Path, ctx: Context, split: str, unlabeled: bool
) -> None:
    for name in ("train", "test"):
        (tmp_path / "both" / name).mkdir(parents=True)
        for pet in ("cat", "dog"):
            (tmp_path / "both" / name / pet).symlink_to(folder / pet)
    (tmp_path / "both" / split / "cat").unlink()
    (tmp_path / "both" / split / "cat").mkdir()
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "both" / split / "cat" / "good.png")
    (tmp_path / "both" / split / "cat" / "bad.png").touch()
    with pytest.raises(StageError, match=rf"^{tmp_path}/both/{split}/cat/bad.png is empty; remove"):
        load_image_folder(config(tmp_path / "both", unlabeled=unlabeled), ctx)


def test_images_that_are_turned_upright_are_counted(folder: Path, ctx: Context, events) -> None:
    tags = Image.Exif()
    tags[0x0112] = 3
    for number in range(3):
        Image.new("RGB", (20, 20)).save(folder / "cat" / f"{number}.jpg", exif=tags)
    tags[0x0112] = 1
    Image.new("RGB", (20, 20)).save(folder / "cat" / "upright.jpg", exif=tags)
    load_image_folder(config(folder), ctx)
    (notice,) = events.notices
    assert notice.startswith(f"3 of 20 images in {folder} have an EXIF orientation: they are turned upright")
