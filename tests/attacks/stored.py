"""Stored data sets and predictions of a shared folder."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .attack import Attack
from .models import Payload, entry, safetensors


def npy(shape: str, dtype: str | list[tuple[str, str]] = "|u1", body: bytes = b"") -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + body


def data(
    folder: Path,
    record: Callable[[dict[str, Any]], object] | None = None,
    files: Mapping[str, bytes | None] = MappingProxyType({}),
) -> None:
    """Save a small data set, then alter its record, or replace or remove arrays: `{"train.ids": ...}`.

    Column 0 holds the images, 1 the labels; positions 0 are those of train, 1 those of the empty splits.
    """
    import numpy as np

    from ptpipe_torch import ArrayColumn, Classification, Data, DatasetInfo, ImageInfo, Split

    inputs = {"images": ArrayColumn(np.zeros((3, 4, 4, 1), np.uint8))}
    split = Split(np.array(["a", "b", "c"]), inputs, {"labels": ArrayColumn(np.arange(3))})
    image = ImageInfo(shape_CHW=(1, 4, 4), mean=(0.5,), std=(0.5,))
    info = DatasetInfo("d", {"images": image}, Classification(class_names=("0", "1", "2")))
    Data(info, {"train": split}).save(folder)
    if record is not None:
        content = json.loads((folder / "data.json").read_text())
        text = record(content)
        (folder / "data.json").write_text(text if isinstance(text, str) else json.dumps(content))
    for name, replaced in files.items():
        path = folder / f"{name}.npy"
        path.unlink()
        if replaced is not None:
            path.write_bytes(replaced)


def image_facts(**facts: Any) -> Callable[[dict[str, Any]], object]:
    """Change facts of the images' column."""
    return lambda record: record["info"]["inputs"]["images"].update(facts)


