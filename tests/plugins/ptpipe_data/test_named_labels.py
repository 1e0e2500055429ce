"""Labels that are names, in `data.arrays` and `data.python`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe.testing import Bench
from ptpipe_data import load_python
from ptpipe_data.config import ArraysConfig
from ptpipe_torch import Classification, Data

pytest_plugins = ["ptpipe.testing"]

X = np.random.default_rng(0).normal(size=(40, 3))
NAMES = np.array(["dog", "cat", "horse", "cat"] * 10)

MINE = """
import numpy as np

X, NAMES = np.eye(40), np.array(["dog", "cat", "horse", "cat"] * 10)

class Items:
    def __len__(self): return 40
    def __getitem__(self, i): return X[i], str(NAMES[i])

def items(): return {"train": Items()}
def arrays(): return {"train": (X, NAMES)}
def objects(): return {"train": (X, NAMES.astype(object))}
def inputs(): return {"train": (NAMES, NAMES)}
"""


@pytest.fixture
def load(tmp_path: Path, ctx: Context) -> Any:
    def load(labels: Any, test: Any = None, **options: object) -> Data:
        paths = {}
        for split, given in {"path": labels, "test_path": test}.items():
            if given is not None:
                np.savez(tmp_path / f"{split}.npz", x=X[: len(given)], label=given)
                paths[split] = str(tmp_path / f"{split}.npz")
        given = {**paths, "inputs": ("x",), "target": "label", "task": "classification"}
        return front.load_arrays(ArraysConfig.model_validate(given | options), ctx)

    return load


def names_of(data: Data, split: str) -> list[str]:
    """Return the class of each sample by its name."""
    task = data.info.task
    assert isinstance(task, Classification)
    return [task.class_names[label] for label in data.splits[split].targets["labels"].values()]


def test_classes_are_the_sorted_names(load: Any, events: Any) -> None:
    data = load(NAMES, test=NAMES[1:3, np.newaxis], classes={"positive": "horse"})
    assert data.info.task.class_names == ("cat", "dog", "horse") and data.info.task.positive_class == "horse"
    assert names_of(data, "test") == ["cat", "horse"]
    rows = [int(name.rpartition("/")[2]) for name in data.splits["train"].ids]
    assert names_of(data, "train") == NAMES[rows].tolist()
    assert not events.notices


def test_names_that_are_given_decide_the_order(load: Any, events: Any) -> None:
    data = load(NAMES, names=("horse", "dog", "bird", "cat"))
    assert data.info.task.class_names == ("horse", "dog", "bird", "cat")
    rows = [int(name.rpartition("/")[2]) for name in data.splits["train"].ids]
    assert names_of(data, "train") == NAMES[rows].tolist()
    assert events.notices == ["train has nothing of 1 of 4 classes: bird"]


@pytest.mark.parametrize(
    ("labels", "test", "options", "message"),
    [
        (NAMES, None, {"names": ("cat", "dog", "horsy")}, r"row 2 of label is 'horse', .* \(did you mean 'horsy'\?\)"),
        (NAMES, None, {"names": ("cat", "dog", "x")}, r"row 2 of label is 'horse', which is no class \(see `names`\)"),
        (["cat", "", "dog"], None, {}, r"row 1 of label is '', which is no class \(leave it out\)$"),
        (NAMES, ["cat", "bird"], {}, r"^test_path.npz/1: label is 'bird', a class that no sample of train has: add"),
        (NAMES, [0, 1], {}, r"test_path.npz: label holds int64, and names in .*/path.npz: both must be the same"),
        ([0, 1] * 20, ["cat"], {}, r"/path.npz: label holds int64, and names in .*/test_path.npz"),
        (["cat"] * 40, None, {}, "train has samples of one class, cat"),
        (NAMES.reshape(20, 2), None, {}, r"label holds int64 of shape \(20, 2\); .* truth values or names \(N,\)"),
        (NAMES, None, {"task": "regression"}, "label holds <U5 of shape"),
        (NAMES.astype("S"), None, {}, r"label holds \|S5 of shape \(40,\), not rows of numbers"),
        (NAMES.astype(object), None, {}, r"allow_pickle=False: save numbers, or names as `array.astype\(str\)`$"),
    ],
)
def test_labels_that_are_no_classes(load: Any, labels: Any, test: Any, options: Any, message: str) -> None:
    with pytest.raises(StageError, match=message):
        load(labels, test, **options)


@pytest.fixture
def load_own(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules_forgotten: None) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    options = {"file": "mine.py", "task": "classification", "val_size": 0, "test_size": 0}
    return lambda function: bench.run(load_python, options | {"function": function})


@pytest.mark.parametrize("function", ["items", "arrays"])
def test_names_of_a_function(load_own: Any, function: str) -> None:
    assert names_of(load_own(function), "train") == NAMES.tolist()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("objects", r"target is an array of object, not numbers: take names as `array.astype\(str\)`$"),
        ("inputs", "input is an array of <U5, not numbers$"),
    ],
)
def test_other_texts_of_a_function(load_own: Any, function: str, message: str) -> None:
    with pytest.raises(StageError, match=message):
        load_own(function)
