"""`data.python`: data sets of files that know nothing of ptpipe, and what is no data set."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptpipe import ManifestError, StageError, load_plan
from ptpipe.launching import FilesRead
from ptpipe.testing import Bench
from ptpipe_data import load_python
from ptpipe_data.python_config import PythonDataConfig
from ptpipe_torch import ArrayInfo, Classification, Data, ImageInfo, MultiLabel, Regression, Segmentation, Unlabeled

pytest_plugins = ["ptpipe.testing"]

MINE = """
import random
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(40, 5)), np.arange(40) % 3
PIXELS = rng.integers(0, 256, (40, 8, 6, 3), dtype=np.uint8)

class Items(Dataset):
    def __init__(self, get=lambda i: (torch.tensor(X[i]), int(Y[i])), size=40): self.get, self.size = get, size
    def __len__(self): return self.size
    def __getitem__(self, index): return self.get(index)

def broken(i):
    if i == 31: raise ValueError("no such file")
    return X[i], Y[i]

class Stream(IterableDataset):
    def __iter__(self): return iter([])

def items(): return {"train": Items()}
def subsets(): return {"train": Subset(Items(), range(10, 40)), "test": Subset(Items(), range(10))}
def tensors(): return {"train": TensorDataset(torch.tensor(X), torch.tensor(Y))}
def pairs(num=40): return {"train": (X[:num], Y[:num]), "val": (X, Y), "test": [torch.tensor(X), torch.tensor(Y)]}
def named(): return {"train": {"size": X, "kind": Y, "other": Y}}
def named_items(): return {"train": Items(lambda i: {"label": Y[i], "a": X[i], "b": np.float16(1)})}
def two_inputs(): return {"train": Items(lambda i: (X[i], torch.tensor([i, i]), Y[i]))}
def labels(): return {"train": (X, (rng.random((40, 3)) < 0.5).astype("uint8"))}
def numbers(): return {"train": Items(lambda i: (X[i], float(Y[i])))}
def drawn(): return {"train": (torch.rand(40, 2), np.random.randint(0, 2, 40) + random.choice([0, 0]))}
def pictures(): return {"train": Items(lambda i: (Image.fromarray(PIXELS[i]), Y[i]))}
def channels_first(): return {"train": (torch.tensor(PIXELS).permute(0, 3, 1, 2), Y)}
def gray(): return {"train": Items(lambda i: (Image.fromarray(PIXELS[i]).convert("L"), Y[i]))}
def bfloat16(): return {"train": (torch.tensor(X).bfloat16(), Y)}
def noisy(): return {"train": Items(lambda i: (torch.tensor(X[i]) + torch.rand(5), Y[i]))}

def columns_of_one(): return {"train": Items(lambda i: (X[i], torch.tensor([Y[i]])))}
def masks(): return {"train": Items(lambda i: {"photo": PIXELS[i], "mask": torch.tensor(PIXELS[i, :, :, 0] % 4)})}
def just_rows(): return {"train": X}
def just_items(): return {"train": Items(lambda i: torch.tensor(X[i]))}
def maps(): return {"train": {"photo": PIXELS, "target": PIXELS.transpose(0, 3, 1, 2) / 255}}
def widens(): return {"train": Items(lambda i: (np.int64(300), np.uint16(300)) if i else (np.int8(1), np.uint8(2)))}
def sample_list(): return {"train": [PIXELS[i] for i in range(40)]}
def two_listed(): return {"train": [X, X]}
def depths(): return {"train": {"photo": PIXELS, "depth": PIXELS[..., 0] / 255, "target": PIXELS[..., 0] % 3}}
def far_masks(): return {"train": Items(lambda i: (PIXELS[i], np.full((8, 6), -100 if i == 5 else 0)))}

