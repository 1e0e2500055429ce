"""Tables of real files, read as a stage reads them.

Shape legend: N rows of a split, F numeric columns, C categorical columns, T targets.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import ValidationError

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe_data.table_columns import CategoriesInfo, NumbersInfo
from ptpipe_torch import Classification, Data, MultiLabel, Regression, Signature

from ...datasets import class_names_of, labels_of

Columns = Mapping[str, Sequence[Any]]
Load = Callable[..., Data]
NO_SPLITS: dict[str, Any] = {"test_size": 0, "val_size": 0}
REGRESSION: dict[str, Any] = {"task": "regression", "targets": ["y"]}
CLASSIFICATION: dict[str, Any] = {"task": "classification", "targets": ["y"]}
PYARROW = int(pa.__version__.partition(".")[0])


def config(path: Path, /, **options: Any) -> front.TableConfig:
    """The options as a manifest gives them."""
    return front.TableConfig.model_validate_json(json.dumps({"path": str(path)} | REGRESSION | options), strict=True)


def write(path: Path, columns: Columns) -> Path:
    """Write a table as what its name says; None is a missing value."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(dict(columns)), path)
        return path
    with path.open("w", newline="", encoding="utf-8") as file:
        objects = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if path.suffix == ".json":
            json.dump(objects, file, indent=2)
            return path
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in objects)
            return path
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


@pytest.fixture
def load(ctx: Context) -> Load:
    """Read a table as the stage does, without test and val unless they are asked for."""

    def load(path: Path, seed: int = 7, **options: Any) -> Data:
        seeded = Context(ctx.stage_id, ctx.kind, seed=seed, scratch=ctx.scratch, _tell=ctx._tell)
        defaults = {name: size for name, size in NO_SPLITS.items() if name.replace("size", "path") not in options}
        return front.load_table(config(path, **defaults | options), seeded)

    return load


@pytest.fixture(params=[".csv", ".tsv", ".jsonl", ".json", ".parquet"])
def suffix(request: pytest.FixtureRequest) -> str:
    return request.param


def houses(num: int = 60) -> dict[str, list[Any]]:
    """Two numbers, a text, a boolean and a number that is a category; `y` and `z` are numbers too."""
    rng = np.random.default_rng(3)
    return {
        "size": rng.normal(120, 30, num).tolist(),
        "town": rng.choice(["Ulm", "Ålesund", "Rome, Italy"], num).tolist(),
        "rooms": rng.integers(1, 9, num).tolist(),
        "sold": rng.choice([True, False], num).tolist(),
        "zone": rng.choice([10, 9, 2], num).tolist(),
        "y": rng.normal(1e5, 2e4, num).tolist(),
        "z": rng.normal(0, 1, num).tolist(),
    }


def rows_of(data: Data, split: str) -> list[int]:
    """The rows of the file, counted from 0."""
    return [int(id_.rpartition("/")[2]) - 1 for id_ in data.splits[split].ids.tolist()]


def ids(data: Data, split: str) -> list[str]:
    return data.splits[split].ids.tolist()


def sizes(data: Data) -> list[int]:
    return [len(split) for split in data.splits.values()]


def batch_of(data: Data, split: str = "train") -> dict[str, torch.Tensor]:
    """The tensors of a whole split."""
    (batch,) = data.batches(split, batch_size=10_000)
    return {**batch.inputs, **batch.targets}


def numbers_of(data: Data, split: str = "train") -> npt.NDArray[np.float64]:
    """The numeric columns, (N, F), in the units of the file."""
    info = data.info.inputs["numbers"]
    return batch_of(data, split)["numbers"].double().numpy() * info.std + info.mean


def test_a_model_of_other_columns_or_categories_does_not_fit(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "houses.csv", houses())
    columns = ["size", "rooms", "town"]
    signature = load(path, targets=["y"], features=columns).info.signature
    moved = write(tmp_path / "moved.csv", {**houses(), "town": ["Ulm", "Oslo", "Rome"] * 20})
    with pytest.raises(StageError, match=r"takes categories of \[town: 3 categories \w{12}\]; moved has \[town: 3 cat"):
        load(moved, targets=["y"], features=columns).info.check_fit("net", signature)
    with pytest.raises(StageError, match=r"takes numbers of \[size, rooms\]; houses has \[rooms, size\]"):
        load(path, targets=["y"], features=["rooms", "size", "town"]).info.check_fit("net", signature)
    with pytest.raises(StageError, match=r"returns predictions of \[y\]; houses has \[z\]"):
        load(path, targets=["z"], features=columns).info.check_fit("net", signature)
    load(path, targets=["y"], features=columns, batch_size=7).info.check_fit("net", signature)


def test_a_model_of_other_statistics_does_not_fit(tmp_path: Path, load: Load) -> None:
    """Numbers of another file, standardized by its own mean and standard deviation, stand for something else."""
    january = load(write(tmp_path / "january.csv", {"a": [1.5, 2.5], "y": [1, 2]})).info
    february = load(write(tmp_path / "february.csv", {"a": [11.5, 12.5], "y": [1, 2]})).info
    message = (
        r"^net takes numbers of \[a: mean 2, std 0\.5\]; february has \[a: mean 12, std 0\.5\]: the same numbers stand "
        r"for something else there\. Give .* one data stage its own val and test \(`val_path`, `test_path`\)$"
    )
    with pytest.raises(StageError, match=message):
        february.check_fit("net", january.signature)
    february.check_fit("net", january.signature, retrained=True)
    of_names = Signature(january.signature.inputs, january.signature.outputs, {"numbers": ("a",)})
    february.check_fit("net", of_names)  # a former model, or a file that standardizes by itself
    assert january.inputs["numbers"].raw_form("numbers", "nhwc").meaning == ("a",)
    for wrong in (("b",), ("a", "a: mean 2"), ("a", "a: mean 2, std 0.5", "b: mean 2, std 0.5")):
        with pytest.raises(StageError, match="Use the same tokenizer, categories or classes for both"):
            february.check_fit("net", replace(of_names, meanings={"numbers": wrong}), retrained=True)


def test_types_are_found(tmp_path: Path, load: Load, suffix: str) -> None:
    table = houses()
    data = load(write(tmp_path / f"houses{suffix}", table), targets=["y", "z"], categorical=["zone"])
    assert data.info.name == "houses"
    assert list(data.info.inputs) == ["numbers", "categories"]
    numbers, categories = data.info.inputs["numbers"], data.info.inputs["categories"]
    assert isinstance(numbers, NumbersInfo) and numbers.names == ("size", "rooms")
    assert isinstance(categories, CategoriesInfo) and categories.names == ("town", "sold", "zone")
    assert categories.categories == (("Rome, Italy", "Ulm", "Ålesund"), ("false", "true"), ("2", "9", "10"))
    assert categories.vocabulary_sizes == (4, 3, 4)
    assert str(data.info.signature.inputs[0]) == "numbers (batch, 2) float32"
    assert str(data.info.signature.inputs[1]) == "categories (batch, 3) int64"
    assert isinstance(data.info.task, Regression) and data.info.task.target_names == ("y", "z")

    train, rows = data.splits["train"], rows_of(data, "train")
    assert batch_of(data)["numbers"].dtype == batch_of(data)["targets"].dtype == torch.float32
    assert batch_of(data)["categories"].dtype == torch.int64
    for row, numbers_F, categories_C, targets_T in zip(
        rows,
        numbers_of(data),
        train.inputs["categories"].values(),
        train.targets["targets"].values(),
        strict=True,
    ):
        assert numbers_F.tolist() == pytest.approx([table["size"][row], table["rooms"][row]], rel=1e-5)
        assert targets_T.tolist() == np.float32([table["y"][row], table["z"][row]]).tolist()
        texts = [table["town"][row], str(table["sold"][row]).lower(), str(table["zone"][row])]
        assert texts == [values[place - 1] for values, place in zip(categories.categories, categories_C, strict=True)]


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (pa.dictionary(pa.int32(), pa.string()), ("1a", "2b")),
        (pa.large_string(), ("1a", "2b")),
        (pa.string_view(), ("1a", "2b")),
    ],
    ids=str,
)
def test_every_kind_of_text_in_parquet_is_categories(
    tmp_path: Path, load: Load, types: pa.DataType, expected: tuple[str, ...]
) -> None:
    if types == pa.string_view() and PYARROW < 22:
        pytest.skip("older pyarrow does not write them")
    text = pa.array(["2b", "1a", "2b", "1a"]).cast(types)
    data = load(write(tmp_path / "t.parquet", {"a": text, "y": [1.0, 2.0, 3.0, 4.0]}))
    assert data.info.inputs["categories"].categories == (expected,)
    assert data.splits["train"].inputs["categories"].values().ravel().tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "float32", "decimal"])
