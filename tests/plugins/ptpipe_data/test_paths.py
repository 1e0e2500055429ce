from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptpipe_data as front
from ptpipe import StageError
from ptpipe_data.paths import dataset_name, id_prefixes, split_folders


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


def _fingerprints(project: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those of data sets whose paths are relative to the project."""
    monkeypatch.chdir(project)
    arrays = {"inputs": ("x",), "target": "y", "task": "classification"}
    text = {"text": "text", "task": "classification"}
    return [
        front.load_arrays.fingerprint(front.ArraysConfig(path="d.npz", **arrays)),
        front.load_arrays.fingerprint(front.ArraysConfig(path="folder", **arrays)),
        front.load_table.fingerprint(front.TableConfig(path="d.csv", targets=("y",), task="classification")),
        front.load_text.fingerprint(front.TextConfig(path="texts", tokenizer="tokenizer.json", **text)),
    ]


def _write_project(project: Path, value: str) -> Path:
    for folder in ("folder", "texts/train/good", "texts/train/bad"):
        (project / folder).mkdir(parents=True)
    for file in ("d.npz", "d.csv", "folder/x.npy", "tokenizer.json", "texts/train/good/1.txt", "texts/train/bad/1.txt"):
        (project / file).write_text(value)
    return project


def test_a_copied_project_has_the_same_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, copy, other = (_write_project(tmp_path / name, value) for name, value in (("a", "1"), ("b", "1"), ("c", "2")))
    expected = _fingerprints(one, monkeypatch)
    assert list(expected[1]) == ["folder/x.npy"]
    assert list(expected[3]) == ["tokenizer.json", "texts/train/bad/1.txt", "texts/train/good/1.txt"]
    assert _fingerprints(copy, monkeypatch) == expected
    assert all(one != another for one, another in zip(_fingerprints(other, monkeypatch), expected, strict=True))


def test_what_is_called_after_the_working_directory_has_its_name_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = front.ArraysConfig(path=".", inputs=("x",), target="y", task="classification")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.zeros(1))
        monkeypatch.chdir(tmp_path / name)
        assert list(front.load_arrays.fingerprint(config)) == [f". ({name})/x.npy"]


def test_ids_of_files_of_one_name_begin_with_their_paths_as_written(tmp_path: Path) -> None:
    written = {"train": "train/d.csv", "test": "test/d.csv"}
    paths = {split: tmp_path / path for split, path in written.items()}
    assert id_prefixes(paths, written) == written
    assert id_prefixes(paths | {"test": tmp_path / "e.csv"}, written) == {"train": "d.csv", "test": "e.csv"}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("photos", "photos"),
        ("photos/train", "photos"),
        ("photos/train.csv", "photos"),
        ("photos/Test.parquet", "photos"),
        ("photos/v1.train", "v1"),
        ("photos/trains.csv", "trains"),
        ("photos.v2", "photos.v2"),
        ("/train", "train"),
    ],
)
def test_a_data_set_is_called_as_its_file_or_as_the_folder_around_a_split(tmp_path: Path, path: str, name: str) -> None:
    found = tmp_path / path  # "/train": that of the root
    if path in ("photos", "photos/train", "photos.v2"):
        found.mkdir(parents=True)
    assert dataset_name(found) == name