def a_list(): return [X, Y]
def no_train(): return {"test": (X, Y)}
def misspelt(): return {"train": (X, Y), "tset": (X, Y)}
def loader(): return {"train": DataLoader(Items())}
def stream(): return {"train": Stream()}
def text(): return {"train": "train.csv"}
def raises(): return {"train": Items(broken)}
def shrinks(): return {"train": Items(lambda i: (X[i], Y[i]) if i < 20 else (X[i][:4], Y[i]))}
def changes_type(): return {"train": Items(lambda i: (X[i], int(Y[i]) if i < 20 else 1.5))}
def changes_names(): return {"train": Items(lambda i: {"a": X[i], "target": Y[i]} if i < 20 else {"target": Y[i]})}
def single(): return {"train": Items(lambda i: X[i])}
def alone(): return {"train": (X,)}
def words(): return {"train": Items(lambda i: ("word", Y[i]))}
def empty(): return {"train": Items(size=0)}
def infinite(): return {"train": Items(lambda i: (X[i] if i != 7 else X[i] + np.inf, Y[i]))}
def uneven(): return {"train": (X, Y[:39])}
def negative(): return {"train": (X, Y - 1)}
def no_length():
    class NoLength(Items):
        def __len__(self): raise RuntimeError("count unknown")
    return {"train": NoLength()}
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules_forgotten: None) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


@pytest.fixture
def load(bench: Bench) -> Any:
    def load(function: str, **options: Any) -> Data:
        given = {"file": "mine.py", "function": function, "task": "classification", "val_size": 0, "test_size": 0}
        return bench.run(load_python, given | options)

    return load


X_AND_Y = {"x": np.eye(3), "y": np.arange(3)}


def contents() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(40, 5)).astype(np.float32), np.arange(40) % 3


@pytest.mark.parametrize("function", ["items", "tensors"])
def test_datasets_of_tuples(load: Any, function: str) -> None:
    data, (x, y) = load(function, names=["a", "b", "c"]), contents()
    assert data.info.inputs == {"input": ArrayInfo(dtype="float32", shape=(5,))} and data.info.name == "mine"
    assert data.info.task == Classification(class_names=("a", "b", "c"))
    train = data.splits["train"]
    assert np.array_equal(train.inputs["input"].values(), x) and train.targets["labels"].values().tolist() == y.tolist()
    assert train.ids[3] == "train/3"


def test_integers_that_get_wider_after_the_first_item(load: Any) -> None:
    train = load("widens", task="regression").splits["train"]
    assert train.inputs["input"].values().tolist() == [1, *[300] * 39]
    (target,) = train.targets.values()
    assert target.values().ravel().tolist() == [2, *[300] * 39]


def test_a_list_of_samples_without_targets(load: Any) -> None:
    with pytest.raises(
        StageError, match=r"a list of 40 arrays of shape \(8, 6, 3\): for so many samples return np.stack"
    ):
        load("sample_list", task="unlabeled")
    assert list(load("two_listed", task="unlabeled").info.inputs) == ["input_0", "input_1"]


def test_augmented_images_beside_maps_that_stay(load: Any) -> None:
    options = {"task": "segmentation", "images": ["photo"]}
    with pytest.raises(
        StageError, match="augment: flip moves photo, and the input depth, of the same height and width"
    ):
        load("depths", **options, augment=["erase", "flip"])
    assert load("depths", **options, augment=["erase"]).loader.augment == ("erase",)
    assert list(load("depths", **options, inputs=["photo"], augment=["flip"]).info.inputs) == ["photo"]


def test_splits_are_the_functions_or_drawn(load: Any) -> None:
    sizes = {
        name: len(split)
        for name, split in load("subsets", val_size=0.1, test_size=None, calibration_size=5).splits.items()
    }
    assert sizes == {"train": 27, "val": 3, "test": 10, "calibration": 5}
    assert len(load("items", test_size=0.25).splits["test"]) == 10
    assert len(load("items", test_size=None).splits["test"]) == 8
    data = load("pairs", arguments={"num": 7}, test_size=None)
    assert [len(data.splits[name]) for name in ("train", "val", "test")] == [7, 40, 40]


def test_names_and_several_inputs(load: Any) -> None:
    assert list(load("named", inputs=["size"], target="kind").info.inputs) == ["size"]
    data = load("named_items", target="label")
    assert [str(spec) for spec in data.info.signature.inputs] == ["a (batch, 5) float32", "b (batch) float32"]
    assert [str(spec) for spec in load("two_inputs").info.signature.inputs] == [
        "input_0 (batch, 5) float32",
        "input_1 (batch, 2) int64",
    ]
    assert list(load("two_inputs", inputs=["numbers", "place"]).info.inputs) == ["numbers", "place"]