def test_every_kind_of_number_in_parquet_is_a_number(tmp_path: Path, load: Load, dtype: str) -> None:
    if dtype == "decimal":
        column = pa.array([decimal.Decimal(number) for number in (3, 1, 2)], pa.decimal128(5, 2))
    else:
        column = pa.array(np.array([3, 1, 2], dtype))
    data = load(write(tmp_path / "t.parquet", {"a": column, "y": [1.0, 2.0, 3.0]}))
    assert numbers_of(data).ravel().tolist() == pytest.approx([3, 1, 2])
    assert data.info.inputs["numbers"].mean == (2.0,)


def test_inputs_of_one_type_alone(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "houses.csv", houses())
    assert list(load(path, features=["rooms", "size"]).info.inputs) == ["numbers"]
    assert load(path, features=["rooms", "size"]).info.inputs["numbers"].names == ("rooms", "size")
    assert list(load(path, features=["zone", "town"], categorical=["zone"]).info.inputs) == ["categories"]
    everything = load(path)
    assert everything.info.inputs["numbers"].names == ("size", "rooms", "zone", "z")


def test_numbers_are_standardized_over_train_alone(tmp_path: Path, load: Load, suffix: str) -> None:
    table = houses()
    data = load(write(tmp_path / f"t{suffix}", table), test_size=20, val_size=10, features=["size", "rooms"])
    assert sizes(data) == [30, 10, 20, 30]
    values_NF = np.array([table["size"], table["rooms"]]).T
    train_NF = values_NF[rows_of(data, "train")]
    info = data.info.inputs["numbers"]
    np.testing.assert_allclose(info.mean, train_NF.mean(0), rtol=1e-12)
    np.testing.assert_allclose(info.std, train_NF.std(0), rtol=1e-12)
    for split in data.splits:
        expected_NF = (values_NF[rows_of(data, split)] - train_NF.mean(0)) / train_NF.std(0)
        np.testing.assert_allclose(batch_of(data, split)["numbers"].numpy(), expected_NF, atol=1e-5)
    targets_N = np.array(table["y"])[rows_of(data, "train")]
    assert data.info.task.mean == pytest.approx((targets_N.mean(),), rel=1e-12)
    assert data.info.task.std == pytest.approx((targets_N.std(),), rel=1e-12)
    assert batch_of(data)["targets"].ravel().tolist() == targets_N.astype(np.float32).tolist(), "in their own units"


@pytest.mark.parametrize("value", [0.0, 5.0, 0.1, -1234.1, 1e-30])
def test_a_constant_is_only_centred(tmp_path: Path, load: Load, value: float) -> None:
    """Rounding leaves a constant column a standard deviation that is not 0: by it, another value would be huge."""
    train = write(tmp_path / "train.csv", {"a": [value] * 12, "y": [value] * 12})
    test = write(tmp_path / "test.csv", {"a": [value + 1], "y": [value]})
    data = load(train, test_path=str(test))
    assert data.info.inputs["numbers"].std == data.info.task.std == (1.0,)
    assert batch_of(data)["numbers"].abs().max() < 1e-3
    assert batch_of(data, "test")["numbers"].item() == pytest.approx(1, abs=1e-3)


def test_large_numbers_keep_the_digits_in_which_they_differ(tmp_path: Path, load: Load) -> None:
    """Seconds since 1970 of a day: float32 has steps of 128 there."""
    table = {"time": [1_750_000_000 + 7 * number for number in range(100)], "y": list(range(100))}
    data = load(write(tmp_path / "t.csv", table))
    expected_N = (np.array(table["time"]) - np.mean(table["time"])) / np.std(table["time"])
    np.testing.assert_allclose(batch_of(data)["numbers"].ravel().numpy(), expected_N, atol=1e-4)


def test_targets_that_float32_rounds_are_refused(tmp_path: Path, load: Load) -> None:
    """Seconds since 1970 of an hour: of 60 values, float32 leaves 8."""
    times = [1_750_000_000 + 15 * number for number in range(60)]
    path = write(tmp_path / "t.csv", {"a": list(range(60)), "z": [1.5, 2.5] * 30, "y": times})
    message = r"^target 'y': float32, .* steps of 128 at 1750000885, .* deviation is 260: subtract a constant"
    with pytest.raises(StageError, match=message):
        load(path, targets=["z", "y"])
    write(path, {"a": list(range(60)), "y": [time - 1_750_000_000 for time in times]})
    assert len(set(batch_of(load(path))["targets"].ravel().tolist())) == 60
    write(path, {"a": list(range(60)), "y": [1_750_000_000] * 60})
    assert load(path).info.task.std == (1.0,), "a constant"
    assert load(path, targets=["a"], train_size=0, calibration_size=0).info.task.std == (1.0,), "no row"


def test_categories_are_those_of_train_and_0_is_any_other(tmp_path: Path, load: Load, suffix: str) -> None:
    train = write(tmp_path / f"train{suffix}", {"town": ["b", "a", "b"], "y": [1.0, 2.0, 3.0]})
    test = write(tmp_path / f"test{suffix}", {"town": ["c", "b", "a"], "y": [1.0, 2.0, 3.0]})
    data = load(train, test_path=str(test))
    assert data.info.inputs["categories"].categories == (("a", "b"),)
    assert batch_of(data)["categories"].ravel().tolist() == [2, 1, 2]
    assert batch_of(data, "test")["categories"].ravel().tolist() == [0, 2, 1]


def test_a_category_that_was_drawn_into_test_alone_is_0(tmp_path: Path, load: Load) -> None:
    table = {"id": [f"n{number}" for number in range(20)], "y": list(range(20))}
    data = load(write(tmp_path / "t.csv", table), test_size=5)
    assert len(data.info.inputs["categories"].categories[0]) == 15
    assert set(batch_of(data, "test")["categories"].ravel().tolist()) == {0}
    assert 0 not in batch_of(data)["categories"]


@pytest.mark.parametrize(
    ("train", "test"),
    [(["001", "002", "0A"], ["001", "002"]), (["1.0", "2.5", "2.5"], ["1", "2"])],
    ids=["text and integers", "floats and integers"],
)
def test_a_category_is_the_same_in_every_file(tmp_path: Path, load: Load, train: list[str], test: list[str]) -> None:
    """Also where a file on its own would read as of another type: `001` is a number where no `0A` is."""
    data = load(
        write(tmp_path / "train.csv", {"c": train, "y": [1, 2, 3]}),
        test_path=str(write(tmp_path / "test.csv", {"c": test, "y": [1, 2]})),
        categorical=["c"],
    )
    assert batch_of(data, "test")["categories"].ravel().tolist() == [1, 2 if test[1] in train else 0]


@pytest.mark.parametrize(("train", "test"), [(["001", "0A"], ["001"]), (["True", "maybe"], ["True"])])
def test_a_class_is_the_same_in_every_file(tmp_path: Path, load: Load, train: list[str], test: list[str]) -> None:
    data = load(
        write(tmp_path / "train.csv", {"a": [1, 2], "y": train}),
        test_path=str(write(tmp_path / "test.csv", {"a": [1], "y": test})),
        **CLASSIFICATION,
    )
    assert labels_of(data.splits["test"]).tolist() == [train.index(test[0])]


