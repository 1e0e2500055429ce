from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe_torch import Data, Resizing, Unlabeled


def config(root: Path, **options: object) -> front.ImageFolderConfig:
    return front.ImageFolderConfig(
        **{"path": str(root), "image_size": 16, "num_workers": 0, "calibration_size": 4, **options}
    )


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 24)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def one_folder(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        for number in range(20):
            paint(tmp_path / "pictures" / name / f"{number:02d}.png", colour)
    return tmp_path / "pictures"


@pytest.fixture
def split_folders(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    for split, num in (("train", 8), ("val", 2), ("test", 3)):
        for name, colour in COLOURS.items():
            for number in range(num):
                paint(root / split / name / f"{number}.png", colour)
    return root


def sizes(data: Data) -> list[int]:
    return [len(split) for split in data.splits.values()]


def test_one_folder_is_split(one_folder: Path, ctx: Context) -> None:
    data = front.load_image_folder(config(one_folder, test_size=0.2, val_size=8), ctx)
    assert data.info.name == "pictures" and data.info.task.class_names == ("blue", "green", "red")
    assert sizes(data) == [40, 8, 12, 4]
    for split in data.splits.values():
        pixels_NHWC = split.inputs["images"].take(np.arange(len(split)))
        for id_, label, pixels_HWC in zip(split.ids, split.targets["labels"].values(), pixels_NHWC, strict=True):
            name = id_.partition("/")[0]
            assert data.info.task.class_names[label] == name
            assert (pixels_HWC == COLOURS[name]).all()
    assert sizes(front.load_image_folder(config(one_folder), ctx)) == [51, 3, 6, 4]


def test_split_folders(split_folders: Path, ctx: Context) -> None:
    data = front.load_image_folder(config(split_folders), ctx)
    assert sizes(data) == [24, 6, 9, 4]
    assert all(id_.startswith("val/") for id_ in data.splits["val"].ids)
    shutil.rmtree(split_folders / "val")
    data = front.load_image_folder(config(split_folders, val_size=6, test_size=2), ctx)
    assert sizes(data) == [18, 6, 2, 4]
    shutil.rmtree(split_folders / "test")
    data = front.load_image_folder(config(split_folders, val_size=0, test_size=4), ctx)
    assert sizes(data) == [20, 0, 4, 4]


def test_folder_key(one_folder: Path) -> None:
    before = front.load_image_folder.fingerprint(config(one_folder))
    assert before == front.load_image_folder.fingerprint(config(one_folder))
    assert before["num_files"] == 60 and before["root"] == str(one_folder)
    path = one_folder / "red" / "00.png"
    status = path.stat()
    paint(path, (1, 2, 3))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert front.load_image_folder.fingerprint(config(one_folder)) != before
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after_same_size = front.load_image_folder.fingerprint(config(one_folder))
    (one_folder / "red" / "notes.txt").write_text("no image")
    (one_folder / "red" / ".hidden.png").write_text("hidden")
    assert front.load_image_folder.fingerprint(config(one_folder)) == after_same_size
    path.rename(one_folder / "red" / "zz.png")
    assert front.load_image_folder.fingerprint(config(one_folder)) != after_same_size


def test_an_image_of_the_same_size_and_time_is_another_one(one_folder: Path) -> None:
    path = one_folder / "red" / "00.png"
    status, content = path.stat(), path.read_bytes()
    before = front.load_image_folder.fingerprint(config(one_folder))
    time.sleep(0.02)  # the clock of file times ticks every few milliseconds
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert front.load_image_folder.fingerprint(config(one_folder)) != before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: shutil.rmtree(root), r"pictures does not exist"),
        (lambda root: (shutil.rmtree(root), root.write_text("x")), r"pictures is not a folder"),
        (lambda root: [shutil.rmtree(path) for path in root.iterdir()], r"pictures has no images in class folders"),
        (lambda root: (root / "grey").mkdir(), r"pictures/grey has no images"),
        (lambda root: paint(root / "stray.png", (0, 0, 0)), r"stray\.png is not in a class folder"),
        (
            lambda root: [shutil.rmtree(root / name) for name in ("blue", "green")],
            r"pictures has images in one folder alone, red: .* \(is .*pictures/red the `path`\?\)",
        ),
    ],
)
def test_invalid_folders(one_folder: Path, ctx: Context, damage: Callable, message: str) -> None:
    damage(one_folder)
    with pytest.raises(StageError, match=message):
        front.load_image_folder(config(one_folder), ctx)