def test_other_tasks(load: Any) -> None:
    assert load("labels", task="multi_label").info.task == MultiLabel(label_names=("0", "1", "2"))
    task = load("numbers", task="regression", loss="huber", names=["height"]).info.task
    assert isinstance(task, Regression) and task.loss == "huber" and task.target_names == ("height",)


def test_masks(load: Any) -> None:
    data = load("masks", task="segmentation", target="mask", images=["photo"], augment=["flip"], ignore=3)
    assert data.info.task == Segmentation(class_names=("0", "1", "2"), shape_HW=(8, 6), ignore=3)
    (batch,) = data.batches("train", batch_size=40)
    assert batch.inputs["photo"].shape == (40, 3, 8, 6) and batch.targets["masks"].dtype == torch.int64
    assert load("masks", task="segmentation", target="mask").info.task.class_names == ("0", "1", "2", "3")
    void = load("masks", task="segmentation", target="mask", names=["void", "a", "b", "c"], ignore=0).info.task
    assert void == Segmentation(class_names=("void", "a", "b", "c"), shape_HW=(8, 6), ignore=0)


def test_maps_are_mirrored_with_their_images(load: Any) -> None:
    data = load("maps", task="regression", images=["photo"], augment=["flip"], data_range=1)
    assert data.info.task.positions == (8, 6)
    (batch,) = data.batches("train", batch_size=40, augment_seed=(1, 2))
    info = data.info.inputs["photo"]
    mean, std = (torch.tensor(values)[:, None, None] for values in (info.mean, info.std))
    torch.testing.assert_close(batch.inputs["photo"] * std + mean, batch.targets["targets"], rtol=0, atol=1e-5)
    is_same_N = np.isclose(batch.targets["targets"], data.splits["train"].targets["targets"].values()).all((1, 2, 3))
    assert 10 < is_same_N.sum() < 30
    with pytest.raises(StageError, match="augment: rotate would change the images and not targets"):
        load("maps", task="regression", images=["photo"], augment=["flip", "rotate"])


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        ("just_rows", ["input"]),
        ("just_items", ["input"]),
        ("single", ["input"]),
        ("pairs", ["input_0", "input_1"]),
        ("named_items", ["label", "a", "b"]),
    ],
)
def test_unlabeled(load: Any, function: str, inputs: list[str]) -> None:
    data = load(function, task="unlabeled")
    assert type(data.info.task) is Unlabeled and list(data.info.inputs) == inputs
    with pytest.raises(ManifestError, match="loss_function and metric_function need a target"):
        load(function, task="unlabeled", loss_function="hinge")


def test_a_column_of_labels(load: Any) -> None:
    assert load("columns_of_one").splits["train"].targets["labels"].values().tolist() == contents()[1].tolist()


@pytest.mark.parametrize(
    ("function", "shape_CHW"), [("pictures", (3, 8, 6)), ("channels_first", (3, 8, 6)), ("gray", (1, 8, 6))]
)
def test_images(load: Any, function: str, shape_CHW: tuple[int, ...]) -> None:
    data = load(function, images=["input"], augment=["flip"])
    info = data.info.inputs["input"]
    assert isinstance(info, ImageInfo) and info.shape_CHW == shape_CHW and data.loader.augment == ("flip",)
    pixels = np.random.default_rng(0)
    pixels.normal(size=(40, 5))
    expected = pixels.integers(0, 256, (40, 8, 6, 3), dtype=np.uint8)
    if shape_CHW[0] == 3:
        assert np.array_equal(data.splits["train"].inputs["input"].values(), expected)


def test_random_numbers_depend_on_the_seed_alone(load: Any, bench: Bench) -> None:
    values = []
    for seed in (1, 1, 2):
        bench.seed = seed
        values.append(load("drawn").splits["train"].inputs["input"].values())
        torch.rand(1)
        np.random.random()
    assert np.array_equal(values[0], values[1]) and not np.array_equal(values[0], values[2])
    before = np.random.get_state()[1].tolist()
    load("drawn")
    assert np.random.get_state()[1].tolist() == before