def test_classes_are_sorted(tmp_path: Path, load: Load, suffix: str) -> None:
    table = {"a": [1.0, 2.0, 3.0, 4.0], "y": ["pear", "apple", "fig", "apple"]}
    data = load(write(tmp_path / f"t{suffix}", table), **CLASSIFICATION)
    assert isinstance(data.info.task, Classification) and class_names_of(data.info) == ("apple", "fig", "pear")
    labels_N = labels_of(data.splits["train"])
    assert labels_N.dtype == np.int64 and labels_N.tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize(
    ("labels", "names"), [([1, 0, 1], ("0", "1")), ([True, False, True], ("false", "true"))], ids=["integers", "bools"]
)
def test_classes_may_be_numbers(
    tmp_path: Path, load: Load, suffix: str, labels: list[Any], names: tuple[str, ...]
) -> None:
    data = load(write(tmp_path / f"t{suffix}", {"a": [1.5, 2.5, 3.5], "y": labels}), **CLASSIFICATION)
    assert class_names_of(data.info) == names and labels_of(data.splits["train"]).tolist() == [1, 0, 1]


def test_the_loss_of_a_regression_is_the_configs(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "t.csv", {"a": [1, 2, 3], "y": [1, 2, 3]})
    assert load(path).info.task.loss == "mse"
    assert load(path, loss="huber").info.task.loss == "huber"


def test_ids_name_the_file_and_the_row(tmp_path: Path, load: Load, suffix: str) -> None:
    table = {"a": [1.0, 2.0, 3.0], "y": [1.0, 2.0, 3.0]}
    path = write(tmp_path / f"own{suffix}", table)
    assert ids(load(path), "train") == [f"own{suffix}/{number}" for number in (1, 2, 3)]
    other = write(tmp_path / "other.csv", table)
    assert ids(load(path, test_path=str(other)), "test") == [f"other.csv/{number}" for number in (1, 2, 3)]


def test_files_of_one_name_in_several_folders(tmp_path: Path, load: Load) -> None:
    paths = {}
    for split in ("train", "val", "test"):
        (tmp_path / split).mkdir()
        paths[split] = str(write(tmp_path / split / "data.csv", {"a": [1.0, 2.0], "y": [1.0, 2.0]}))
    data = load(Path(paths["train"]), val_path=paths["val"], test_path=paths["test"])
    assert sizes(data) == [2, 2, 2, 2]


def test_val_and_test_of_their_own_files(tmp_path: Path, load: Load, suffix: str) -> None:
    paths = {
        name: str(write(tmp_path / f"{name}{suffix}", {"a": [start + n for n in range(num)], "y": [0.0] * num}))
        for name, start, num in (("train", 0.0, 6), ("val", 100.0, 3), ("test", 200.0, 4))
    }
    options = {"val_path": paths["val"], "test_path": paths["test"]}
    data = load(Path(paths["train"]), **options | {"test_size": None, "val_size": 0.5})
    assert sizes(data) == [6, 3, 4, 6]
    for split, start in (("train", 0), ("val", 100), ("test", 200)):
        values_N = numbers_of(data, split).ravel()
        assert values_N.tolist() == pytest.approx([start + n for n in range(len(values_N))], abs=1e-4)
    assert data.info.inputs["numbers"].mean == (2.5,)

    drawn = load(Path(paths["train"]), **options | {"test_size": 2, "calibration_from": "val", "calibration_size": 2})
    assert sizes(drawn) == [6, 3, 2, 2]
    assert set(ids(drawn, "test")) < set(ids(data, "test"))
    assert set(ids(drawn, "calibration")) < set(ids(drawn, "val"))
    assert batch_of(drawn, "calibration")["numbers"].min() > 10, "the rows of val"


def test_splits_are_drawn_by_the_seed_alone(tmp_path: Path, load: Load) -> None:
    table = houses(200)
    path = write(tmp_path / "t.csv", table)
    options = {"test_size": None, "val_size": 0.1, "calibration_size": 20}
    data = load(path, **options)
    assert sizes(data) == [144, 16, 40, 20]
    assert sorted(rows_of(data, "train") + rows_of(data, "val") + rows_of(data, "test")) == list(range(200))
    assert all(ids(load(path, **options), split) == ids(data, split) for split in data.splits)
    assert all(ids(load(path, seed=8, **options), split) != ids(data, split) for split in data.splits)
    table["size"] = table["size"][::-1]
    assert all(ids(load(write(path, table), **options), split) == ids(data, split) for split in data.splits)
    columns = load(path, features=["rooms"], **options)
    assert all(ids(columns, split) == ids(data, split) for split in data.splits)


def test_one_size_leaves_the_other_splits_alone(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "t.csv", houses(200))
    few, many = (load(path, test_size=size, val_size=10, calibration_size=5) for size in (20, 30))
    assert set(ids(few, "test")) < set(ids(many, "test"))
    more = load(path, test_size=20, val_size=10, calibration_size=9)
    for split in ("train", "val", "test"):
        assert ids(few, split) == ids(more, split)
    assert set(ids(few, "calibration")) < set(ids(more, "calibration"))
    own = str(write(tmp_path / "own.csv", houses(50)))
    some, others = (load(path, test_path=own, test_size=size, val_size=10) for size in (20, 30))
    assert ids(some, "train") == ids(others, "train") and ids(some, "val") == ids(others, "val")
    assert set(ids(some, "test")) < set(ids(others, "test"))


@pytest.mark.parametrize("task", [CLASSIFICATION | {"targets": ["town"]}, REGRESSION], ids=["classes", "numbers"])
def test_stored_and_read_back(tmp_path: Path, load: Load, suffix: str, task: dict[str, Any]) -> None:
    path = write(tmp_path / f"t{suffix}", houses())
    data = load(path, test_size=0.2, val_size=0.1, calibration_size=7, categorical=["zone"], batch_size=9, **task)
    stored = tmp_path / "stored"
    stored.mkdir()
    data.save(stored)
    path.unlink()
    again = Data.load(stored)
    assert again.info == data.info and again.loader == data.loader
    for name in data.splits:
        assert ids(again, name) == ids(data, name)
        for column, values in data.splits[name].columns.items():
            np.testing.assert_array_equal(again.splits[name].columns[column].values(), values.values())
            assert again.splits[name].columns[column].values().dtype == values.values().dtype
        for one, other in zip(data.batches(name), again.batches(name), strict=True):
            for column in data.info.columns:
                ours, theirs = ({**batch.inputs, **batch.targets}[column] for batch in (one, other))
                assert ours.equal(theirs)


def test_batches_do_not_depend_on_the_number_of_workers(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "t.csv", houses())
    own, workers = (load(path, num_workers=num, batch_size=7, categorical=["zone"]) for num in (0, 2))
    order_N = np.random.default_rng(0).permutation(60)
    pairs = [
        (one, other)
        for options in ({}, {"order_N": order_N, "augment_seed": (1, 2)})
        for one, other in zip(own.batches("train", **options), workers.batches("train", **options), strict=True)
    ]
    assert len(pairs) == 18
    for one, other in pairs:
        assert list(one.inputs) == list(other.inputs) == ["numbers", "categories"]
        for ours, theirs in ((one.inputs, other.inputs), (one.targets, other.targets)):
            assert all(ours[name].equal(theirs[name]) for name in ours)
        assert one.indices_N.equal(other.indices_N)


FLOATS = st.floats(-1e30, 1e30).filter(lambda value: not value or abs(value) > 1e-20)


@given(rows=st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=30))
def test_any_finite_floats_survive(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, float, float]]
) -> None:
    """CSV, Data, batches: what float32 rounds, in the numbers and in their mean and standard deviation, is lost."""
    folder = tmp_path_factory.mktemp("floats")
    path = write(folder / "t.csv", dict(zip(("a", "b", "y"), zip(*rows, strict=True), strict=True)))
    ctx = Context("data", "data.table", seed=7, scratch=folder, _tell=lambda _: None)
    try:
        data = front.load_table(config(path, **NO_SPLITS), ctx)
    except StageError as error:
        assert "target 'y': float32, in which targets are stored, has steps of" in str(error)
        reject()
    tensors, values_N3 = batch_of(data), np.array(rows)
    with np.errstate(under="ignore"):
        targets_N = values_N3[:, 2].astype(np.float32)
    assert tensors["targets"].ravel().tolist() == targets_N.tolist()
    info = data.info.inputs["numbers"]
    step = float(np.finfo(np.float32).eps)
    for number, (mean, std) in enumerate(zip(info.mean, info.std, strict=True)):
        expected_N = (values_N3[:, number] - mean) / std
        allowed_N = 2 * step * ((abs(values_N3[:, number]) + abs(mean)) / std + abs(expected_N)) + 1e-30
        found_N = tensors["numbers"][:, number].double().numpy()
        assert (abs(found_N - expected_N) <= allowed_N).all()


