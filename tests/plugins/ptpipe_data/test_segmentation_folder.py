"""`data.segmentation_folder`: pairs of images and masks, and what does not fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe.testing import Bench
from ptpipe_data.config import SegmentationFolderConfig
from ptpipe_torch import Data, Resizing

pytest_plugins = ["ptpipe.testing"]

NAMES = ("sky", "road", "car")
SIDE = 16


def write_pair(folder: Path, stem: str, seed: int, size: tuple[int, int] = (SIDE, SIDE), suffix: str = ".png") -> None:
    """A grey image whose brightness is the mask's class; the first row is ignored."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 3, size, dtype=np.uint8)
    mask[0] = 255
    for kind, pixels in (("images", np.repeat((mask % 5 * 80)[..., None], 3, axis=2)), ("masks", mask)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / kind / (stem + (suffix if kind == "images" else ".png")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, num in (("train", 6), ("val", 2), ("test", 3)):
        for number in range(num):
            write_pair(tmp_path / "streets" / name, f"{name}{number}", number)
    return tmp_path / "streets"


@pytest.fixture
def load(folder: Path, tmp_path: Path) -> Callable[..., Data]:
    def load(seed: int = 1, **options: object) -> Data:
        given = {"path": str(folder), "class_names": NAMES, "batch_size": 4} | options
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        config = SegmentationFolderConfig.model_validate(given)
        return front.load_segmentation_folder(config, Context("d", "data.segmentation_folder", seed, scratch))

    return load


def test_images_with_their_masks(load, folder: Path, tmp_path: Path) -> None:
    data = load()
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 6, "val": 2, "test": 3, "calibration": 6,
    }  # fmt: skip
    assert str(data.info.signature) == "images (batch, 3, 16, 16) float32 -> logits (batch, 3, 16, 16) float32"
    stored = tmp_path / "stored"
    stored.mkdir()
    data.save(stored)
    for split in (data.splits["train"], Data.load(stored).splits["train"]):
        images, masks = split.inputs["images"].values(), split.targets["masks"].values()
        assert np.array_equal(images[..., 0], masks % 5 * 80) and (masks[:, 0] == 255).all()
    assert data.splits["test"].ids.tolist() == [f"test/images/test{number}.png" for number in range(3)]
    (batch,) = data.batches("val")
    assert batch.targets["masks"].shape == (2, SIDE, SIDE)


def test_test_and_val_are_drawn_where_there_are_none(load, tmp_path: Path) -> None:
    for number in range(20):
        write_pair(tmp_path / "flat", f"{number:02}", number)
    data = load(path=str(tmp_path / "flat"), val_size=3)
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 15, "val": 3, "test": 2, "calibration": 15,
    }  # fmt: skip


def test_images_and_masks_are_turned_upright(load, tmp_path: Path) -> None:
    tags = Image.Exif()
    tags[0x0112] = 6
    for number in range(20):
        write_pair(tmp_path / "flat", f"{number:02}", number, (SIDE, 2 * SIDE))
        for kind in ("images", "masks") if number % 2 else ("images",):
            path = tmp_path / "flat" / kind / f"{number:02}.png"
            with Image.open(path) as upright:
                upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=tags)
    train = load(path=str(tmp_path / "flat")).splits["train"]
    images, masks = train.inputs["images"].values(), train.targets["masks"].values()
    assert images.shape[1:] == (SIDE, 2 * SIDE, 3) and np.array_equal(images[..., 0], masks % 5 * 80)


def test_masks_are_those_of_the_same_subfolder(load, folder: Path, tmp_path: Path) -> None:
    for clip in ("a", "b"):
        for kind in ("images", "masks"):
            (tmp_path / "clips" / kind / clip).mkdir(parents=True)
            for number in range(10):
                value = (clip == "b") * (100 if kind == "images" else 1)
                shape = (SIDE, SIDE, 3) if kind == "images" else (SIDE, SIDE)
                pixels = np.full(shape, value, np.uint8)
                Image.fromarray(pixels).save(tmp_path / "clips" / kind / clip / f"{number:04}.png")
    data = load(path=str(tmp_path / "clips"), val_size=0, test_size=0)
    train = data.splits["train"]
    assert len(train) == 20 and train.ids[0] == "images/a/0000.png"
    assert np.array_equal(train.inputs["images"].values()[..., 0], train.targets["masks"].values() * 100)
    (tmp_path / "clips" / "masks" / "b").rename(tmp_path / "clips" / "masks" / "c")
    with pytest.raises(
        StageError, match=r"b/0000.png has no counterpart 'b/0000' in .*masks: .* in the same subfolder"
    ):
        load(path=str(tmp_path / "clips"))


