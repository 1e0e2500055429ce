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
    metrics = {"top1": 0.5, "num_samples": len(ids), "data": "d", "confusion": [[1, 2], [3, 4]], "top5": None}
    return Predictions(np.array(ids, dtype=np.str_), labels_N, logits_NK, metrics)


def again(kept: Predictions, folder: Path) -> Predictions:
    folder.mkdir()
    kept.save(folder)
    return Predictions.load(folder)


def assert_same(one: Predictions, other: Predictions) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    for name in ("labels_N", "logits_NK"):
        first, second = getattr(one, name), getattr(other, name)
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
    assert again(predictions([]), tmp_path / "p").logits_NK.shape == (0, 3)


def test_arrays_come_back_whatever_their_layout(tmp_path: Path) -> None:
    kept = predictions([f"s{i}" for i in range(40)])
    transposed = Predictions(kept.ids, kept.labels_N, np.asfortranarray(kept.logits_NK), kept.metrics)
    every_other = Predictions(kept.ids[::2], kept.labels_N[::2], kept.logits_NK[::2, ::-1], kept.metrics)
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
    loaded.logits_NK.sort()


def test_parts_of_two_answers_are_refused(tmp_path: Path) -> None:
    again(predictions(["a", "b"]), tmp_path / "p")
    content = json.loads((tmp_path / "p" / "predictions.json").read_text())
    (tmp_path / "p" / "predictions.json").write_text(json.dumps(content | {"ids": ["a"]}))
    with pytest.raises(IntegrityError, match="differ in number"):
        Predictions.load(tmp_path / "p")


def test_summary_is_what_fits_a_line() -> None:
    assert predictions(["a", "b"]).summary() == {"top1": 0.5, "num_samples": 2, "data": "d"}


def test_predicted_is_the_first_of_the_greatest() -> None:
    logits_NK = np.array([[0, 2, 2], [1, 0, 0]], dtype=np.float32)
    answer = Predictions(np.array(["a", "b"]), np.array([0, 0]), logits_NK)
    assert answer.predicted_N.tolist() == [1, 0]