def test_missing_numbers_become_the_mean_of_train(tmp_path: Path, load: Load, suffix: str) -> None:
    values = [None if number % 4 == 1 else float(number) for number in range(40)]
    path = write(tmp_path / f"t{suffix}", {"a": values, "b": list(range(40)), "y": [1.0] * 40})
    with pytest.raises(StageError, match=rf"t{suffix}, row 2, column 'a': a missing value; remove the row, or set"):
        load(path)
    data = load(path, missing="mean", test_size=10, val_size=5)
    train = [values[row] for row in rows_of(data, "train")]
    known_N = np.array([value for value in train if value is not None])
    assert len(known_N) < len(train)
    info = data.info.inputs["numbers"]
    assert info.mean[0] == pytest.approx(known_N.mean()) and info.std[0] == pytest.approx(known_N.std())
    for split in data.splits:
        for row, standardized in zip(
            rows_of(data, split), batch_of(data, split)["numbers"][:, 0].tolist(), strict=True
        ):
            filled = info.mean[0] if values[row] is None else values[row]
            assert standardized == pytest.approx((filled - info.mean[0]) / info.std[0], abs=1e-5)


def test_nan_of_parquet_is_missing(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "t.parquet", {"a": [1.0, float("nan"), 3.0], "y": [1.0, 2.0, 3.0]})
    with pytest.raises(StageError, match=r"t\.parquet, row 2, column 'a': a missing value"):
        load(path)
    assert numbers_of(load(path, missing="mean")).ravel().tolist() == pytest.approx([1, 2, 3])


def test_missing_categories_count_as_unknown(tmp_path: Path, load: Load, events, suffix: str) -> None:
    """A column with few known values is no reason for a notice: those of test are in train."""
    town, age = ["u", None, "v", None, None, "u", None] * 6, [3, 3, 5, None, 5, 3, 3] * 6
    path = write(tmp_path / f"t{suffix}", {"town": town, "age": age, "y": [float(row) for row in range(42)]})
    with pytest.raises(StageError, match=rf"t{suffix}, row 2, column 'town': a missing value; remove the row, or set"):
        load(path, categorical=["age"])
    data = load(path, missing="mean", categorical=["age"], test_size=14)
    assert data.info.inputs["categories"].categories == (("u", "v"), ("3", "5"))
    for split in ("train", "test"):
        expected = [
            [{"u": 1, "v": 2, None: 0}[town[row]], {3: 1, 5: 2, None: 0}[age[row]]] for row in rows_of(data, split)
        ]
        assert batch_of(data, split)["categories"].tolist() == expected
    assert not events.notices


def test_unknown_categories_are_counted_among_the_known(tmp_path: Path, load: Load, events) -> None:
    path = write(tmp_path / "t.csv", {"a": ["u", "v"], "y": [1, 2]})
    other = write(tmp_path / "other.csv", {"a": ["new", "newer", "u", *[None] * 7], "y": range(10)})
    load(path, test_path=str(other), missing="mean")
    (notice,) = events.notices
    assert "column 'a' has values that train does not have in 2 of 3 rows of test" in notice


@pytest.mark.parametrize("missing", ["refuse", "mean"])
def test_a_missing_target_is_refused_in_any_case(tmp_path: Path, load: Load, missing: str) -> None:
    path = write(tmp_path / "t.csv", {"a": [1, 2, 3], "y": [1, None, 3]})
    with pytest.raises(StageError, match=r"t\.csv, row 2, column 'y': a missing value; remove the row$"):
        load(path, missing=missing)


@pytest.mark.parametrize("categorical", [[], ["gone"]])
@pytest.mark.parametrize("missing", ["refuse", "mean"])
def test_a_column_of_missing_values_alone_is_refused(
    tmp_path: Path, load: Load, suffix: str, missing: str, categorical: list[str]
) -> None:
    path = write(tmp_path / f"t{suffix}", {"a": [1, 2], "gone": [None, None], "y": [1, 2]})
    with pytest.raises(StageError, match=r"column 'gone'.*(missing|no values)"):
        load(path, missing=missing, categorical=categorical)


BAD_CELLS = {
    "a nan": (
        {"a": [1.5, "nan", 3], "y": [1, 2, 3]},
        r"row 2, column 'a': a missing value; remove the row, or set `mi",
    ),
    "nothing": ({"a": [1.5, 2, None], "y": [1, 2, 3]}, r"row 3, column 'a': a missing value; remove the row, or set"),
    "infinity": ({"a": [1.5, "inf", 3], "y": [1, 2, 3]}, r"row 2, column 'a': inf, which is infinite"),
    "an infinite target": ({"a": [1, 2, 3], "y": [1, 2, "-inf"]}, r"row 3, column 'y': -inf, which is infinite"),
    "text among numbers": ({"a": [1, 2, "x3", 4], "y": [1, 2, 3, 4]}, r"row 3, column 'a': 'x3', which is no number"),
    "text as a target": ({"a": [1, 2, 3], "y": [1, "two", 3]}, r"row 2, column 'y': 'two', which is no number$"),
    "a missing text": (
        {"a": ["u", "v", None], "y": [1, 2, 3]},
        r"row 3, column 'a': a missing value; remove the row, or ",
    ),
    "a rare text": ({"a": [None, None, "u"], "y": [1, 2, 3]}, r"row 1, column 'a': a missing value"),
    "a date": (
        {"a": ["2020-01-02", "2020-01-03"], "y": [1, 2]},
        r"row 1, column 'a': 2020-01-02, a date or time: turn it into a number, or leave the column out$",
    ),
    "too large": ({"a": [1, 1e300], "y": [1, 2]}, r"row 2, column 'a': 1e\+300, "),
    "a target too large": ({"a": [1, 2], "y": [1, -1e39]}, r"row 2, column 'y': -1e\+39, "),
}


@pytest.mark.parametrize(("table", "message"), BAD_CELLS.values(), ids=BAD_CELLS)
def test_a_bad_value_is_named(tmp_path: Path, load: Load, table: Columns, message: str) -> None:
    path = write(tmp_path / "bad.csv", table)
    with pytest.raises(StageError, match=rf"^{path}, {message}"):
        load(path)


def test_whole_numbers_that_float64_rounds_are_numbers(tmp_path: Path, load: Load) -> None:
    values = [2**60 + number * 2**57 + 1 for number in range(4)]
    data = load(write(tmp_path / "t.csv", {"a": values, "y": [1, 2, 3, 4]}))
    np.testing.assert_allclose(numbers_of(data).ravel(), values, rtol=1e-6)


def test_mistyped_numbers_are_categories_when_asked_for(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "t.csv", {"a": [1, 2, "3+", 1], "y": [1, 2, 3, 4]})
    with pytest.raises(StageError, match=r"'3\+', which is no number, as most are: put it right, or name it in `cat"):
        load(path)
    assert load(path, categorical=["a"]).info.inputs["categories"].categories == (("1", "2", "3+"),)


def test_text_that_is_seldom_a_number_is_categories(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "t.csv", {"a": ["u", "v", "3"], "y": [1, 2, 3]})
    assert load(path).info.inputs["categories"].categories == (("3", "u", "v"),)