def test_fingerprint_of_a_missing_folder_is_a_stage_error(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="nowhere does not exist"):
        front.load_image_folder.fingerprint(config(tmp_path / "nowhere"))


def test_class_missing_from_training(split_folders: Path, ctx: Context) -> None:
    paint(split_folders / "test" / "violet" / "1.png", (9, 9, 9))
    with pytest.raises(StageError, match="train has no images of the class violet"):
        front.load_image_folder(config(split_folders), ctx)


def test_class_whose_images_were_all_drawn_for_test(one_folder: Path, ctx: Context) -> None:
    for path in sorted((one_folder / "red").iterdir())[1:]:
        path.unlink()
    options = {"test_size": 0.9, "val_size": 0.05}
    with pytest.raises(
        StageError, match=r"train has no image of the class red: red/00\.png were drawn for val and test"
    ):
        front.load_image_folder(config(one_folder, **options), ctx)
    data = front.load_image_folder(config(one_folder, **options, train_size=2), ctx)
    assert data.info.task.class_names == ("blue", "green", "red"), "few of train are the user's choice"


def test_name_that_is_not_utf8(one_folder: Path, ctx: Context) -> None:
    try:
        os.rename(one_folder / "red" / "00.png", os.fsencode(one_folder / "red") + b"/\xff.png")  # noqa: PTH104
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    front.load_image_folder.fingerprint(config(one_folder))
    with pytest.raises(StageError, match="rename it"):
        front.load_image_folder(config(one_folder), ctx)


def test_unicode_names_round_trip(one_folder: Path, ctx: Context, tmp_path: Path) -> None:
    (one_folder / "red").rename(one_folder / "rött")
    data = front.load_image_folder(config(one_folder), ctx)
    (tmp_path / "stored").mkdir()
    data.save(tmp_path / "stored")
    again = Data.load(tmp_path / "stored")
    assert again.splits["train"].ids.tolist() == data.splits["train"].ids.tolist()
    assert any(id_.startswith("rött/") for id_ in again.splits["train"].ids)
    assert len(list(again.batches("train"))) == 1


def test_stored_by_reference(one_folder: Path, ctx: Context, tmp_path: Path) -> None:
    data = front.load_image_folder(config(one_folder), ctx)
    stored = tmp_path / "stored"
    stored.mkdir()
    data.save(stored)
    assert sum(path.stat().st_size for path in stored.iterdir()) < 20_000
    again = Data.load(stored)
    for one, other in zip(data.batches("test"), again.batches("test"), strict=True):
        assert one.inputs["images"].equal(other.inputs["images"])

    gone = one_folder / again.splits["test"].ids[0]
    gone.rename(tmp_path / "elsewhere.png")
    with pytest.raises(StageError, match=rf"^{re.escape(str(gone))} is gone; put it back, or .*--fresh$"):
        list(again.batches("test"))
    one_folder.rename(tmp_path / "moved")
    with pytest.raises(StageError, match=r"the images of this data set are gone: .*pictures is not there"):
        Data.load(stored)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("content", [b"", b"not an image", None], ids=["empty", "text", "truncated"])
def test_corrupt_image_is_named(one_folder: Path, ctx: Context, num_workers: int, content: bytes | None) -> None:
    data = front.load_image_folder(config(one_folder, num_workers=num_workers, batch_size=4), ctx)
    path = one_folder / data.splits["test"].ids[5]
    if content is None:
        noise = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
        content = path.read_bytes()[:-300]
    path.write_bytes(content)
    with pytest.raises(StageError, match=rf"^{re.escape(str(path))} can't be read as an image: .") as caught:
        list(data.batches("test"))
    assert "\n" not in str(caught.value)