def test_grey_of_16_bits_is_scaled(load, folder: Path) -> None:
    for path in sorted((folder / "train" / "images").iterdir()):
        grey = np.asarray(Image.open(path))[..., 0]
        Image.fromarray(grey.astype(np.uint16) * 257).save(path)
    train = load().splits["train"]
    assert np.array_equal(train.inputs["images"].values()[..., 1], train.targets["masks"].values() % 5 * 80)


def test_masks_of_0_and_255(load, folder: Path) -> None:
    for path in sorted((folder / "train" / "masks").iterdir()):
        mask = np.asarray(Image.open(path))
        Image.fromarray(np.where(mask > 0, 255, 0).astype(np.uint8)).save(path)
    with pytest.raises(StageError, match="train's masks have nothing but the class 'sky' and the ignored value 255"):
        load()


def write_masks(folder: Path, dark: int, bright: int, ignored: int) -> None:
    """Give the pixels of dark and bright images, and the first row, these values in the masks."""
    for path in folder.glob("*/masks/*"):
        image_HW = np.asarray(Image.open(path.parents[1] / "images" / path.name))[..., 0]
        mask_HW = np.where(image_HW > 0, bright, dark).astype(np.uint8)
        mask_HW[0] = ignored
        Image.fromarray(mask_HW).save(path)


def test_values_of_classes(load, folder: Path) -> None:
    write_masks(folder, 0, 1, 255)
    numbered = load(class_names=("ok", "scratch"))
    write_masks(folder, 255, 0, 128)
    data = load(class_names=("scratch", "ok"), values=(255, 0), ignore=128)
    for name, split in data.splits.items():
        assert np.array_equal(split.targets["masks"].values(), numbered.splits[name].targets["masks"].values())
    assert data.info.task.ignore == 128
    write_masks(folder, 7, 0, 1)
    data = load(class_names=("scratch", "ok"), values=(7, 0), ignore=1)
    assert data.info.task.ignore == 255
    assert set(np.unique(data.splits["train"].targets["masks"].values())) == {0, 1, 255}
    write_masks(folder, 255, 0, 128)
    write_masks(folder, 0, 255, 255)
    expected = load(class_names=("ok", "scratch"), values=(0, 255)).splits["test"].targets["masks"].values()
    for path in folder.glob("*/masks/*"):
        Image.open(path).convert("1").save(path)
    bits = load(class_names=("ok", "scratch"), values=(0, 255)).splits["test"].targets["masks"].values()
    assert np.array_equal(bits, expected)
    write_masks(folder, 255, 0, 128)
    with pytest.raises(StageError, match=r"has pixels of 128; classes have the values \[0, 255\]$"):
        load(class_names=("ok", "scratch"), values=(0, 255))
    with pytest.raises(StageError, match=r"pixels of 128; classes have the values \[0, 255\], and 7 is ignored"):
        load(class_names=("ok", "scratch"), values=(0, 255), ignore=7)


def test_black_and_white_masks(bench: Bench, folder: Path) -> None:
    write_masks(folder, 0, 255, 255)
    options = {"path": str(folder), "class_names": ["ok", "scratch"], "values": [0, 255]}
    data = bench.run(front.load_segmentation_folder, options)
    assert set(np.unique(data.splits["train"].targets["masks"].values())) == {0, 1}
    assert data.info.task.ignore == 255


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": (0, 255)}, "values: 2 for 3 class_names"),
        ({"values": (0, 9, 9)}, "values: 9 is the value of two classes"),
        ({"values": (0, 9, 255), "ignore": 255}, "ignore: 255 is among values"),
        ({"values": (0, 9, 256)}, "less than or equal to 255"),
    ],
)
def test_values_that_classes_cannot_have(load, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**options)