def test_random_transforms_are_reported(load: Any, bench: Bench) -> None:
    load("noisy")
    (notice,) = bench.notices
    assert (
        notice.startswith("mine.py: noisy(), train: input of item 0 differs when it is read again")
        and "augment" in notice
    )
    load("items")
    assert bench.notices == []


def test_bfloat16(load: Any) -> None:
    assert load("bfloat16").info.inputs["input"].dtype == "float32"


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("a_list", {}, r"mine.py: a_list\(\) returned a list, not a dict with the data sets of train"),
        ("no_train", {}, r"mine.py: no_train\(\) returned no split train"),
        ("misspelt", {}, r"returned a split 'tset'; splits are train, val and test \(did you mean 'test'\?\)"),
        ("loader", {}, r"mine.py: loader\(\), train: it is a DataLoader: return its data set"),
        ("stream", {}, r"stream\(\), train: (it is a Stream, not a torch Dataset|the length of)|Stream"),
        ("text", {}, r"text\(\), train: it is a str, not a torch Dataset with a length"),
        ("raises", {}, r"mine.py: item 31 of raises\(\), train raised ValueError: no such file \(mine.py:18"),
        ("shrinks", {}, r"shrinks\(\), train: input of item 20 is float64 of shape \(4,\); that of item 0 .* \(5,\)"),
        ("shrinks", {}, r"of shape \(5,\): pad or resize in the data set, no collate_fn is called$"),
        (
            "far_masks",
            {"task": "segmentation"},
            r"row 5 of target has pixels of -100; classes are numbered 0 to 254, and 255 is ignored",
        ),
        (
            "masks",
            {"task": "segmentation", "target": "mask", "names": ["a", "b", "c"]},
            r"row 0 of mask has pixels of 3; classes are numbered 0 to 2",
        ),
        ("items", {"task": "segmentation"}, r"target holds int64 of shape \(40,\); a segmentation's target are"),
        ("changes_type", {}, r"target of item 20 is float64 of shape \(\); that of item 0 is int64 of shape \(\)$"),
        ("changes_names", {}, r"item 20 has target, item 0 has a, target"),
        ("single", {}, r"single\(\), train: item 0 is a ndarray, not a tuple of inputs and target, or a dict"),
        ("alone", {}, r"alone\(\), train: "),
        ("words", {}, r"words\(\), train: input of item 0 is a str, not numbers"),
        ("empty", {}, r"empty\(\), train: it has no items"),
        ("infinite", {}, r"mine.py: infinite\(\), train: row 7 of input is not finite"),
        ("uneven", {}, r"uneven\(\), train: arrays have different numbers of rows: input 40, target 39"),
        ("negative", {}, r"split train has the label -1; classes are numbered 0 to 1"),
        ("no_length", {}, r"mine.py: the length of no_length\(\), train raised RuntimeError: count unknown"),
        ("two_inputs", {"inputs": ["a"]}, r"it has 2 inputs and a target; inputs names 1"),
        ("items", {"inputs": ["target"]}, "the inputs and the target need different names"),
        ("items", {"images": ["input"]}, r"input holds float32 of shape \(40, 5\), not pixels"),
        (
            "items",
            {"images": ["inputt"]},
            r"images: mine.py: items\(\), train has no 'inputt' \(did you mean 'input'\?\)",
        ),
        ("items", {"task": "multi_label"}, r"target holds int64 of shape \(40,\); a multi-label task's target"),
        ("numbers", {}, r"target holds float32 of shape \(40,\); a classification's target are integers"),
        ("named", {"inputs": ["sise"], "target": "kind"}, r"has no array 'sise' \(did you mean 'size'\?\)"),
        ("named", {}, r"target: mine.py: named\(\), train has no 'target' \(there are size, kind, other\)"),
    ],
)
def test_what_is_no_data_set(load: Any, function: str, options: Any, message: str) -> None:
    with pytest.raises((StageError, ManifestError), match=message):
        load(function, **options)


def test_options_that_contradict_each_other(load: Any) -> None:
    with pytest.raises(ManifestError, match="augment is for images"):
        load("items", augment=["flip"])
    with pytest.raises(ManifestError, match="loss is an option of the task regression"):
        load("items", loss="mae")