def test_resize_and_centre_crop(tmp_path: Path, ctx: Context) -> None:
    """A picture with a mark in its middle, wide and tall, against Pillow's own operations."""
    from PIL import ImageOps

    rng = np.random.default_rng(0)
    for number, size in enumerate([(60, 40), (40, 61), (33, 33), (10, 14), (300, 200)]):
        pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        folder = tmp_path / "p" / "a"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    data = front.load_image_folder(config(tmp_path / "p", unlabeled=True, resize=20, val_size=0, test_size=0), ctx)
    pixels_NHWC = data.splits["train"].inputs["images"].take(np.arange(5))
    for id_, pixels_HWC in zip(data.splits["train"].ids, pixels_NHWC, strict=True):
        with Image.open(tmp_path / "p" / id_) as image:
            scale = 20 / min(image.size)
            resized = image.resize([max(20, round(side * scale)) for side in image.size], Image.Resampling.BILINEAR)
            square = ImageOps.fit(resized, (16, 16), Image.Resampling.NEAREST) if resized.size == (20, 20) else None
            left, top = ((side - 16) // 2 for side in resized.size)
            np.testing.assert_array_equal(pixels_HWC, np.asarray(resized)[top : top + 16, left : left + 16])
            assert square is None or square.size == (16, 16)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_modes(tmp_path: Path, ctx: Context, mode: str) -> None:
    folder = tmp_path / "p" / "a"
    folder.mkdir(parents=True)
    image = Image.new("RGB", (20, 20), (200, 200, 200))
    made = Image.new("I;16", (20, 20), 200 << 8) if mode == "I;16" else image.convert(mode)
    options = {"transparency": bytes([0] * 256)} if mode == "P" else {}
    for number in range(2):
        made.save(folder / f"{number}.{'tif' if mode == 'CMYK' else 'png'}", **options)
    for channels in (1, 3):
        data = front.load_image_folder(
            config(tmp_path / "p", unlabeled=True, channels=channels, val_size=0, test_size=1), ctx
        )
        pixels_NHWC = data.splits["train"].inputs["images"].take(np.arange(1))
        assert pixels_NHWC.shape == (1, 16, 16, channels)
        assert 190 < pixels_NHWC.mean() < 210, "light grey stays light"  # P and 1 are dithered


def test_large_jpeg_is_decoded_small_but_alike(tmp_path: Path, ctx: Context) -> None:
    y, x = np.mgrid[0:1200, 0:1600] / 100
    pixels = np.stack([np.sin(x) * 100 + 128, np.cos(y) * 100 + 128, np.sin(x + y) * 100 + 128], axis=-1).astype(
        np.uint8
    )
    folder = tmp_path / "p" / "a"
    folder.mkdir(parents=True)
    for number in range(2):
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=95)
    data = front.load_image_folder(config(tmp_path / "p", unlabeled=True, image_size=64, val_size=0, test_size=1), ctx)
    got = data.splits["train"].inputs["images"].take(np.arange(1))[0].astype(int)
    expected = np.asarray(Image.fromarray(pixels).resize((85, 64), Image.Resampling.BILINEAR))[:, 10:74].astype(int)
    assert np.abs(got - expected).mean() < 3


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_height_and_width_are_resized_to_and_nothing_is_cropped(
    tmp_path: Path, ctx: Context, in_memory: bool, suffix: str
) -> None:
    y, x = np.mgrid[0:600, 0:800] / 100
    pixels = np.stack([np.sin(x) * 100 + 128, np.cos(y) * 100 + 128, x * 30], axis=-1).astype(np.uint8)
    folder = tmp_path / "p" / "a"
    folder.mkdir(parents=True)
    for number in range(2):
        Image.fromarray(pixels).save(folder / f"{number}.{suffix}")
    options = {"unlabeled": True, "image_size": (32, 100), "val_size": 0, "test_size": 1, "in_memory": in_memory}
    data = front.load_image_folder(config(tmp_path / "p", **options), ctx)
    (tmp_path / "stored").mkdir()
    data.save(tmp_path / "stored")
    image = data.info.inputs["images"]
    assert image.shape_CHW == (3, 32, 100) and image.resizing == Resizing()
    expected = np.asarray(Image.fromarray(pixels).resize((100, 32), Image.Resampling.BILINEAR)).astype(int)
    for each in (data, Data.load(tmp_path / "stored")):
        got = each.splits["train"].inputs["images"].take(np.arange(1))[0].astype(int)
        assert np.abs(got - expected).max() <= (0 if suffix == "png" else 12)
    with pytest.raises(ValidationError, match="resize: image_size has both sides, and nothing is cropped"):
        config(tmp_path / "p", image_size=(32, 100), resize=120)


