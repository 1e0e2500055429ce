from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from ptpipe_example.photo_patches import PhotoPatchesConfig, photo_patches
from sklearn.datasets import load_sample_images

from ptpipe import ManifestError, StageError
from ptpipe.testing import Bench

pytest_plugins = ["ptpipe.testing"]


def test_a_patch_is_the_piece_of_the_photograph_that_its_id_says(bench: Bench) -> None:
    data = bench.run(photo_patches, {"size": 16})
    photos = dict(zip(("china", "flower"), load_sample_images().images, strict=True))
    assert data.info.task.class_names == tuple(photos)
    for split in data.splits.values():
        patches_NHW3 = split.inputs["images"].values()
        for number in range(0, len(split), 37):
            name, row, column = split.ids[number].split("/")
            top, left = int(row) * 16, int(column) * 16
            assert (patches_NHW3[number] == photos[name][top : top + 16, left : left + 16]).all()
            assert data.info.task.class_names[split.targets["labels"].values()[number]] == name


def test_every_patch_is_in_one_split_and_calibration_is_drawn_from_train(bench: Bench) -> None:
    splits = bench.run(photo_patches, {"size": 16}).splits
    sizes = {name: len(split) for name, split in splits.items()}
    assert sizes == {"train": 1248, "val": 208, "test": 624, "calibration": 256}
    apart = [*splits["train"].ids, *splits["val"].ids, *splits["test"].ids]
    assert len(set(apart)) == len(apart) == 2 * (427 // 16) * (640 // 16)
    assert set(splits["calibration"].ids) <= set(splits["train"].ids)


def test_batches_are_normalized_by_the_training_patches(bench: Bench) -> None:
    data = bench.run(photo_patches, {"size": 16, "batch_size": 5000})
    (batch,) = data.batches("train")
    np.testing.assert_allclose(batch.inputs["images"].mean((0, 2, 3)), 0, atol=1e-4)
    np.testing.assert_allclose(batch.inputs["images"].std((0, 2, 3)), 1, atol=1e-3)


def save_photo(path: Path, colour: tuple[int, int, int], width: int = 80) -> str:
    Image.new("RGB", (width, 16), colour).save(path)
    return str(path)


def test_takes_photographs_of_ones_own(bench: Bench, tmp_path: Path) -> None:
    photos = [save_photo(tmp_path / "red.png", (255, 0, 0)), save_photo(tmp_path / "blue.png", (0, 0, 255))]
    data = bench.run(photo_patches, {"photos": photos, "size": 8})
    assert data.info.task.class_names == ("red", "blue")
    assert data.splits["test"].inputs["images"].take(np.array([0])).tolist() == [[[[255, 0, 0]] * 8] * 8]


def test_the_photographs_enter_the_key(tmp_path: Path) -> None:
    photos = (save_photo(tmp_path / "a.png", (1, 2, 3)), save_photo(tmp_path / "b.png", (4, 5, 6)))
    config = PhotoPatchesConfig(photos=photos)
    assert photo_patches.fingerprint is not None
    before = photo_patches.fingerprint(config)
    save_photo(tmp_path / "b.png", (7, 8, 9))
    assert photo_patches.fingerprint(config) != before


def test_mistakes_are_said_in_one_line(bench: Bench, tmp_path: Path) -> None:
    photos = [save_photo(tmp_path / "a.png", (1, 2, 3)), save_photo(tmp_path / "b.png", (4, 5, 6), width=70)]
    with pytest.raises(ManifestError, match="must name two photographs or more"):
        bench.run(photo_patches, {"photos": photos[:1]})
    with pytest.raises(ManifestError, match=r"there is no photograph none\.png"):
        bench.run(photo_patches, {"photos": [*photos, "none.png"]})
    with pytest.raises(StageError, match="b has 8 columns of patches of 8 pixels: 10 at least are needed"):
        bench.run(photo_patches, {"photos": photos, "size": 8})
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(StageError, match="can't read a photograph"):
        bench.run(photo_patches, {"photos": photos})