@pytest.mark.parametrize("where", ["val_path", "test_path"])
def test_a_bad_value_of_another_file_is_named(tmp_path: Path, load: Load, where: str) -> None:
    path = write(tmp_path / "t.csv", {"a": [1, 2], "b": ["u", "v"], "y": [1, 2]})
    for table, message in (
        ({"a": [1, None], "b": ["u", "v"], "y": [1, 2]}, "row 2, column 'a': a missing value"),
        ({"a": [1, "x"], "b": ["u", "v"], "y": [1, 2]}, "row 2, column 'a': 'x', which is no number"),
        ({"a": [1, 2], "b": ["u", None], "y": [1, 2]}, "row 2, column 'b': a missing value"),
        ({"a": [1, 2], "b": ["u", "v"], "y": ["inf", 2]}, "row 1, column 'y': inf, which is infinite"),
    ):
        other = write(tmp_path / "other.csv", table)
        with pytest.raises(StageError, match=rf"^{other}, {message}"):
            load(path, **{where: str(other)})
    other = write(tmp_path / "other.csv", {"aa": [1, 2], "b": ["u", "v"], "y": [1, 2]})
    with pytest.raises(StageError, match=rf"^{other} has no column 'a' \(did you mean 'aa'\?\)$"):
        load(path, **{where: str(other)})
    other.write_text("a,b,y\n")
    with pytest.raises(StageError, match=rf"^{other} has no rows$"):
        load(path, **{where: str(other)})


@pytest.mark.parametrize("where", ["val_path", "test_path"])
def test_a_class_that_train_does_not_have_is_refused(tmp_path: Path, load: Load, where: str) -> None:
    path = write(tmp_path / "t.csv", {"a": [1, 2], "y": ["u", "v"]})
    other = write(tmp_path / "other.csv", {"a": [1, 2], "y": ["v", "w"]})
    with pytest.raises(StageError, match=rf"^{other}, row 2, column 'y': 'w', a class that no row of train has"):
        load(path, **CLASSIFICATION, **{where: str(other)})


def test_a_class_that_was_drawn_into_test_alone_is_refused(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "t.csv", {"a": list(range(40)), "y": ["u", "v"] * 20})
    row = rows_of(load(path, **CLASSIFICATION, test_size=5), "test")[0]
    labels = ["u", "v"] * 20
    labels[row] = "rare"
    write(path, {"a": list(range(40)), "y": labels})
    with pytest.raises(StageError, match=rf"row {row + 1}, column 'y': 'rare', a class that no row of train has"):
        load(path, **CLASSIFICATION, test_size=5)


def test_prices_as_classes_are_called_a_regression(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "t.csv", {"a": list(range(40)), "y": [f"{price}.25" for price in range(40)]})
    with pytest.raises(StageError, match=r"\.25', a class that no row of train has: is the task a regression\?$"):
        load(path, **CLASSIFICATION, test_size=5)


def test_a_single_class_is_refused(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "t.csv", {"a": list(range(40)), "y": ["u"] * 40})
    message = rf"^{path}, column 'y': train has samples of one class, u: a classification needs two$"
    with pytest.raises(StageError, match=message):
        load(path, **CLASSIFICATION)
    with pytest.raises(StageError, match="'w', a class that no row of train has"):
        other = write(tmp_path / "other.csv", {"a": [1], "y": ["w"]})
        load(path, **CLASSIFICATION, test_path=str(other))


def test_more_than_a_thousand_classes_are_refused(tmp_path: Path, load: Load) -> None:
    labels = [f"c{number:04d}" for number in range(1001)]
    path = write(tmp_path / "t.csv", {"a": list(range(1001)), "y": labels})
    with pytest.raises(StageError, match=r"t\.csv: 'y' has 1001 different values; is the task a regression\?$"):
        load(path, **CLASSIFICATION)
    labels[0] = labels[1]
    write(path, {"a": list(range(1001)), "y": labels})
    assert len(class_names_of(load(path, **CLASSIFICATION).info)) == 1000


def test_columns_of_other_types_are_named_together(tmp_path: Path, load: Load) -> None:
    days = [datetime.date(2020, 1, day) for day in range(1, 4)]
    columns = {"born": days, "size": [1, 2, 3], "no te": [None] * 3, "tags": [["a"], [], ["b"]], "seen": days}
    path = write(tmp_path / "t.parquet", {**columns, "y": [1, 2, 4]})
    found = (
        f"{path}: columns that are no inputs as they are: 'born' has dates or times, 'no te' has no values, 'tags' has "
        "lists or objects"
    )
    with pytest.raises(StageError) as caught:
        load(path)
    left_out = ["born", "no te", "tags", "seen"]
    more = ", 'seen' has dates or times; turn them into numbers, or name them in `exclude`: "
    assert str(caught.value) == f"{found}{more}{json.dumps(left_out)}"
    assert load(path, exclude=left_out).info.inputs["numbers"].names == ("size",)
    with pytest.raises(StageError, match=r"numbers, or leave them out of `features`: .\"no te\", \"born\"\]$"):
        load(path, features=("no te", "size", "born"))
    assert load(path, features=("size", "seen", "born"), categorical=("born", "seen")).info.inputs["categories"].names
    with pytest.raises(StageError, match=r"row 1, column 'tags': "):
        load(path, features=("size", "tags"))


# Older versions name the file twice, so that the end of the message is cut off.
NOT_PARQUET = "not a parquet file" if PYARROW >= 25 else "Is this a 'parquet' file"
BAD_FILES = {
    "missing": ("t.csv", None, "does not exist$"),
    "another suffix": ("t.xlsx", b"a,y\n1,2\n", r"tables are \.csv, \.tsv, \.jsonl, \.json or \.parquet files$"),
    "no suffix": ("t", b"a,y\n1,2\n", r"tables are \.csv, \.tsv, \.jsonl, \.json or \.parquet files$"),
    "rows of different lengths": ("t.csv", b"a,y\n1,2\n3,4,5\n", "line 3: 3 fields, where the header has 2: 3,4,5$"),
    "empty": ("t.csv", b"", "can't be read: Empty CSV file"),
    "an empty line": ("t.csv", b"\n", "can't be read: "),
    "header only": ("t.csv", b"a,y\n", "has no rows$"),
    "header only, tabs": ("t.tsv", b"a\ty\n", "has no rows$"),
    "a column twice": ("t.csv", b"a,a,y\n1,2,3\n", "has more than one column 'a'$"),
    "not UTF-8": ("t.csv", b"a,y\n\xe9,1\n\xe9,2\n", "UTF-8"),
    "a header that is not UTF-8": ("t.csv", b"\xe9,y\n1,1\n2,2\n", "can't be read: .*utf-8"),
    "UTF-16": ("t.csv", "a,y\n1,2\n".encode("utf-16"), "can't be read: it is UTF-16 text; save it as UTF-8$"),
    "UTF-16, big-endian": ("t.tsv", "\ufeffa\ty\n".encode("utf-16-be"), "can't be read: it is UTF-16 text; save it as"),
    "UTF-16 without a mark": ("t.json", b'[\0{\0"\0', "can't be read: it is UTF-16 text; save it as UTF-8$"),
    "the target alone": ("t.csv", b"y\n1\n2\n", "has no column beside y: nothing to learn from$"),
    "empty Parquet": ("t.parquet", b"", "can't be read: "),
    "CSV as Parquet": ("t.parquet", b"a,y\n1,2\n", "can't be read: .*" + NOT_PARQUET),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_named(tmp_path: Path, load: Load, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StageError, match=rf"^{path}\b.*{message}") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path, load: Load) -> None:
    (tmp_path / "t.csv").mkdir()
    with pytest.raises(StageError, match=r"t\.csv is not a file$"):
        load(tmp_path / "t.csv")