@pytest.mark.parametrize("reads", [[], ["known"]])
def test_files_that_it_opens_belong_to_the_result(load: Any, bench: Bench, tmp_path: Path, reads: list[str]) -> None:
    (tmp_path / "known").mkdir()
    for name in ("x.npy", "known/y.npy"):
        np.save(tmp_path / name, X_AND_Y[name[-5]])
    lazily = "Items(lambda i: (np.load('x.npy')[i], np.load('known/y.npy')[i]), 3)"
    (tmp_path / "mine.py").write_text(f"{MINE}\ndef files(): return {{'train': {lazily}}}\n")
    load("files", reads=reads)
    (event,) = (event for event in bench.events if isinstance(event, FilesRead))
    assert list(event.files) == [str(tmp_path / name) for name in ("x.npy", "known/y.npy")[: 2 - len(reads)]]


def test_files_that_it_reads_are_in_the_fingerprint(tmp_path: Path) -> None:
    def fingerprint(*paths: str) -> Any:
        config = PythonDataConfig(file="mine.py", function="items", task="classification", reads=paths)
        return load_python.fingerprint(config)

    assert fingerprint() is None
    (tmp_path / "table.csv").write_text("1")
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    before = fingerprint("table.csv", "folder")
    assert before.keys() == {"table.csv", "folder"} and fingerprint("table.csv", "folder") == before
    (tmp_path / "table.csv").write_text("2")
    (tmp_path / "folder" / "deep" / "a").touch()
    after = fingerprint("table.csv", "folder")
    assert after["table.csv"] != before["table.csv"] and after["folder"] != before["folder"]
    with pytest.raises(StageError, match="does not exist"):
        fingerprint("nothing")


def test_links_that_it_reads_are_followed(tmp_path: Path) -> None:
    def digest() -> Any:
        config = PythonDataConfig(file="mine.py", function="items", task="classification", reads=("data",))
        return load_python.fingerprint(config)["data"]

    for folder in ("data", "elsewhere/deep", "other"):
        (tmp_path / folder).mkdir(parents=True)
    files = [tmp_path / name for name in ("elsewhere/deep/a.csv", "other/b.csv")]
    for file in files:
        file.write_text("1")
    links = {"data/folder": "elsewhere", "data/b.csv": "other/b.csv", "data/gone": "nothing"}
    loops = {"data/itself": "data/itself", "data/up": "data", "elsewhere/other": "other", "other/back": "elsewhere"}
    for link, target in (links | loops).items():
        (tmp_path / link).symlink_to(tmp_path / target)
    before = digest()
    assert digest() == before
    for file in files:
        file.write_text("22")
        assert digest() != before, file
        before = digest()


def test_what_is_loaded_is_stored_without_the_file(load: Any, mine: Path) -> None:
    data = load("items")
    mine.unlink()
    (batch,) = data.batches("train", batch_size=64)
    assert batch.inputs["input"].shape == (40, 5)
    assert [name for name in sys.modules if name.startswith("ptpipe_source")]


FUNCTIONS = """
import torch
from torch.nn.functional import cross_entropy
from mine import items

def own_loss(outputs, targets): return 2 * cross_entropy(outputs, targets, reduction="none")
def margin(logits, labels): return logits.gather(1, labels[:, None])[:, 0]
def mean_loss(outputs, targets): return cross_entropy(outputs, targets)
def number(outputs, targets): return 1.0
def three(outputs, targets, weights): return outputs[:, 0]
def fails(outputs, targets): return outputs @ targets
def accuracy(outputs, targets): return outputs[:, 0]
"""
LOGITS_BK = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 4.0]])
LABELS_B = torch.tensor([0, 1])


@pytest.fixture
def load_own(load: Any, tmp_path: Path) -> Any:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return lambda **options: load("items", file="own.py", **options)