def test_other_sizes_are_resized_when_asked(load, folder: Path) -> None:
    write_pair(folder / "train", "wide", 9, (SIDE, 2 * SIDE))
    with pytest.raises(StageError, match=r"wide.png has 32 x 16 pixels, others 16 x 16: set image_size"):
        load()
    data = load(image_size=(8, 12))
    assert data.splits["train"].inputs["images"].values().shape == (7, 8, 12, 3)
    assert data.info.inputs["images"].resizing == Resizing()
    assert set(np.unique(data.splits["train"].targets["masks"].values())) <= {0, 1, 2, 255}


def test_augmented_batches_are_the_same_for_any_number_of_workers(load) -> None:
    alone, shared = (
        list(load(augment=("flip", "zoom"), num_workers=workers).batches("train", augment_seed=(1, 2), batch_size=2))
        for workers in (0, 2)
    )
    for one, other in zip(alone, shared, strict=True):
        assert one.inputs["images"].equal(other.inputs["images"]) and one.targets["masks"].equal(other.targets["masks"])


def without_mask(folder: Path) -> None:
    (folder / "train" / "masks" / "train2.png").unlink()


def without_image(folder: Path) -> None:
    (folder / "val" / "images" / "val0.png").unlink()


def mask_of_another_size(folder: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "test" / "masks" / "test1.png")


def mask_in_colour(folder: Path) -> None:
    Image.fromarray(np.zeros((SIDE, SIDE, 3), np.uint8)).save(folder / "test" / "masks" / "test1.png")


def mask_of_unknown_classes(folder: Path) -> None:
    Image.fromarray(np.full((SIDE, SIDE), 7, np.uint8)).save(folder / "test" / "masks" / "test1.png")


def truncated_image(folder: Path) -> None:
    path = folder / "train" / "images" / "train3.png"
    path.write_bytes(path.read_bytes()[:60])


def two_images_of_one_name(folder: Path) -> None:
    (folder / "train" / "images" / "train3.png").rename(folder / "train" / "images" / "train2.bmp")


def empty_mask(folder: Path) -> None:
    (folder / "val" / "masks" / "val1.png").write_bytes(b"")


def no_masks_folder(folder: Path) -> None:
    for path in (folder / "val" / "masks").iterdir():
        path.unlink()
    (folder / "val" / "masks").rmdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_mask, r"train2\.png has no counterpart 'train2' in .*masks"),
        (without_image, r"val0\.png has no counterpart 'val0' in .*images"),
        (mask_of_another_size, r"test1\.png has 16 x 16 and .*test1\.png has 8 x 8 pixels"),
        (mask_in_colour, r"masks/test1\.png has the mode RGB; masks have one byte a pixel"),
        (mask_of_unknown_classes, r"test1\.png has pixels of 7; classes are numbered 0 to 2, and 255 is ignored"),
        (truncated_image, r"train3\.png can't be read as an image"),
        (two_images_of_one_name, r"images/train2\.bmp and .*images/train2\.png have the same name but for the suffix"),
        (empty_mask, r"val/masks/val1\.png is empty; remove or"),
        (no_masks_folder, r"val/masks is missing"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(load, folder: Path, tmp_path: Path, spoil, message: str) -> None:
    spoil(folder)
    with pytest.raises(StageError, match=message):
        load()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_class_may_be_ignored(load, folder: Path) -> None:
    for path in folder.glob("*/masks/*"):
        pixels = np.array(Image.open(path))
        Image.fromarray(np.where(pixels == 255, 0, pixels)).save(path)
    task = load(ignore=0, class_weights="balanced").info.task
    assert task.ignore == 0 and task.class_names == NAMES
    assert task.class_weights[0] == 0 and min(task.class_weights[1:]) > 0.5


def test_relative_paths_are_searched_in_the_data_folder_too(load, folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("PTPIPE_DATA", str(folder.parent))
    assert len(load(path="streets").splits["train"]) == 6
    monkeypatch.delenv("PTPIPE_DATA")
    with pytest.raises(StageError, match=r"streets does not exist \(\$PTPIPE_DATA, where relative paths are also"):
        load(path="streets")