@pytest.mark.parametrize("keep", [4, 0.5, -1])
def test_truncated_parquet_is_named(tmp_path: Path, load: Load, keep: float) -> None:
    path = write(tmp_path / "t.parquet", houses())
    content = path.read_bytes()
    path.write_bytes(content[: round(keep * len(content)) if keep == 0.5 else int(keep)])
    with pytest.raises(StageError, match=rf"^{path} can't be read: .") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_altered_parquet_is_named(tmp_path: Path, load: Load) -> None:
    """Whatever bit is wrong, it is an error about the file, or another number: never a traceback."""
    path = write(tmp_path / "t.parquet", {"a": [1.0, 2.0, 3.0, 4.0], "b": ["u", "v", "u", "v"], "y": [1, 2, 3, 4]})
    content = path.read_bytes()
    random = np.random.default_rng(0)
    for place, bit in zip(
        random.integers(0, len(content), 300).tolist(), random.integers(0, 8, 300).tolist(), strict=True
    ):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        try:
            load(path)
        except StageError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ["sise"]}, r"has no column 'sise' \(did you mean 'size'\?\)$"),
        ({"features": ["qqqqqq"]}, r"has no column 'qqqqqq' \(it has size, town, rooms, sold, zone, y, z\)$"),
        ({"targets": ["price"]}, r"has no column 'price' \("),
        ({"categorical": ["zonee"]}, r"has no column 'zonee' \(did you mean 'zone'\?\)$"),
        ({"features": ["size"], "categorical": ["zone"]}, r"the categorical column 'zone' is not among the features$"),
        ({"categorical": ["y"]}, r"the categorical column 'y' is not among the features$"),
        ({"val_size": 60}, "val_size: 60 leaves nothing of 60 samples to train on$"),
        ({"test_size": 60}, "test_size: 60 leaves nothing of 60 samples to train on$"),
    ],
)
def test_options_that_do_not_fit_the_table(tmp_path: Path, load: Load, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=message):
        load(write(tmp_path / "houses.csv", houses()), **options)


def test_a_file_that_separates_columns_otherwise_is_named(tmp_path: Path, load: Load) -> None:
    (path := tmp_path / "t.csv").write_text("a;y\n1;2\n3;4\n", encoding="utf-8")
    with pytest.raises(
        StageError, match=r"has no column 'y' \(it has one, 'a;y': \.csv files separate columns by comm"
    ):
        load(path)


def test_excluded_columns_are_no_inputs(tmp_path: Path, load: Load) -> None:
    table = {"": [1, 2], "a": [3, 4], "name": ["u", "v"], "y": [1, 2]}
    info = load(write(tmp_path / "t.csv", table), exclude=["", "name"]).info
    assert list(info.inputs) == ["numbers"] and info.inputs["numbers"].names == ("a",)
    with pytest.raises(StageError, match=r"t.csv has no column 'nam' \(did you mean 'name'\?\)"):
        load(tmp_path / "t.csv", exclude=["nam"])
    with pytest.raises(StageError, match=r"t\.csv has no column beside y, , a, name: nothing to learn from"):
        load(tmp_path / "t.csv", exclude=["", "a", "name"])


@pytest.mark.parametrize("first", [0, 1, 1000])
@pytest.mark.parametrize("kind", [int, float])
def test_a_column_that_numbers_the_rows_gives_a_notice(
    tmp_path: Path, load: Load, events, first: int, kind: type
) -> None:
    numbers = [kind(first + row) for row in range(10)]
    path = write(tmp_path / "t.csv", {"": numbers, "a": numbers[::-1], "b": [1, *numbers[:-1]], "y": numbers})
    load(path)
    remedy = "so that a network can learn their order: leave it out with `exclude`"
    assert events.notices == [f"{path}: column '' numbers the rows, {remedy}"]
    load(path, exclude=[""])
    assert len(events.notices) == 1


def test_few_rows_may_be_consecutive(tmp_path: Path, load: Load, events) -> None:
    load(write(tmp_path / "t.csv", {"a": range(9), "y": range(9)}))
    assert not events.notices


@pytest.mark.parametrize("judged", ["val", "test"])
@pytest.mark.parametrize("num_unknown", [5, 6])
def test_categories_that_train_does_not_have_give_a_notice(
    tmp_path: Path, load: Load, events, judged: str, num_unknown: int
) -> None:
    path = write(tmp_path / "t.csv", {"a": ["u", "v"], "b": ["u", "v"], "y": [1, 2]})
    values = [f"new {row}" if row < num_unknown else "u" for row in range(10)]
    other = write(tmp_path / "other.csv", {"a": ["v"] * 10, "b": values, "y": range(10)})
    load(path, **{f"{judged}_path": str(other)})
    problem = f"column 'b' has values that train does not have in 6 of 10 rows of {judged}"
    assert events.notices == ([] if num_unknown == 5 else [f"{path}: {problem}: leave it out with `exclude`"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CLASSIFICATION | {"targets": ["y", "z"]}, "a classification has one target"),
        (CLASSIFICATION | {"loss": "mse"}, "loss is an option of the task regression"),
        ({"targets": ["y"], "features": ["x", "y"]}, "'y' is named twice, in targets or features"),
        ({"targets": ["y", "y"]}, "'y' is named twice"),
        ({"features": ["x", "x"]}, "'x' is named twice"),
        ({"targets": ["y"], "exclude": ["y"]}, "'y' is named twice, in targets or exclude"),
        ({"features": ["x"], "exclude": ["z"]}, "features names all inputs: leave out exclude"),
        ({"targets": []}, "at least 1 item"),
        ({"features": []}, "at least 1 item"),
        ({"task": "ranking"}, "'classification'.* or 'regression'"),
        ({"missing": "zero"}, "'refuse' or 'mean'"),
    ],
)
def test_options_that_do_not_fit_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(Path("t.csv"), **options)


def test_a_link_may_lead_to_a_file_of_any_name(tmp_path: Path, load: Load) -> None:
    """As the caches of data version control and of model hubs have them."""
    blob = write(tmp_path / "t.csv", {"a": [1, 2], "y": [1, 2]}).rename(tmp_path / "2cf24dba")
    (tmp_path / "t.csv").symlink_to(blob)
    data = load(tmp_path / "t.csv")
    assert data.info.name == "t" and ids(data, "train") == ["t.csv/1", "t.csv/2"]


def test_the_fingerprint_is_the_contents(tmp_path: Path) -> None:
    table = {"a": [1, 2], "y": [1, 2]}
    path, other = write(tmp_path / "t.csv", table), write(tmp_path / "other.csv", table)
    fingerprint = front.load_table.fingerprint
    before = fingerprint(config(path))
    assert list(before) == [str(path)] and fingerprint(config(path)) == before
    both = fingerprint(config(path, test_path=str(other)))
    assert both.keys() == {str(path), str(other)} and len(set(both.values())) == 1
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"1", b"3"))
    assert path.stat().st_size == status.st_size
    after = fingerprint(config(path))
    assert after.keys() == before.keys() and after != before
    other.write_bytes(other.read_bytes() + b"5,6\n")
    assert fingerprint(config(path, test_path=str(other)))[str(other)] != both[str(other)]


@pytest.mark.parametrize("option", ["path", "val_path", "test_path"])
def test_the_fingerprint_of_a_missing_file_is_a_stage_error(tmp_path: Path, option: str) -> None:
    path = write(tmp_path / "t.csv", {"a": [1], "y": [1]})
    with pytest.raises(StageError, match=r"nowhere\.csv does not exist$"):
        front.load_table.fingerprint(config(path, **{option: str(tmp_path / "nowhere.csv")}))


