from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe import IntegrityError
from ptpipe_torch import Classification, MultiLabel, Predictions, Regression, Task


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
    folder.mkdir(parents=True)
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


def table_of(kept: Predictions, folder: Path) -> list[list[str]] | None:
    """Return the rows of the table that is delivered."""
    loaded = again(kept, folder)
    if (delivered := list(Predictions.deliverables(folder))) != ["predictions.csv"]:
        assert delivered == ["predictions.safetensors", "predictions.json"]
        assert not (folder / "predictions.csv").exists() and all((folder / name).is_file() for name in delivered)
        return None
    with (folder / "predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    (folder.parent / "saved").mkdir()
    loaded.save(folder.parent / "saved")
    assert (folder.parent / "saved" / "predictions.csv").read_bytes() == (folder / "predictions.csv").read_bytes()
    return rows


def test_classes_are_delivered_by_name(tmp_path: Path) -> None:
    task = Classification(class_names=("ham", 'sp,"am'))
    outputs = {"logits": torch.tensor([[2.0, 1.0], [0.0, 1.0], [500.0, -500.0]])}
    targets = {"labels": torch.tensor([0, 1, 1])}
    ids = ["a,\n1", "größe", "\udcff"]
    assert table_of(answered(task, outputs, targets, ids), tmp_path / "p") == [
        ["id", "label", "prediction", "score", "probability_ham", 'probability_sp,"am'],
        ["a,\n1", "ham", "ham", "1.0", "0.7310586", "0.2689414"],
        ["größe", 'sp,"am', 'sp,"am', "1.0", "0.2689414", "0.7310586"],
        ["\\udcff", 'sp,"am', "ham", "0.0", "1", "0"],
    ]


def test_numbers_are_delivered_by_target(tmp_path: Path) -> None:
    targets = {"targets": torch.tensor([[0.1], [1e10]])}
    task = Regression(target_names=("price",), mean=(0.0,), std=(1.0,))
    rows = table_of(answered(task, {"predictions": torch.tensor([[0.1], [-2.0]])}, targets), tmp_path / "one" / "p")
    assert rows is not None and [row[:3] for row in rows] == [
        ["id", "target", "prediction"], ["0", "0.1", "0.1"], ["1", "1e+10", "-2.0"],
    ]  # fmt: skip
    task = Regression(target_names=("price", "age"), mean=(0.0, 0.0), std=(1.0, 1.0))
    pairs = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = table_of(answered(task, {"predictions": pairs + 1}, {"targets": pairs}), tmp_path / "two" / "p")
    assert rows is not None and rows[:2] == [
        ["id", "target_price", "target_age", "prediction_price", "prediction_age", "score"],
        ["0", "1.0", "2.0", "2.0", "3.0", "-1.0"],
    ]


def test_labels_are_delivered_by_name(tmp_path: Path) -> None:
    task = MultiLabel(label_names=("cat", "dog"))
    labels = torch.tensor([[1, 0], [1, 1]])
    rows = table_of(answered(task, {"logits": labels - 0.5}, {"labels": labels.float()}), tmp_path / "p")
    assert rows == [
        [
            "id",
            "label_cat",
            "label_dog",
            "prediction_cat",
            "prediction_dog",
            "score",
            "probability_cat",
            "probability_dog",
        ],
        ["0", "1", "0", "1", "0", "1.0", "0.6224593", "0.3775407"],
        ["1", "1", "1", "1", "1", "1.0", "0.6224593", "0.6224593"],
    ]
    one = MultiLabel(label_names=("cat",))
    outputs, labels = {"logits": torch.tensor([[0.0], [-800.0]])}, {"labels": torch.ones(2, 1)}
    rows = table_of(answered(one, outputs, labels), tmp_path / "one" / "p")
    assert rows == [
        ["id", "label", "prediction", "score", "probability"],
        ["0", "1", "0", "0.0", "0.5"],
        ["1", "1", "0", "0.0", "9.859677e-305"],
    ]


@pytest.mark.parametrize("num_classes", [3, 100, 101])
def test_probabilities_of_at_most_a_hundred_classes(tmp_path: Path, num_classes: int) -> None:
    logits_BK = torch.randn(1500, num_classes, generator=torch.Generator().manual_seed(0)) * 5
    labels_B = torch.arange(1500) % num_classes
    task = Classification(class_names=tuple(f"c{number}" for number in range(num_classes)))
    rows = table_of(answered(task, {"logits": logits_BK}, {"labels": labels_B}), tmp_path / "p")
    assert rows is not None and rows[0][:4] == ["id", "label", "prediction", "score"]
    assert rows[0][4:] == ([f"probability_{name}" for name in task.class_names] if num_classes <= 100 else [])
    if num_classes <= 100:
        written_BK = torch.tensor([[float(cell) for cell in row[4:]] for row in rows[1:]], dtype=torch.float64)
        torch.testing.assert_close(written_BK, logits_BK.double().softmax(1), rtol=1e-6, atol=0)


def test_what_is_more_than_a_few_numbers_is_not_delivered(tmp_path: Path) -> None:
    maps = Predictions(np.array(["a"]), {"prediction": np.zeros((1, 4, 4), np.uint8), "score": np.ones(1)})
    tokens = Predictions(
        np.array(["a"]), {"prediction": np.zeros((1, 4), np.int64)}, {"per_class": [], "class_names": []}
    )
    embeddings = Predictions(np.array(["a"]), {"embedding": np.zeros((1, 4), np.float32)})
    for number, kept in enumerate((maps, tokens, embeddings)):
        assert table_of(kept, tmp_path / str(number)) is None


def answered(
    task: Task, outputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], ids: list[str] | None = None
) -> Predictions:
    """Return what eval.predict makes of outputs."""
    num = len(next(iter(targets.values())))
    arrays = {name: of.numpy() for name, of in task.samples(outputs, targets).items()}
    sums = {name: of.numpy() for name, of in task.sums(outputs, targets).items()}
    named = np.array(ids or [str(number) for number in range(num)])
    origin = {"probabilities": dict(task.probability_functions)}
    return Predictions(named, arrays, task.figures(sums, num) | origin)