def task_facts(**facts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["info"]["task"].update(facts)


def view(**view: int) -> Callable[[dict[str, Any]], object]:
    """Change where the images of train are."""
    return lambda record: record["splits"]["train"]["images"].update(view)


def column(**described: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["columns"][0].update(described)


def renamed_input(name: str) -> Callable[[dict[str, Any]], object]:
    def rename(record: dict[str, Any]) -> None:
        for columns in (record["info"]["inputs"], *record["splits"].values()):
            columns[name] = columns.pop("images")

    return rename


def predictions(folder: Path, text: str | None = None, tensors: bytes | None = None) -> None:
    import numpy as np

    from ptpipe_torch import Predictions

    arrays = {"prediction": np.arange(2), "logits": np.zeros((2, 3), np.float32)}
    Predictions(np.array(["a", "b"]), arrays).save(folder)
    if text is not None:
        (folder / "predictions.json").write_text(text)
    if tensors is not None:
        (folder / "predictions.safetensors").write_bytes(tensors)


RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "nested": lambda record: "[" * 100_000,
    "a number of 10^6 digits": lambda record: '{"splits": ' + "9" * 1_000_000 + "}",
    "100,000 processes": lambda record: record["loader"].update(num_workers=100_000),
    "batches of nothing": lambda record: record["loader"].update(batch_size=0),
    "a mean of NaN": image_facts(mean=[float("nan")]),
    "a mean of text": image_facts(mean="0.5"),
    "a std of 0": image_facts(std=[0.0]),
    "means of two channels": image_facts(mean=[0.5, 0.5]),
    "an unknown fact": image_facts(loader="os:system"),
    "a column that is a function": image_facts(type="os:system"),
    "a column that is a builtin": image_facts(type="builtins:exec"),
    "a column that is a model": image_facts(type="ptpipe_torch:Model"),
    "a column that is a task": image_facts(type="ptpipe_torch:Classification"),
    "a column of no kind": image_facts(type="ptpipe_torch:ColumnInfo"),
    "a column of an unknown module": image_facts(type="no_such_module:Pixels"),
    "a column of a module that is not loaded": image_facts(type="antigravity:Pixels"),
    "a column of a program": image_facts(type="ptpipe.__main__:Pixels"),
    "a column of a long address": image_facts(type="a." * 100_000 + "a:b"),
    "a column without a type": lambda record: record["info"]["inputs"]["images"].pop("type"),
    "a column that is no object": lambda record: record["info"]["inputs"].update(images=7),
    "a task that is a function": task_facts(type="os:system"),
    "a task that is a model": task_facts(type="ptpipe_torch:Model"),
    "a task that is a column": task_facts(type="ptpipe_torch:ArrayInfo"),
    "a task of an unknown module": task_facts(type="no_such_module:Task"),
    "a task without classes": task_facts(class_names=[]),
    "a task of too few classes": task_facts(class_names=["0", "1"]),
    "a label smoothing beyond 1": task_facts(label_smoothing=2.0),
    "no inputs": lambda record: record["info"].update(inputs={}),
    "an input called as a target": renamed_input("labels"),
    "an input called as an output": renamed_input("logits"),
    "an input of no name": renamed_input(""),
    "an input that is no name": renamed_input("../images"),
    "a column that no split has": lambda record: record["info"]["inputs"].update(
        masks={"type": "ptpipe_torch:ArrayInfo", "dtype": "uint8"}
    ),
    "a split without labels": lambda record: record["splits"]["train"].pop("labels"),
    "a split of one column more": lambda record: record["splits"]["train"].update(masks={"column": 0, "positions": 0}),
    "no splits": lambda record: record["splits"].clear(),
    "a column that is not there": view(column=7),
    "a column before the first": view(column=-1),
    "positions that are not there": view(positions=7),
    "positions of another number": view(positions=1),
    "positions elsewhere": view(positions="../../x"),
    "a column of another kind": column(kind="pickle"),
    "an unknown member": lambda record: record["loader"].update(collate_fn="os:system"),
    "splits elsewhere": lambda record: record["splits"].update({"../../x": record["splits"]["val"]}),
    "a split of no columns": lambda record: record["splits"].update(train=7),
    "images of 10^9 pixels": column(kind="image_files", root="/", size=10**9),
    "images of any file": column(kind="image_files", root="/"),
    "an unknown augmentation": lambda record: record["loader"].update(augment=["__import__"]),
}
ARRAYS: dict[str, dict[str, bytes | None]] = {
    "2^62 pixels": {"column_0": npy("(4611686018427387904, 1, 1, 1)")},
    "2^36 ids": {"train.ids": npy("(68719476736,)", "|S1")},
    "ids of 2^31 bytes": {"train.ids": npy("(3,)", "|S2147483647")},
    "ids of no bytes": {"train.ids": npy("(4611686018427387904,)", "|S0")},
    "fewer ids": {"train.ids": npy("(2,)", "|S1", b"ab")},
    "more ids": {"train.ids": npy("(4,)", "|S1", b"abcd")},
    "ids that are numbers": {"train.ids": npy("(3,)", "<i8", bytes(24))},
    "ids of two axes": {"train.ids": npy("(3, 1)", "|S1", b"abc")},
    "ids that are not UTF-8": {"train.ids": npy("(3,)", "|S1", b"ab\xff")},
    "negative positions": {"positions_0": npy("(3,)", "<i8", b"\xff" * 24)},
    "positions beyond": {"positions_0": npy("(3,)", "<i8", b"\x7f" * 24)},
    "one position beyond": {"positions_0": npy("(3,)", "<i8", bytes(16) + b"\3" + bytes(7))},
    "positions of fractions": {"positions_0": npy("(3,)", "<f8", bytes(24))},
    "fewer positions": {"positions_0": npy("(1,)", "<i8", bytes(8))},
    "2^60 positions": {"positions_0": npy("(1152921504606846976,)", "<i8")},
    "no positions": {"positions_0": None},
    "no labels": {"column_1": None},
    "fewer labels": {"column_1": npy("(1,)", "<i8", bytes(8))},
    "a label alone": {"column_1": npy("()", "<i8", bytes(8))},
    "labels of text": {"column_1": npy("(3,)", "|S8", bytes(24))},
    "labels of records": {"column_1": npy("(3,)", [("a", "<i8")], bytes(24))},
    "labels of objects": {"column_1": npy("(3,)", "|O", pickle.dumps(Payload()))},
    "a pickle": {"column_1": pickle.dumps(Payload())},
    "a zip": {"column_1": b"PK\3\4" + bytes(50)},
    "a header of code": {"column_1": npy("(__import__('os').system('touch canary'),)", "<i8")},
    "a long header": {"column_1": npy("(" * 9000 + ")" * 9000, "<i8")},
    "nothing": {"column_1": b""},
}
VALUES: dict[str, dict[str, bytes | None]] = {
    "labels beyond the classes": {"column_1": npy("(3,)", "<i8", b"\x7f" * 24)},
    "negative labels": {"column_1": npy("(3,)", "<i8", b"\xff" * 24)},
    "an id twice": {"train.ids": npy("(3,)", "|S1", b"aab")},
    "labels of fractions": {"column_1": npy("(3,)", "<f8", bytes(24))},
    "labels of two axes": {"column_1": npy("(3, 2)", "<i8", bytes(48))},
    "images of another size": {"column_0": npy("(3, 5, 5, 1)", "|u1", bytes(75))},
    "images of more channels": {"column_0": npy("(3, 4, 4, 2)", "|u1", bytes(96))},
    "images of fewer axes": {"column_0": npy("(3, 4)", "|u1", bytes(12))},
}
"""Arrays that could be some data set's."""
LONG_IDS = json.dumps({"ids": ["a" * 1_000_000, *["b"] * 100_000], "metrics": {}})

ATTACKS = [
    *(
        Attack(f"stored data, {name}", partial(data, record=change), "stored_data", "(IntegrityError|StageError): .")
        for name, change in RECORDS.items()
    ),
    *(
        Attack(
            f"stored data, {name}",
            partial(data, files=files),
            "stored_data",
            "IntegrityError: not a stored data set: .",
        )
        for name, files in ARRAYS.items()
    ),
    *(
        Attack(f"stored data, {name}", partial(data, files=files), "stored_data", "(IntegrityError|StageError): .")
        for name, files in VALUES.items()
    ),
    Attack("stored data, sound", data, "stored_data", None),
    *(
        Attack(f"predictions, {name}", partial(predictions, text=text), "predictions", "IntegrityError: .")
        for name, text in {"nested": "[" * 100_000, "no members": "{}", "long ids": LONG_IDS, "a list": "[]"}.items()
    ),
    Attack(
        "predictions, other tensors",
        partial(predictions, tensors=safetensors({"a": entry([0])})),
        "predictions",
        "Integ",
    ),
    Attack(
        "predictions, a pickle", partial(predictions, tensors=pickle.dumps(Payload())), "predictions", "IntegrityError"
    ),
    Attack("predictions, sound", predictions, "predictions", None),
]
