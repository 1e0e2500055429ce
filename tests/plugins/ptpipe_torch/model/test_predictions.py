from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe import IntegrityError
from ptpipe_torch import Predictions


def predictions(ids: list[str], num_classes: int = 3) -> Predictions:
    random = np.random.default_rng(len(ids))
    logits_NK = random.normal(size=(len(ids), num_classes)).astype(np.float32)
    labels_N = random.integers(0, num_classes, len(ids))
    metrics = {
        "accuracy": 0.5,
        "num_samples": len(ids),
        "data": "d",
        "confusion": [[1, 2], [3, 4]],
        "top5_accuracy": None,
    }
    return Predictions(np.array(ids, dtype=np.str_), {"labels": labels_N, "logits": logits_NK}, metrics)


def again(kept: Predictions, folder: Path) -> Predictions:
    folder.mkdir()
    kept.save(folder)
    return Predictions.load(folder)


def assert_same(one: Predictions, other: Predictions) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    assert one.arrays.keys() == other.arrays.keys()
    for name, first in one.arrays.items():
        second = other.arrays[name]
        assert (first.dtype, first.shape) == (second.dtype, second.shape)
        assert (first == second).all()
    assert one.metrics == other.metrics


# What file names can hold: everything but NUL and the separator, also bytes that are no UTF-8 (lone surrogates).
file_names = st.text(st.characters(exclude_characters="\0"), max_size=12)


@given(st.lists(file_names, max_size=20))
@settings(deadline=None)
def test_any_ids_come_back(tmp_path_factory: pytest.TempPathFactory, ids: list[str]) -> None:
    kept = predictions(ids)
    assert_same(again(kept, tmp_path_factory.mktemp("kept") / "p"), kept)


def test_nothing_at_all_comes_back(tmp_path: Path) -> None:
    assert again(predictions([]), tmp_path / "p").arrays["logits"].shape == (0, 3)


def test_arrays_come_back_whatever_their_layout(tmp_path: Path) -> None:
    kept = predictions([f"s{i}" for i in range(40)])
    labels_N, logits_NK = kept.arrays["labels"], kept.arrays["logits"]
    transposed = Predictions(kept.ids, {"labels": labels_N, "logits": np.asfortranarray(logits_NK)}, kept.metrics)
    sliced = {"labels": labels_N[::2], "logits": logits_NK[::2, ::-1]}
    every_other = Predictions(kept.ids[::2], sliced, kept.metrics)
    assert_same(again(transposed, tmp_path / "fortran"), kept)
    assert_same(again(every_other, tmp_path / "slices"), every_other)


def test_fifty_thousand_ids_are_compact(tmp_path: Path) -> None:
    kept = predictions([f"test/{i:05d}" for i in range(50_000)], num_classes=10)
    assert_same(again(kept, tmp_path / "p"), kept)
    sizes = {path.suffix: path.stat().st_size for path in (tmp_path / "p").iterdir()}
    assert sizes.keys() == {".json", ".safetensors"}
    assert sizes[".safetensors"] < 50_000 * (8 + 40) + 1000
    assert sizes[".json"] < 50_000 * 14


def test_loaded_arrays_outlive_the_folder_and_can_be_sorted_in_place(tmp_path: Path) -> None:
    loaded = again(predictions(["a", "b"]), tmp_path / "p")
    for path in (tmp_path / "p").iterdir():
        path.unlink()
    loaded.arrays["logits"].sort()


def test_parts_of_two_answers_are_refused(tmp_path: Path) -> None:
    again(predictions(["a", "b"]), tmp_path / "p")
    content = json.loads((tmp_path / "p" / "predictions.json").read_text())
    (tmp_path / "p" / "predictions.json").write_text(json.dumps(content | {"ids": ["a"]}))
    with pytest.raises(IntegrityError, match=r"has the shape \(2.*\) for 1 samples"):
        Predictions.load(tmp_path / "p")


def test_summary_is_what_fits_a_line() -> None:
    assert predictions(["a", "b"]).summary() == {"accuracy": 0.5, "num_samples": 2, "data": "d"}


def test_what_another_task_keeps_comes_back(tmp_path: Path) -> None:
    arrays = {
        "prediction": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "score": np.array([0.5, -1.0]),
        "is_known": np.array([True, False]),
    }
    kept = Predictions(np.array(["a", "b"]), arrays)
    assert_same(again(kept, tmp_path / "p"), kept)
