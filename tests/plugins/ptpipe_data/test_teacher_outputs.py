"""`data.teacher_outputs`: what a model returns becomes the targets of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ptpipe import Context, StageError
from ptpipe_data.teacher_outputs import with_teacher_outputs
from ptpipe_torch import (
    ArrayColumn,
    ArrayInfo,
    Data,
    DatasetInfo,
    Deployable,
    ImageInfo,
    LoaderOptions,
    Predictor,
    Signature,
    Split,
    TeacherOutputs,
    TensorSpec,
    Unlabeled,
)

Outputs = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class FunctionModel(Deployable):
    """A format of somebody's: a function of NumPy arrays."""

    function: Callable[[npt.NDArray[Any]], Outputs]
    specs: tuple[TensorSpec, ...]
    form: Any = "normalized"
    sizes: tuple[int | str, ...] = (3,)

    format = "numpy"
    size_bytes = 1

    @property
    def signature(self) -> Signature:
        return Signature((TensorSpec("x", "float32", ("batch", *self.sizes)),), self.specs)

    @property
    def input_form(self) -> Any:
        return self.form

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        def predict(inputs: Mapping[str, npt.NDArray[Any]]) -> Outputs:
            return self.function(inputs["x"])

        yield predict

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    @classmethod
    def load(cls, folder: Path) -> Any:
        raise NotImplementedError


def spec(name: str, *shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, ("batch", *shape))


def two_outputs(x: npt.NDArray[Any]) -> Outputs:
    return {
        "scaled": np.stack([100 * x[:, :2], x[:, 1:]], 1),  # (B, 2, 2)
        "mean": x.mean(1, dtype=np.float64),
        "best": x.argmax(1),
    }


SPECS = (spec("scaled", 2, 2), spec("mean", dtype="float64"), spec("best", dtype="int64"))


@pytest.fixture
def data() -> Data:
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    ids, column = np.array([f"s/{n}" for n in range(60)]), ArrayColumn(x)
    every = Split(ids, {"x": column}, {})
    rows = {"train": range(40), "val": range(40, 50), "test": range(50, 60), "calibration": (7, 45, 3)}
    splits = {name: every.subset(np.array(of)) for name, of in rows.items()}
    info = DatasetInfo("rows", {"x": ArrayInfo(dtype="float32", shape=(3,))}, Unlabeled())
    return Data(info, splits, LoaderOptions(batch_size=16))


def test_targets_are_the_outputs_of_each_sample_in_every_split(data, ctx: Context, tmp_path) -> None:
    taught = with_teacher_outputs(ctx, FunctionModel(two_outputs, SPECS), data)
    (tmp_path / "stored").mkdir()
    taught.save(tmp_path / "stored")
    for each in (taught, Data.load(tmp_path / "stored")):
        for split, samples in data.splits.items():
            expected = two_outputs(samples.inputs["x"].values())
            assert each.splits[split].targets.keys() == {"scaled", "mean"}
            for name, column in each.splits[split].targets.items():
                np.testing.assert_array_equal(column.values(), expected[name].astype(np.float32))
            assert (each.splits[split].ids == samples.ids).all()
    assert taught.info.signature.outputs == SPECS and taught.loader == data.loader


def test_a_teacher_of_inputs_of_any_size_has_outputs_of_the_data_sets(data, ctx: Context) -> None:
    teacher = FunctionModel(lambda x: {"y": np.concatenate([x, x], 1)}, (spec("y", "2*width"),), sizes=("width",))
    taught = with_teacher_outputs(ctx, teacher, data)
    assert taught.info.signature.outputs == (spec("y", 6),)
    assert taught.splits["train"].targets["y"].values().shape == (40, 6)


def test_a_sample_of_several_splits_is_predicted_and_stored_once(data, ctx: Context, tmp_path) -> None:
    seen = []

    def counting(x: npt.NDArray[Any]) -> Outputs:
        seen.extend(x[:, 0].tolist())
        return two_outputs(x)

    taught = with_teacher_outputs(ctx, FunctionModel(counting, SPECS), data)
    assert len(seen) == len(set(seen)) == 60
    folder = tmp_path / "stored"
    folder.mkdir()
    taught.save(folder)
    assert sorted(np.load(file).shape for file in folder.glob("column_?.npy")) == [(60,), (60, 2, 2), (60, 3)]


