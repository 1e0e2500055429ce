"""`data.arrays`: files of arrays as they are, and what can't be a data set."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import save_file

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe_data import tasks
from ptpipe_data.array_paths import fingerprint
from ptpipe_data.config import ArraysConfig
from ptpipe_torch import ArrayInfo, Classification, Data, ImageInfo, MultiLabel, Regression, Unlabeled

Arrays = Mapping[str, npt.NDArray[Any]]
Load = Callable[..., Data]
NUM = 40


def arrays(num: int = NUM, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {
        "photos": rng.integers(0, 256, (num, 6, 8, 3), dtype=np.uint8),
        "sensors": rng.normal(size=(num, 5)),
        "tokens": rng.integers(0, 90, (num, 7)),
        "kind": np.arange(num) % 3,
        "flags": rng.integers(0, 2, (num, 4)),
        "height": rng.normal(1e6, 2.0, num),
    }


def write(path: Path, content: Arrays) -> Path:
    """Write arrays as what the name says: a folder where it has no suffix."""
    if path.suffix == ".npz":
        np.savez_compressed(path, **content)
    elif path.suffix == ".safetensors":
        save_file(dict(content), path)
    else:
        path.mkdir()
        for name, array in content.items():
            np.save(path / f"{name}.npy", array)
    return path


def options(path: Path, **changes: Any) -> ArraysConfig:
    given = {"path": str(path), "inputs": ["photos", "sensors", "tokens"], "images": ["photos"], "target": "kind"}
    return ArraysConfig.model_validate_json(json.dumps(given | {"task": "classification"} | changes), strict=True)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(path: Path, seed: int = 5, **changes: Any) -> Data:
        return front.load_arrays(options(path, **changes), Context("d", "data.arrays", seed, tmp_path))

    return load


@pytest.mark.parametrize("name", ["all.npz", "all.safetensors", "all"])
def test_inputs_of_several_kinds(tmp_path: Path, load: Load, name: str) -> None:
    content = arrays()
    data = load(write(tmp_path / name, content), names=["a", "b", "c"], batch_size=8)
    assert str(data.info.signature) == (
        "photos (batch, 3, 6, 8) float32, sensors (batch, 5) float32, tokens (batch, 7) int64 -> "
        "logits (batch, 3) float32"
    )
    assert data.info.task == Classification(class_names=("a", "b", "c"))
    assert data.info.inputs["sensors"] == ArrayInfo(dtype="float32", shape=(5,))
    assert {split: len(of) for split, of in data.splits.items()} == {
        "train": 30, "val": 2, "test": 8, "calibration": 30,
    }  # fmt: skip
    (folder := tmp_path / "stored").mkdir()
    data.save(folder)
    for of in (data, Data.load(folder)):
        (batch,) = of.batches("val")
        rows = [int(id_.rpartition("/")[2]) for id_ in of.splits["val"].ids[batch.indices_N.numpy()]]
        assert of.splits["val"].ids[0].startswith(name + "/")
        np.testing.assert_array_equal(batch.inputs["sensors"].numpy(), content["sensors"][rows].astype(np.float32))
        np.testing.assert_array_equal(batch.inputs["tokens"].numpy(), content["tokens"][rows])
        np.testing.assert_array_equal(batch.targets["labels"].numpy(), content["kind"][rows])
        photos = of.info.inputs["photos"]
        assert isinstance(photos, ImageInfo)
        pixels = content["photos"][rows].transpose(0, 3, 1, 2) / 255
        mean, std = (np.array(values)[:, None, None] for values in (photos.mean, photos.std))
        np.testing.assert_allclose(batch.inputs["photos"].numpy(), (pixels - mean) / std, atol=1e-5)


def test_every_task(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "all.npz", arrays())
    labels = load(path, task="multi_label", target="flags", names=["w", "x", "y", "z"])
    assert labels.info.task == MultiLabel(label_names=tuple("wxyz"))
    height = load(path, task="regression", target="height", loss="huber", huber_delta=2.0)
    assert isinstance(height.info.task, Regression)
    assert height.info.task.target_names == ("0",) and height.info.task.huber_delta == 2
    assert height.info.task.mean[0] == pytest.approx(1e6, abs=1) and height.info.task.std[0] == pytest.approx(
        2, rel=0.3
    )
    balanced = load(path, classes={"weights": "balanced", "positive": "1"})
    assert balanced.info.task.positive_class == "1" and len(balanced.info.task.class_weights) == 3


@pytest.mark.parametrize("shape", [(), (2,), (2, 5)])
def test_targets_that_float32_rounds_are_refused(tmp_path: Path, load: Load, shape: tuple[int, ...]) -> None:
    content = arrays() | {"height": np.random.default_rng(1).normal(-1e9, 60, (NUM, *shape))}
    changes = {"task": "regression", "target": "height"}
    with pytest.raises(StageError, match=r"^target '0': float32, .* has steps of 64 at 10\d+, .* subtract a constant"):
        load(write(tmp_path / "far.npz", content), **changes)
    assert load(write(tmp_path / "near.npz", content | {"height": content["height"] + 1e9}), **changes)


def test_regression_of_maps(tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    depths = np.random.default_rng(5).normal([[[3.0]], [[1e5]]], [[[0.5]], [[20.0]]], (NUM, 2, 6, 8))
    path = write(tmp_path / "all.npz", arrays() | {"depths": depths})
    chosen = {"task": "regression", "target": "depths", "names": ["near", "far"], "data_range": 10}
    monkeypatch.setattr(tasks, "_PART_VALUES", 300)  # several parts
    data = load(path, **chosen)
    task = data.info.task
    assert isinstance(task, Regression) and task.positions == (6, 8) and task.data_range == 10
    values = data.splits["train"].targets["targets"].values().astype(float)
    assert task.mean == pytest.approx(values.mean((0, 2, 3)), rel=1e-12)
    assert task.std == pytest.approx(values.std((0, 2, 3)), rel=1e-9)
    (batch,) = data.batches("train", batch_size=NUM)
    assert batch.targets["targets"].shape == (len(values), 2, 6, 8)
    constant = write(tmp_path / "constant.npz", arrays() | {"depths": np.full((NUM, 1, 6, 8), 7.1)})
    assert load(constant, **chosen | {"names": None}).info.task.std == (1.0,)
    with pytest.raises(StageError, match="names: 3 names for the 2 columns of depths"):
        load(path, **chosen | {"names": ["x", "y", "z"]})
    with pytest.raises(ValidationError, match="data_range is an option of the task regression"):
        load(path, data_range=1)


@pytest.mark.parametrize("channels", [None, 1, 3])
def test_every_usual_layout_of_images(tmp_path: Path, load: Load, channels: int | None) -> None:
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, (NUM, 6, 8, channels or 1), dtype=np.uint8)
    stored = pixels_NHWC[..., 0] if channels is None else np.moveaxis(pixels_NHWC, 3, 1)
    content = arrays() | {"photos": stored, "kind": np.arange(NUM) % 2 == 1}
    data = load(write(tmp_path / "all.npz", content), inputs=["photos"], test_size=0, val_size=0)
    assert data.info.task.class_names == ("0", "1"), "truth values are classes"
    assert data.info.signature.inputs[0].shape == ("batch", channels or 1, 6, 8)
    (batch,) = data.batches("train", batch_size=NUM, input_form="nhwc")
    assert np.array_equal(batch.input_arrays()["photos"], pixels_NHWC)
    assert np.array_equal(batch.targets["labels"], content["kind"])


def test_truth_values_as_masks(tmp_path: Path, load: Load) -> None:
    masks_NHW = arrays()["photos"][..., 0] > 100
    path = write(tmp_path / "all.npz", arrays() | {"kind": masks_NHW})
    data = load(path, inputs=["photos"], task="segmentation", test_size=0, val_size=0)
    assert data.info.task.class_names == ("0", "1")
    (masks,) = data.splits["train"].targets.values()
    assert np.array_equal(masks.values(), masks_NHW)


def test_unlabeled(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "all.npz", arrays())
    data = load(path, task="unlabeled", target=None)
    assert type(data.info.task) is Unlabeled and list(data.info.inputs) == ["photos", "sensors", "tokens"]
    assert len(data.splits["train"]) + len(data.splits["val"]) + len(data.splits["test"]) == NUM
    for wrong in ({"task": "unlabeled"}, {"target": None}):
        with pytest.raises(ValidationError, match="target: every task has one, but for the task unlabeled"):
            load(path, **wrong)


def test_files_of_their_own_for_val_and_test(tmp_path: Path, load: Load) -> None:
    for name, num in (("train", 20), ("val", 5), ("test", 7)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "all.npz", arrays(num))
    own = {f"{name}_path": str(tmp_path / name / "all.npz") for name in ("val", "test")}
    data = load(tmp_path / "train" / "all.npz", **own)
    assert [len(data.splits[name]) for name in ("train", "val", "test")] == [20, 5, 7]
    assert data.splits["test"].ids[0] == f"{tmp_path}/test/all.npz/0"


def test_a_file_called_train_has_the_name_of_its_folder(tmp_path: Path, load: Load) -> None:
    (tmp_path / "signals").mkdir()
    assert load(write(tmp_path / "signals" / "train.npz", arrays())).info.name == "signals"


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    path = write(tmp_path / "all", arrays())
    before = fingerprint(options(path))
    np.save(path / "kind.npy", np.arange(NUM) % 3)
    assert fingerprint(options(path)) == before
    np.save(path / "kind.npy", np.arange(NUM) % 2)
    assert fingerprint(options(path)) != before


def test_the_fingerprint_imports_no_numpy(tmp_path: Path) -> None:
    path = write(tmp_path / "all", arrays())
    code = (
        "import sys; from ptpipe_data.array_paths import fingerprint; from ptpipe_data.config import ArraysConfig; "
        f"fingerprint(ArraysConfig(path={str(path)!r}, inputs=('tokens',), target='kind', task='classification')); "
        "print({'torch', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_a_network_that_takes_all_of_them_could_be_trained(tmp_path: Path, load: Load) -> None:
    data = load(write(tmp_path / "all.npz", arrays()), batch_size=4)
    for batch in data.batches("train", channels_last=True):
        photos, sensors, tokens = batch.args
        assert photos.is_contiguous(memory_format=torch.channels_last)
        assert sensors.dtype == torch.float32 and tokens.dtype == torch.int64


def nan(content: dict[str, Any]) -> None:
    content["sensors"][3, 1] = np.nan


def beyond_float32(content: dict[str, Any]) -> None:
    content["sensors"][4, 0] = 1e300


def shorter(content: dict[str, Any]) -> None:
    content["tokens"] = content["tokens"][:-1]


def objects(content: dict[str, Any]) -> None:
    content["tokens"] = np.array([["a"], ["b"]] * (NUM // 2))


def float_labels(content: dict[str, Any]) -> None:
    content["kind"] = content["kind"].astype(np.float32)


def bytes_of_names(content: dict[str, Any]) -> None:
    content["kind"] = np.array(["a", "b"] * (NUM // 2)).astype("S")


def float_label_column(content: dict[str, Any]) -> None:
    content["kind"] = content["kind"].astype(np.float32)[:, np.newaxis]


def one_hot(content: dict[str, Any]) -> None:
    content["kind"] = np.eye(3)[content["kind"] % 3]


def samples_of_16_bits(content: dict[str, Any]) -> None:
    content["sensors"] = (1000 * content["sensors"]).astype(np.int16)


def negative_label(content: dict[str, Any]) -> None:
    content["kind"][:] = -1


def float_photos(content: dict[str, Any]) -> None:
    content["photos"] = content["photos"] / 255


def complex_sensors(content: dict[str, Any]) -> None:
    content["sensors"] = content["sensors"] * 1j


def unsigned_tokens(content: dict[str, Any]) -> None:
    content["tokens"] = content["tokens"].astype(np.uint32)


def no_rows(content: dict[str, Any]) -> None:
    for name in content:
        content[name] = content[name][:0]


def no_values(content: dict[str, Any]) -> None:
    content["sensors"] = content["sensors"][:, :0]


def misspelt(content: dict[str, Any]) -> None:
    content["sensor"] = content.pop("sensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan, r"all: row 3 of sensors is not finite"),
        (beyond_float32, r"all: row 4 of sensors is not finite in float32"),
        (shorter, r"different numbers of rows: photos 40, sensors 40, tokens 39, kind 40"),
        (objects, r"tokens holds <U1 of shape \(40, 1\), not rows of numbers"),
        (float_labels, r"kind holds float32 of shape \(40,\); a classification's target are integers"),
        (float_labels, r"names \(N,\): give `kind.astype\(int\)`$"),
        (float_label_column, r"shape \(40, 1\); .* names \(N,\): give `kind.astype\(int\)`$"),
        (one_hot, r"kind holds float32 of shape \(40, 3\); .* give `kind.argmax\(1\)` of one-hot rows$"),
        (bytes_of_names, r"kind holds \|S1 of shape \(40,\), not rows of numbers: save names as `kind.astype\(str\)`$"),
        (samples_of_16_bits, r"sensors holds int16 of .*: save `sensors.astype\('float32'\)` where they are measured"),
        (negative_label, r"has the label -1; classes are numbered 0 to"),
        (float_photos, r"photos holds float32 of shape \(40, 6, 8, 3\), not pixels: uint8"),
        (complex_sensors, r"sensors holds complex128 of shape \(40, 5\), not rows of numbers"),
        (unsigned_tokens, r"tokens holds uint32 of shape \(40, 7\); inputs are float32, int64"),
        (no_rows, r"all: photos, of shape \(0, 6, 8, 3\), has no rows"),
        (no_values, r"all: sensors, of shape \(40, 0\), has no values"),
        (misspelt, r"no array 'sensors' \(did you mean 'sensor'\?\)"),
    ],
)
def test_what_is_no_data_set_is_named(tmp_path: Path, load: Load, spoil: Any, message: str) -> None:
    content = arrays()
    spoil(content)
    with pytest.raises(StageError, match=message):
        load(write(tmp_path / "all", content))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("all.npz", b"PK nonsense", "all.npz can't be read"),
        ("all.safetensors", b"\x08", "all.safetensors can't be read"),
        ("all.npy", b"x", "all.npy: arrays are in .npz or .safetensors files, or in folders of .npy files"),
        ("all.pkl", b"\x80\x04", "all.pkl: arrays are in"),
    ],
)
def test_files_of_something_else(tmp_path: Path, load: Load, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StageError, match=message):
        load(tmp_path / name)


def test_pickled_arrays_are_not_loaded(tmp_path: Path, load: Load) -> None:
    np.savez(tmp_path / "all.npz", **arrays() | {"sensors": np.array([{}] * NUM, dtype=object)})
    with pytest.raises(StageError, match=r"all\.npz can't be read: .*allow_pickle"):
        load(tmp_path / "all.npz")


def test_a_truncated_file(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "all", arrays())
    (path / "sensors.npy").write_bytes((path / "sensors.npy").read_bytes()[:-9])
    with pytest.raises(StageError, match="all can't be read"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": ["kind", "tokens"], "images": []}, "'kind' is named twice, in inputs or as target"),
        ({"images": ["kind"]}, "images: 'kind' is not among the inputs"),
        ({"classes": {}, "task": "regression"}, "classes is an option of the task classification"),
        ({"loss": "mae"}, "loss is an option of the task regression"),
        ({"names": ["a", "b", "a"]}, "names\n.*has 'a' twice"),
    ],
)
def test_options_that_do_not_fit_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(Path("x"), **changes)


def test_names_of_the_task_are_no_names_of_inputs(tmp_path: Path, load: Load) -> None:
    content = arrays()
    content["logits"] = content["sensors"]
    with pytest.raises(StageError, match="an input can't be called 'logits'"):
        load(write(tmp_path / "all", content), inputs=["logits"], images=[])


@pytest.mark.parametrize(
    ("changes", "task", "message"),
    [
        (
            {"sensors": np.zeros((9, 4))},
            {},
            r"sensors holds float32 of shape \(N, 4\), and float32 of shape \(N, 5\) in ",
        ),
        ({"tokens": np.zeros((9, 7), np.int32)}, {}, r"tokens holds int32 of shape \(N, 7\), and int64 of shape"),
        (
            {"flags": np.zeros((9, 3), np.int64)},
            {"target": "flags", "task": "multi_label"},
            r"flags holds float32 of shape \(N, 3\), and float32 of shape \(N, 4\) in .*train",
        ),
    ],
)
@pytest.mark.parametrize("split", ["val", "test"])
def test_other_splits_hold_what_train_holds(
    tmp_path: Path, load: Load, split: str, changes: Arrays, task: dict[str, str], message: str
) -> None:
    path, other = write(tmp_path / "train", arrays()), write(tmp_path / "other.npz", arrays(9) | changes)
    with pytest.raises(StageError, match=r"other\.npz: " + message):
        load(path, **{f"{split}_path": str(other)}, **task)


def classes_of(*labels: int) -> Arrays:
    return {"x": np.arange(len(labels), dtype=np.float32).reshape(-1, 1), "y": np.array(labels)}


def test_numbers_that_are_no_classes(tmp_path: Path, load: Load) -> None:
    ids = write(tmp_path / "ids.npz", classes_of(*range(5_000_000_000, 5_000_000_060)))
    options = {"inputs": ["x"], "images": [], "target": "y"}
    with pytest.raises(StageError, match=r"y has the class 5000000059: classes are numbered 0, 1, 2, \.\.\."):
        load(ids, **options)
    with pytest.raises(StageError, match="train has samples of one class, 0: a classification needs two"):
        load(write(tmp_path / "one.npz", classes_of(*[0] * 20)), **options)


def test_classes_without_samples_are_reported(tmp_path: Path, ctx: Context, events: Any) -> None:
    path = write(tmp_path / "all.npz", classes_of(*[1, 2, 4] * 20))
    given = options(path, inputs=["x"], images=[], target="y")
    assert front.load_arrays(given, ctx).info.task.num_classes == 5
    assert events.notices == ["train has nothing of 2 of 5 classes: 0, 3"]


def test_masks_of_one_class_and_the_ignored_value(tmp_path: Path, load: Load) -> None:
    content = arrays()
    content["mask"] = np.where(content["photos"][..., 0] > 127, 255, 0).astype(np.uint8)
    path = write(tmp_path / "all.npz", content)
    options = {"inputs": ["photos"], "target": "mask", "task": "segmentation"}
    with pytest.raises(StageError, match="train's masks have nothing but the class '0' and the ignored value 255"):
        load(path, **options)