def test_normalization(one_folder: Path, ctx: Context) -> None:
    assert front.load_image_folder(config(one_folder), ctx).info.inputs["images"].mean == (0.485, 0.456, 0.406)
    grey = front.load_image_folder(config(one_folder, channels=1, resize=20), ctx).info.inputs["images"]
    assert (grey.shape_CHW, grey.resizing) == ((1, 16, 16), Resizing(shorter_side=20))
    data = front.load_image_folder(config(one_folder, normalize="measured"), ctx)
    train = data.splits["train"]
    pixels_NHWC = train.inputs["images"].take(np.arange(len(train)))
    np.testing.assert_allclose(data.info.inputs["images"].mean, (pixels_NHWC / 255).mean(axis=(0, 1, 2)), atol=6e-5)


def test_mean_and_std_are_given(one_folder: Path, ctx: Context) -> None:
    info = front.load_image_folder(config(one_folder, mean=(0, 0, 0), std=(1, 1, 0.5)), ctx).info.inputs["images"]
    assert (info.mean, info.std) == ((0, 0, 0), (1, 1, 0.5))
    for wrong, message in (({"mean": (0, 0, 0)}, "belong together"), ({"mean": (0,), "std": (1,)}, "have 3 numbers")):
        with pytest.raises(ValidationError, match=message):
            config(one_folder, **wrong)


@pytest.mark.parametrize("in_memory", [False, True])
def test_unlabeled_images_lie_anywhere(tmp_path: Path, ctx: Context, in_memory: bool) -> None:
    for name in ("one.png", "deep/er/two.png", "deep/three.png", "four.png"):
        paint(tmp_path / "photos" / name, COLOURS["red"])
    options = {"unlabeled": True, "test_size": 1, "val_size": 0, "in_memory": in_memory}
    data = front.load_image_folder(config(tmp_path / "photos", **options), ctx)
    assert type(data.info.task) is Unlabeled and sizes(data) == [3, 0, 1, 3]
    ids = {*data.splits["train"].ids.tolist(), *data.splits["test"].ids.tolist()}
    assert ids == {"one.png", "deep/er/two.png", "deep/three.png", "four.png"}
    (batch,) = data.batches("train")
    assert batch.inputs["images"].shape == (3, 3, 16, 16) and batch.targets == {}
    (tmp_path / "empty").mkdir()
    with pytest.raises(StageError, match=r"empty has no images \("):
        front.load_image_folder(config(tmp_path / "empty", **options), ctx)
    with pytest.raises(ValidationError, match="classes: unlabeled images have none"):
        config(tmp_path, unlabeled=True, classes={"weights": "balanced"})


def test_in_memory(one_folder: Path, ctx: Context, tmp_path: Path) -> None:
    lazy = front.load_image_folder(config(one_folder), ctx)
    held = front.load_image_folder(config(one_folder, in_memory=True), ctx)
    (tmp_path / "stored").mkdir()
    held.save(tmp_path / "stored")
    expected = [batch.inputs["images"] for batch in lazy.batches("train")]
    shutil.rmtree(one_folder)
    shutil.rmtree(ctx.scratch)
    again = Data.load(tmp_path / "stored")
    for one, other in zip(expected, again.batches("train"), strict=True):
        assert one.equal(other.inputs["images"])


def test_nothing_decoded_stays_after_an_error(one_folder: Path, ctx: Context) -> None:
    """With the image repaired the stage has another key, so that its scratch folder would not be used again."""
    last = sorted(one_folder.rglob("*.*"))[-1]
    last.write_bytes(last.read_bytes()[:40])
    (ctx.scratch / "another file").touch()
    with pytest.raises(StageError, match=last.name):
        front.load_image_folder(config(one_folder, in_memory=True), ctx)
    assert [path.name for path in ctx.scratch.iterdir()] == ["another file"]


def test_large_images_are_refused_until_the_limit_is_raised(one_folder: Path, ctx: Context) -> None:
    paint(one_folder / "red" / "zz.png", (255, 0, 0), (300, 200))
    options = {"val_size": 0, "test_size": 0, "max_pixels": 59_999}
    train = front.load_image_folder(config(one_folder, **options), ctx).splits["train"]
    position = train.ids.tolist().index("red/zz.png")
    with pytest.raises(StageError, match=r"zz\.png has 300 x 200 pixels, more than max_pixels: 59999; remove it"):
        train.inputs["images"].take(np.array([position]))
    larger = front.load_image_folder(config(one_folder, **options | {"max_pixels": 60_000}), ctx).splits["train"]
    assert larger.inputs["images"].take(np.array([position])).shape == (1, 16, 16, 3)