def test_importing_and_keys_need_neither_torch_nor_numpy_nor_pyarrow(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", {"a": [1], "y": [1]})
    code = (
        "import sys, ptpipe_data as front; "
        f"config = front.TableConfig(path={str(path)!r}, task='regression', targets=('y',)); "
        "assert front.load_table.fingerprint(config) and list(front.load_table.preflight(config)) == []; "
        "print([name for name in ('torch', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_preflight_names_the_extra_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.csv", {"a": [1], "y": [1]})
    assert list(front.load_table.preflight(config(path))) == []
    found = importlib.util.find_spec
    monkeypatch.setattr(front, "find_spec", lambda name: None if name == "pyarrow" else found(name))
    assert list(front.load_table.preflight(config(path))) == ["data.table needs pyarrow: pip install 'ptpipe[table]'"]


def test_targets_that_are_flags_are_labels(tmp_path: Path, load: Load, suffix: str) -> None:
    columns = {"x": [1.5, 2.5, 3.5, 4.5], "wet": [0, 1, 1, 0], "dark": [True, False, True, True]}
    data = load(write(tmp_path / f"t{suffix}", columns), task="multi_label", targets=["wet", "dark"])
    assert data.info.task == MultiLabel(label_names=("wet", "dark"))
    assert data.splits["train"].targets["labels"].values().tolist() == [[0, 1], [1, 0], [1, 1], [0, 1]]


@pytest.mark.parametrize(
    ("wet", "message"),
    [
        ([0, 1, 2, 0], r"row 3, column 'wet': 2, which is neither 0 nor 1$"),
        ([0, 1, None, 0], r"row 3, column 'wet': a missing value; remove the row$"),
        (["yes", "no", "no", "no"], r"row 1, column 'wet': 'yes', which is no number$"),
    ],
)
def test_targets_that_are_no_flags(tmp_path: Path, load: Load, wet: list[Any], message: str) -> None:
    path = write(tmp_path / "t.csv", {"x": [1, 2, 3, 4], "wet": wet})
    with pytest.raises(StageError, match=message):
        load(path, task="multi_label", targets=["wet"])


def test_na_is_a_text_like_any_other_and_a_missing_number(tmp_path: Path, load: Load) -> None:
    """Namibia, and what R writes for a missing value."""
    path = write(tmp_path / "t.csv", {"country": ["NA", "ZA", "NA", "AO"], "x": [1, "NA", 3, 2], "y": [1, 2, 3, 4]})
    with pytest.raises(StageError, match=r"row 2, column 'x': a missing value"):
        load(path)
    data = load(path, missing="mean")
    assert data.info.inputs["categories"].categories == (("AO", "NA", "ZA"),)
    assert numbers_of(data)[:, 0].tolist() == pytest.approx([1, 2, 3, 2])


def test_options_of_the_huber_loss(tmp_path: Path, load: Load) -> None:
    path = write(tmp_path / "t.csv", {"x": [1, 2, 3], "y": [1, 2, 3]})
    assert load(path, loss="huber", huber_delta=0.5).info.task.huber_delta == 0.5
    with pytest.raises(ValidationError, match="huber_delta is an option of the loss huber"):
        load(path, huber_delta=0.5)


class TestLayouts:
    """Columns without a header, quotation marks that are characters, and an object per line."""

    def test_names_of_columns_without_a_header(self, tmp_path: Path, load: Load) -> None:
        path = tmp_path / "t.tsv"
        path.write_text("1.5\tb\t3\n2.5\ta\t4\n", encoding="utf-8")
        data = load(path, column_names=["size", "town", "y"])
        assert data.info.inputs["numbers"].names == ("size",)
        assert numbers_of(data).ravel().tolist() == pytest.approx([1.5, 2.5])
        assert data.info.inputs["categories"].categories == (("a", "b"),)
        assert batch_of(data)["targets"].ravel().tolist() == [3, 4] and ids(data, "train") == ["t.tsv/1", "t.tsv/2"]

    @pytest.mark.parametrize("names", [["y"], ["a", "b", "y"]])
    def test_another_number_of_columns(self, tmp_path: Path, load: Load, names: list[str]) -> None:
        path = tmp_path / "t.csv"
        path.write_text("1,2\n3,4\n", encoding="utf-8")
        with pytest.raises(
            StageError, match=rf"^{path}, line 1: 2 fields, where `column_names` has {len(names)}: 1,2$"
        ):
            load(path, column_names=names)

    def test_quotation_marks_that_are_characters(self, tmp_path: Path, load: Load) -> None:
        path = tmp_path / "t.csv"
        path.write_text('size,y\n5\'10",1\n"6,2\n', encoding="utf-8")
        data = load(path, quoting=False)
        assert data.info.inputs["categories"].categories == (('"6', "5'10\""),)

    def test_a_missing_text_without_quotation_marks(self, tmp_path: Path, load: Load) -> None:
        path = tmp_path / "t.csv"
        path.write_text("town,y\nNA,1\n,2\nUlm,3\n", encoding="utf-8")
        with pytest.raises(StageError, match=r"row 2, column 'town': a missing value; remove the row, or set"):
            load(path, quoting=False)

    def test_members_of_objects_may_be_in_any_order_and_missing(self, tmp_path: Path, load: Load) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text('{"a": 1, "y": 2}\n\n{"y": 4, "a": 3}\n{"y": 6}\n', encoding="utf-8")
        with pytest.raises(StageError, match=r"row 3, column 'a': a missing value; remove the row, or"):
            load(path)
        assert numbers_of(load(path, missing="mean")).ravel().tolist() == pytest.approx([1, 3, 2])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "can't be read: Empty JSON file"),
            ("\n", "has no rows$"),
            ("[1, 2]\n", "can't be read: JSON parse error"),
            ('{"a": 1, "y": 2\n', "can't be read: JSON parse error"),
            ('{"a": 1, "a": 1, "y": 2}\n', "can't be read: JSON parse error"),
            ('{"a": 1, "y": 2}\n{"a": "x", "y": 2}\n', "can't be read: JSON parse error.*/a"),
            ('{"a": NaN, "y": 2}\n', r"(can't be read: JSON parse error|row 1, column 'a')"),
            ('{"a": [1], "y": 2}\n', "row 1, column 'a'"),
            ("{}\n{}\n", "has no column 'y'"),
        ],
    )
    def test_lines_that_are_wrong(self, tmp_path: Path, load: Load, content: str, message: str) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(StageError, match=rf"^{path},? {message}") as caught:
            load(path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("[]", "can't be read: Empty JSON file"),
            ('[{"a": 1, "y": 2},', "can't be read: Expecting value: line 1 column 19"),
            ('[{"a": 1, "y": 2}, 3]', "can't be read: element 2 of its array is not an object"),
            ("[" * 100_000, "can't be read: its arrays and objects are nested too deeply"),
            ('[{"a": 1, "y": 2}, {"a": "x", "y": 2}]', "can't be read: JSON parse error.*/a"),
            ('{"rows": [{"a": 1, "y": 2}]}', "has no column 'y'"),
        ],
    )
    def test_arrays_that_are_wrong(self, tmp_path: Path, load: Load, content: str, message: str) -> None:
        path = tmp_path / "t.json"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(StageError, match=rf"^{path},? {message}"):
            load(path)

    @pytest.mark.parametrize(
        "content", ['{"a": 1, "y": 2}\n{"a": 3, "y": 4}\n', '\ufeff \n[{"a": 1, "y": 2}, {"a": 3, "y": 4}]']
    )
    def test_lines_and_arrays_with_a_byte_order_mark(self, tmp_path: Path, load: Load, content: str) -> None:
        path = tmp_path / "t.json"
        path.write_text(content, encoding="utf-8")
        assert numbers_of(load(path)).ravel().tolist() == [1, 3]

    def test_a_column_name_twice(self) -> None:
        with pytest.raises(ValidationError, match="column_names has 'a' twice"):
            config(Path("t.csv"), column_names=["a", "y", "a"])