def test_statistics_are_those_of_train_along_the_axis_where_sizes_differ(data, ctx: Context) -> None:
    task = with_teacher_outputs(ctx, FunctionModel(two_outputs, SPECS), data).info.task
    assert isinstance(task, TeacherOutputs)
    scaled, mean, best = task.every_output
    expected = two_outputs(data.splits["train"].inputs["x"].values())
    assert scaled.channel_axis == 0 and not best.std
    np.testing.assert_allclose(scaled.std, expected["scaled"].std((0, 2)), rtol=1e-6)
    np.testing.assert_allclose(mean.std, [expected["mean"].std()], rtol=1e-6)

    def swapped(x: npt.NDArray[Any]) -> Outputs:
        return {"scaled": two_outputs(x)["scaled"].swapaxes(1, 2)}

    task = with_teacher_outputs(ctx, FunctionModel(swapped, SPECS[:1]), data).info.task
    assert isinstance(task, TeacherOutputs) and task.every_output[0].channel_axis == 1
    assert task.every_output[0].std == pytest.approx(scaled.std)


def test_a_teacher_that_normalizes_itself_gets_bytes(ctx: Context) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 5, 3), np.uint8)
    split = Split(np.array(list("abcd")), {"x": ArrayColumn(pixels)}, {})
    image = ImageInfo(shape_CHW=(3, 5, 5), mean=(0.5,) * 3, std=(0.5,) * 3)
    images = Data(DatasetInfo("images", {"x": image}, Unlabeled()), {"train": split})
    model = FunctionModel(lambda x: {"y": x.astype(np.float32).mean((1, 2))}, (spec("y", 3),), "nhwc", (3, 5, 5))
    taught = with_teacher_outputs(ctx, model, images)
    np.testing.assert_allclose(taught.splits["train"].targets["y"].values(), pixels.mean((1, 2)), rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            FunctionModel(lambda x: {"y": x.argmax(1)}, (spec("y", dtype="int64"),)),
            r"the model returns y \(batch\) int64: no floats that a network could learn",
        ),
        (
            FunctionModel(lambda x: {"y": x}, (spec("y", "length", 4),)),
            r"the model returns y \(batch, length, 4\) float32, whose length differs from batch to batch",
        ),
        (
            FunctionModel(lambda x: {"y": np.where(x > 1.9, np.inf, x)}, (spec("y", 3),)),
            r"the model: the y of sample s/\d+ is not finite",
        ),
        (
            FunctionModel(lambda x: {"y": x}, (spec("y", 3),), sizes=(4,)),
            r"the model takes x \(batch, 4\) float32; rows",
        ),
        (FunctionModel(lambda x: {"y": x[:1]}, (spec("y", 3),)), r"the model returned something other than y"),
    ],
)
def test_what_can_not_be_a_target_is_named_and_leaves_nothing_behind(data, ctx: Context, model, message) -> None:
    before = sorted(ctx.scratch.iterdir())
    with pytest.raises(StageError, match=message):
        with_teacher_outputs(ctx, model, data)
    assert sorted(ctx.scratch.iterdir()) == before


def test_augmented_data_is_refused_before_the_teacher_runs(data, ctx: Context) -> None:
    pixels = ArrayColumn(np.zeros((1, 5, 5, 3), np.uint8))
    image = ImageInfo(shape_CHW=(3, 5, 5), mean=(0.5,) * 3, std=(0.5,) * 3)
    images = Data(
        DatasetInfo("images", {"x": image}, Unlabeled()),
        {"train": Split(np.array(["a"]), {"x": pixels}, {})},
        LoaderOptions(augment=("flip",)),
    )

    def never(x: npt.NDArray[Any]) -> Outputs:
        raise AssertionError(x)

    with pytest.raises(StageError, match=r"^augment: y is what the teacher returned"):
        with_teacher_outputs(ctx, FunctionModel(never, (spec("y", 3),), sizes=(3, 5, 5)), images)