def test_a_loss_and_a_metric_of_ones_own(load_own: Any) -> None:
    data = load_own(loss_function="own_loss", metric_function="margin", higher_is_better=False)
    task, plain = data.info.task, load_own().info.task
    outputs, targets = {"logits": LOGITS_BK}, {"labels": LABELS_B}
    assert torch.equal(task.losses(outputs, targets), 2 * plain.losses(outputs, targets))
    assert task.primary_metric.name == "margin" and not task.primary_metric.higher_is_better
    sums = {name: value.numpy() for name, value in task.sums(outputs, targets).items()}
    figures, expected = (
        task.figures(sums, 2),
        plain.figures({n: s.numpy() for n, s in plain.sums(outputs, targets).items()}, 2),
    )
    assert figures["margin"] == 1.5 and figures["accuracy"] == expected["accuracy"] == 0.5
    assert figures["loss"] == pytest.approx(2 * expected["loss"])
    assert task.samples(outputs, targets)["score"].tolist() == [-2, -1]
    with pytest.raises(StageError, match="the loss is own_loss, a function of your own"):
        task.with_label_smoothing(0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_functions_of_ones_own_get_outputs_in_float32(load_own: Any, dtype: torch.dtype) -> None:
    task = load_own(loss_function="own_loss", metric_function="margin").info.task
    outputs, targets = {"logits": (LOGITS_BK / 3).to(dtype).requires_grad_()}, {"labels": LABELS_B}
    exact = {"logits": outputs["logits"].detach().float()}
    losses = task.losses(outputs, targets)
    assert torch.equal(losses, task.losses(exact, targets))
    assert task.sums(outputs, targets)["own_metric"] == task.sums(exact, targets)["own_metric"]
    losses.sum().backward()
    assert outputs["logits"].grad.dtype == dtype and outputs["logits"].grad.any()


def test_a_metric_alone_leaves_the_loss(load_own: Any) -> None:
    task, plain = load_own(metric_function="margin").info.task, load_own().info.task
    outputs, targets = {"logits": LOGITS_BK}, {"labels": LABELS_B}
    smoothed = task.with_label_smoothing(0.1)
    assert torch.equal(smoothed.losses(outputs, targets), plain.with_label_smoothing(0.1).losses(outputs, targets))
    assert smoothed.sums(outputs, targets)["own_metric"] == 3.0


def test_a_stored_task_calls_what_the_manifest_names_alone(load_own: Any, tmp_path: Path) -> None:
    data = load_own(loss_function="own_loss")
    (tmp_path / "stored").mkdir()
    data.save(tmp_path / "stored")
    stored = Data.load(tmp_path / "stored")
    batch = next(stored.batches("train", batch_size=2))
    outputs = {"logits": LOGITS_BK}
    for functions in ((), (f"{tmp_path}/own.py:margin",), (f"{tmp_path}/mine.py:own_loss",)):
        with pytest.raises(StageError, match=r"the stored result needs own.py:own_loss, and "):
            stored.with_source_functions(functions).info.task.losses(outputs, batch.targets)
    named = stored.with_source_functions([f"{tmp_path}/own.py:own_loss"])
    assert torch.equal(named.info.task.losses(outputs, batch.targets), data.info.task.losses(outputs, batch.targets))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss_function": "mean_loss"},
            r"own.py:mean_loss returned a tensor of shape \(\) for 2 samples: .* reduction",
        ),
        ({"metric_function": "number"}, r"own.py:number returned no tensor for 2 samples"),
        ({"metric_function": "accuracy"}, "accuracy is a metric of the task itself"),
        ({"loss_function": "fails"}, r"own.py: fails\(\) raised RuntimeError: .*\(own.py:11: def fails"),
        (
            {"loss_function": "fails"},
            r"called with outputs of shape \(2, 3\) and targets of shape \(2,\), those of `task: cl",
        ),
        ({"loss_function": "own_loss", "classes": {"weights": "balanced"}}, "and there is a loss_function"),
    ],
)
def test_what_is_no_loss_or_metric(load_own: Any, options: Any, message: str) -> None:
    with pytest.raises((StageError, ManifestError), match=message):
        load_own(**options)


def test_their_names_are_checked_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    options = "file: own.py, function: items, task: classification, loss_function: three, metric_function: margine"
    (tmp_path / "m.yaml").write_text(f"version: 1\nname: m\nstages:\n  d: {{uses: data.python, with: {{{options}}}}}\n")
    with pytest.raises(ManifestError) as raised:
        load_plan(tmp_path / "m.yaml")
    assert [problem.message for problem in raised.value.problems] == [
        "d: three() needs weights, too: it is called with outputs and targets alone",
        "d: own.py has no function or class 'margine' at its top level",
    ]