class TestNames:
    """Classes and categories, of files whose numbers have types."""

    def test_classes_that_look_like_numbers(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.csv", {"a": list(range(4)), "y": ["10", "02", "2", "9"]})
        data = load(path, **CLASSIFICATION, classes={"positive": "02"})
        assert class_names_of(data.info) == ("02", "2", "9", "10")

    def test_dates_are_texts(self, tmp_path: Path, load: Load, suffix: str) -> None:
        days = ["2021-01-01", "2020-01-01"]
        values = [datetime.date.fromisoformat(day) for day in days] if suffix == ".parquet" else days
        path = write(tmp_path / f"t{suffix}", {"a": [1, 2], "y": values})
        assert class_names_of(load(path, **CLASSIFICATION).info) == ("2020-01-01", "2021-01-01")
        categories = load(path, targets=["a"], categorical=["y"]).info.inputs["categories"]
        assert categories.categories == (("2020-01-01", "2021-01-01"),)

    @pytest.mark.parametrize("suffix", [".json", ".jsonl"])
    @pytest.mark.parametrize("options", [CLASSIFICATION, {"targets": ["a"], "categorical": ["y"]}])
    def test_json_numbers_that_are_rounded_are_refused(
        self, tmp_path: Path, load: Load, suffix: str, options: dict[str, Any]
    ) -> None:
        path = write(tmp_path / f"t{suffix}", {"a": [1, 2], "y": [3, 12345678901234567890]})
        with pytest.raises(StageError, match=rf"^{path}, row 2, column 'y': 1\.23.*e\+19, a number that is rounded"):
            load(path, **options)

    @pytest.mark.parametrize("dtype", [pa.float16(), pa.float32(), pa.float64()], ids=str)
    def test_nan_of_parquet_is_no_name(self, tmp_path: Path, load: Load, dtype: pa.DataType) -> None:
        values = pa.array(np.array([1, np.nan, 2.5, np.nan])).cast(dtype)
        path = write(tmp_path / "t.parquet", {"a": [1, 2, 3, 4], "y": values})
        missing = r"t\.parquet, row 2, column 'y': a missing value; remove the row"
        with pytest.raises(StageError, match=rf"{missing} \(2 of 4 rows have none\)$"):
            load(path, **CLASSIFICATION)
        with pytest.raises(StageError, match=missing):
            load(path, targets=["a"], categorical=["y"])
        data = load(path, targets=["a"], categorical=["y"], missing="mean")
        assert data.info.inputs["categories"].categories == (("1", "2.5"),)
        assert batch_of(data)["categories"].ravel().tolist() == [1, 0, 2, 0]

    def test_na_of_another_format_is_a_text(self, tmp_path: Path, load: Load) -> None:
        train = pa.array(["a", "NA", "a"])
        columns = {"u": train.dictionary_encode(), "v": train.cast(pa.large_string()), "y": [1, 2, 3]}
        path = write(tmp_path / "t.parquet", columns)
        test = write(tmp_path / "t.csv", {"u": ["NA", "a"], "v": ["a", "NA"], "y": [1, 2]})
        assert batch_of(load(path, test_path=str(test)), "test")["categories"].tolist() == [[1, 2], [2, 1]]


class TestParquet:
    @pytest.mark.parametrize("dtype", [pa.large_binary(), pa.binary(1), pa.binary_view(), pa.binary()], ids=str)
    def test_bytes_are_refused_where_they_are_used(self, tmp_path: Path, load: Load, dtype: pa.DataType) -> None:
        path = write(tmp_path / "t.parquet", {"a": [1.5, 2.5], "b": pa.array([b"a", b"\xff"], dtype), "y": [1, 2]})
        for options in ({}, {"categorical": ["b"]}, CLASSIFICATION | {"targets": ["b"]}):
            with pytest.raises(StageError, match=rf"^{path} can't be read: column 'b' is not UTF-8 text$"):
                load(path, **options)
        assert list(load(path, exclude=["b"]).info.inputs) == ["numbers"]

    def test_bytes_in_a_dictionary_are_refused(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.parquet", {"b": pa.array([b"a", b"\xff"]).dictionary_encode(), "y": [1, 2]})
        with pytest.raises(StageError, match="column 'b' is not UTF-8 text"):
            load(path)

    @pytest.fixture
    def indexed(self, tmp_path: Path) -> Path:
        """A table as pandas writes it, with an index of its own and a named one."""
        table = pa.table({"x": [1.5, 2.5], "y": [1, 2], "shop": ["u", "v"], "__index_level_0__": [7, 3]})
        index = {"index_columns": ["shop", "__index_level_0__", {"kind": "range", "start": 0, "stop": 2, "step": 1}]}
        parquet.write_table(
            table.replace_schema_metadata({b"pandas": json.dumps(index).encode()}), tmp_path / "t.parquet"
        )
        return tmp_path / "t.parquet"

    def test_the_index_of_pandas_is_no_input(self, indexed: Path, load: Load, events) -> None:
        info = load(indexed).info
        assert list(info.inputs) == ["numbers"] and info.inputs["numbers"].names == ("x",)
        assert events.notices == [
            f"{indexed}: column '{name}' is the index of a pandas table, and no input: for one, name it in "
            "`categorical`, or all inputs in `features`"
            for name in ("shop", "__index_level_0__")
        ]

    def test_the_index_of_pandas_may_be_asked_for(self, indexed: Path, load: Load, events) -> None:
        assert load(indexed, features=["x", "__index_level_0__"]).info.inputs["numbers"].names[1] == "__index_level_0__"
        assert load(indexed, **CLASSIFICATION | {"targets": ["shop"]}, exclude=["__index_level_0__"])
        assert not events.notices
        assert load(indexed, categorical=["shop"]).info.inputs["categories"].names == ("shop",)

    @pytest.mark.parametrize("content", [b"", b"[", b"7", b'{"index_columns": 7}', b"[" * 100_000, b"\xff"])
    def test_other_metadata_is_passed_over(self, tmp_path: Path, load: Load, content: bytes) -> None:
        table = pa.table({"x": [1.5, 2.5], "y": [1, 2]}).replace_schema_metadata({b"pandas": content})
        parquet.write_table(table, tmp_path / "t.parquet")
        assert load(tmp_path / "t.parquet").info.inputs["numbers"].names == ("x",)


class TestCounts:
    @pytest.mark.parametrize("column", ["number", "text"])
    def test_missing_values_are_counted(self, tmp_path: Path, load: Load, column: str) -> None:
        values = [None if row % 500 == 83 else f"t{row}" if column == "text" else row for row in range(2000)]
        path = write(tmp_path / "t.csv", {"a": values, "y": range(2000)})
        message = (
            r"row 84, column 'a': a missing value; remove the row, or set `missing` to mean \(4 of 2,000 rows have n"
        )
        with pytest.raises(StageError, match=message):
            load(path)

    def test_what_stands_for_a_missing_number(self, tmp_path: Path, load: Load) -> None:
        path = write(tmp_path / "t.csv", {"a": [1, 2, "?", 4, "?"], "y": range(5)})
        remedy = r"a missing value is left empty, with `missing: mean` \(2 of 5 values are no numbers\)$"
        with pytest.raises(StageError, match=rf"row 3, column 'a': '\?', which is no number, as most are: .*{remedy}"):
            load(path)

    def test_line_breaks_in_quotation_marks_give_a_notice(self, tmp_path: Path, load: Load, events) -> None:
        load(write(tmp_path / "t.csv", {"a": ["u\nv", "w"], "y": [1, 2]}))
        assert any("1 value in quotation marks has 1 line break" in notice for notice in events.notices)


def test_rows_of_a_group_stay_in_one_split(tmp_path: Path, load: Load) -> None:
    content = houses() | {"owner": [f"{row // 4:03d}" for row in range(60)]}
    path = write(tmp_path / "t.csv", content)
    data = load(path, group="owner", test_size=0.2, val_size=0.1)
    groups = {name: {content["owner"][row] for row in rows_of(data, name)} for name in ("train", "val", "test")}
    assert [len(of) for of in groups.values()] == [11, 1, 3] and len(set().union(*groups.values())) == 15
    inputs = data.info.inputs
    assert "owner" not in (*inputs["numbers"].names, *inputs["categories"].names), "it is no input"
    assert "004" in groups["train"] | groups["val"] | groups["test"]
    with pytest.raises(StageError, match=r"has no column 'owners' .did you mean 'owner'"):
        load(path, group="owners")


def test_a_group_in_two_files(tmp_path: Path, load: Load) -> None:
    train = write(tmp_path / "a.csv", houses() | {"owner": [f"{row:02d}" for row in range(60)]})
    test = write(tmp_path / "b.csv", houses() | {"owner": [f"{row:02d}" for row in range(59, 119)]})
    problem = f"^{test}, row 1, column 'owner': '59', a group of which {train} has rows, too$"
    with pytest.raises(StageError, match=problem):
        load(train, test_path=str(test), group="owner")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "y"}, "group: 'y' is among the targets"),
        ({"group": "size", "features": ["size", "town"]}, "group: 'size' is no input: leave it out of features"),
        ({"group": "size", "categorical": ["size"]}, "group: 'size' is no input: leave it out of features"),
        ({"group": "size", "val_path": "a.csv", "test_path": "b.csv"}, "group is for splits that are drawn"),
    ],
)
def test_options_that_leave_no_group(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(tmp_path / "t.csv", **options)
