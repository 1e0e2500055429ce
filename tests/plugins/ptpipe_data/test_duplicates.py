"""Notices of samples that test shares with train, and none where repeated inputs are natural."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from ptpipe import Context
from ptpipe_data import ImageFolderConfig, duplicates, load_arrays, load_image_folder, load_table, load_text
from ptpipe_data.config import ArraysConfig
from ptpipe_data.duplicates import report_shared
from ptpipe_data.table_config import TableConfig, TextConfig
from ptpipe_torch import ArrayColumn, RaggedColumn, Split
from ptpipe_torch.data.column import SubsetColumn

Arrays = Mapping[str, npt.NDArray[Any]]
RNG = np.random.default_rng(0)


def split(ids: str, columns: Arrays) -> Split:
    num = len(next(iter(columns.values())))
    names = np.array([f"{ids}/{number}" for number in range(num)], dtype=np.str_)
    return Split(names, {name: ArrayColumn(of) for name, of in columns.items()}, {"y": ArrayColumn(np.zeros(num))})


def drawn(columns: Arrays, num_train: int) -> dict[str, Split]:
    """Return splits drawn at random from the rows of all columns."""
    order = np.random.default_rng(1).permutation(len(next(iter(columns.values()))))
    whole = split("file", columns)
    return {
        "train": whole.subset(order[:num_train]),
        "val": whole.subset(order[:0]),
        "test": whole.subset(order[num_train:]),
    }


def notices(splits: Mapping[str, Split], ctx: Context, events: Any, *, may_repeat: bool = False) -> list[str]:
    report_shared(splits, ctx, may_repeat=may_repeat)
    return events.notices


def reals(num: int, width: int) -> npt.NDArray[np.float32]:
    return RNG.normal(size=(num, width)).astype(np.float32)


def levels(num: int, *sizes: int) -> npt.NDArray[np.int64]:
    """Return categories, of which the first ones are the most frequent."""
    return np.stack([np.minimum(RNG.geometric(2.5 / size, num), size) for size in sizes], axis=1)


def test_a_test_file_that_is_train_again(ctx: Context, events: Any) -> None:
    for columns in ({"a": reals(50, 3)}, {"a": reals(50, 3), "b": levels(50, 4)}, {"a": levels(200, 30, 30, 30)}):
        events.clear()
        splits = {"train": split("a", columns), "val": split("c", {"a": reals(0, 3)}), "test": split("b", columns)}
        (notice,) = notices(splits, ctx, events, may_repeat=True)
        num = len(splits["test"])
        assert notice.startswith(f"{num} of test's {num} samples are also in train, the first of them b/0: what is")


@pytest.mark.parametrize("num_shared", [9, 10, 1000])
def test_few_copies_are_no_notice(ctx: Context, events: Any, num_shared: int) -> None:
    train = reals(2000, 4)
    columns = {"a": np.concatenate([reals(2000 - num_shared, 4), train[:num_shared]])}
    splits = {"train": split("a", {"a": train}), "val": split("b", columns), "test": split("c", {"a": train[:0]})}
    found = notices(splits, ctx, events)
    assert [text[:29] for text in found] == (["1,000 of val's 2,000 samples "] if num_shared == 1000 else [])


def test_rows_that_were_written_several_times_before_the_split(ctx: Context, events: Any) -> None:
    columns = {"a": np.tile(reals(60, 1), (3, 1)), "b": np.tile(levels(60, 3), (3, 1))}
    (notice,) = notices(drawn(columns, 130), ctx, events)
    assert "of test's 50 samples are also in train" in notice


@pytest.mark.parametrize("name", ["categories", "whole numbers", "rounded", "one number", "full factorial"])
def test_inputs_that_repeat_by_nature(ctx: Context, events: Any, name: str) -> None:
    columns = {
        "categories": {"a": levels(3000, 6, 5, 4, 8)},
        "whole numbers": {"a": levels(3000, 80, 4).astype(np.float32)},
        "rounded": {"a": np.round(reals(20_000, 2), 1)},
        "one number": {"a": np.round(reals(3000, 1), 2)},
        "full factorial": {"a": np.stack(np.meshgrid(*[np.arange(4)] * 6), -1).reshape(-1, 6)},
    }[name]
    assert not notices(drawn(columns, len(columns["a"]) // 2), ctx, events, may_repeat=name in ("categories",))


def test_short_texts_repeat_and_long_ones_do_not(ctx: Context, events: Any) -> None:
    for length, num_notices in ((5, 0), (40, 1)):
        tokens = RaggedColumn(np.tile(RNG.integers(0, 99, 30 * length), 4), np.arange(121) * length, 0)
        ids, labels = np.array([f"t/{row}" for row in range(120)]), ArrayColumn(np.zeros(120))
        whole = Split(ids, {"tokens": SubsetColumn(tokens, RNG.permutation(120))}, {"y": labels})
        splits = {
            "train": whole.subset(np.arange(80)),
            "val": whole.subset(np.arange(0)),
            "test": whole.subset(np.arange(80, 120)),
        }
        assert len(notices(splits, ctx, events)) == num_notices


def test_samples_of_many_values_are_compared_by_some(
    ctx: Context, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_MAX_VALUES", 100 * 200)
    monkeypatch.setattr(duplicates, "_PART_BYTES", 40_000)
    pixels = RNG.integers(0, 256, (240, 30, 30, 1), dtype=np.uint8)
    splits = {"train": split("a", {"a": pixels[:100]}), "test": split("b", {"a": pixels[80:]})}
    (notice,) = notices(splits, ctx, events)
    assert notice.startswith("20 of test's 160 samples")


def test_a_data_set_without_targets_is_measured_by_nothing(ctx: Context, events: Any) -> None:
    columns = {"a": reals(50, 3)}
    splits = {
        name: Split(of.ids, of.inputs, {})
        for name, of in (("train", split("a", columns)), ("test", split("b", columns)))
    }
    assert not notices(splits, ctx, events)


def test_tables_texts_and_arrays(tmp_path: Path, ctx: Context, events: Any) -> None:
    rows = [f"{x:.6f},{k},{k}" for x, k in zip(RNG.normal(size=60), RNG.integers(0, 2, 60), strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["x,k,y", *rows * 3]))
    load_table(TableConfig(path=str(tmp_path / "t.csv"), task="classification", targets=("y",)), ctx)
    words = [" ".join(RNG.choice(list("abcdefghij"), 30)) + f",{number % 2}" for number in range(60)]
    (tmp_path / "w.csv").write_text("\n".join(["text,y", *words * 3]))
    load_text(TextConfig(path=str(tmp_path / "w.csv"), task="classification", targets=("y",), vocabulary_size=300), ctx)
    np.savez(tmp_path / "a.npz", x=np.tile(reals(60, 2), (3, 1)), y=np.tile(np.arange(60) % 2, 3))
    load_arrays(ArraysConfig(path=str(tmp_path / "a.npz"), inputs=("x",), target="y", task="classification"), ctx)
    assert [text.partition(" of ")[2][:42] for text in events.notices] == [
        "test's 36 samples are also in train, the f"
    ] * 3
    assert ["t.csv/" in events.notices[0], "w.csv/" in events.notices[1], "a.npz/" in events.notices[2]] == [True] * 3


def test_copies_of_image_files(tmp_path: Path, ctx: Context, events: Any) -> None:
    for name in ("train", "test"):
        for pet in ("cat", "dog"):
            (tmp_path / "pets" / name / pet).mkdir(parents=True)
    for number in range(40):
        pet = "cat" if number % 2 else "dog"
        pixels = RNG.integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pets" / "train" / pet / f"{number}.bmp")
        if number < 12:
            shutil.copy(
                tmp_path / "pets" / "train" / pet / f"{number}.bmp", tmp_path / "pets" / "test" / pet / f"x{number}.bmp"
            )
        else:
            Image.fromarray(255 - pixels).save(tmp_path / "pets" / "test" / pet / f"{number}.bmp")
    config = ImageFolderConfig(path=str(tmp_path / "pets"), image_size=16, num_workers=0, val_size=0)
    load_image_folder(config, ctx)
    (notice,) = events.notices
    assert notice.startswith("12 of test's 40 samples are also in train, the first of them test/cat/x1")
    events.clear()
    load_image_folder(config.model_copy(update={"unlabeled": True}), ctx)
    assert not events.notices
