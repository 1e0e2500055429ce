from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ptpipe import StageError
from ptpipe_data.paths import split_folders


@pytest.fixture
def make(tmp_path: Path):
    def make(*names: str) -> Path:
        for name in names:
            (tmp_path / name).mkdir()
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (("train", "valid", "test"), "valid"),
        (("train", "Val"), "Val"),
        (("train", "dev", "testing"), "dev, testing"),
        (("Train", "Test"), "Test, Train"),
        (("training", "validation"), "training, validation"),
        (("val", "test"), "test, val"),
    ],
)
def test_other_names_of_splits_are_refused(make, names: Sequence[str], wrong: str) -> None:
    root = make(*names)
    with pytest.raises(StageError, match=f"{root} has folders called {wrong}: splits are called train, val and test"):
        split_folders(root)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train", "val", "test"), ["train", "val", "test"]),
        (("train", "val", "dev", "masks"), ["train", "val"]),
        (("train",), ["train"]),
        (("cat", "test"), [""]),
        (("test",), [""]),
        ((".val", "train"), ["train"]),
        ((), [""]),
    ],
)
def test_folders_of_splits_and_of_classes(make, names: Sequence[str], splits: list[str]) -> None:
    assert list(split_folders(make(*names)).values()) == splits
