"""Stored data sets and predictions of a shared folder."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .attack import Attack
from .models import Payload, entry, safetensors


def npy(shape: str, dtype: str = "|u1", body: bytes = b"") -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + body


def data(folder: Path, record: Callable[[dict[str, Any]], object] | None = None, **files: bytes) -> None:
    """Save a small data set, then alter its record or replace files: `train_ids=...`."""
    import numpy as np

    from ptpipe_torch import ArrayImages, Data, DatasetInfo, Split

    images = ArrayImages(np.zeros((3, 4, 4, 1), np.uint8))
    split = Split(np.array(["a", "b", "c"]), np.arange(3), images)
    Data(DatasetInfo("d", ("0", "1", "2"), (1, 4, 4), (0.5,), (0.5,)), {"train": split}).save(folder)
    if record is not None:
        content = json.loads((folder / "data.json").read_text())
        text = record(content)
        (folder / "data.json").write_text(text if isinstance(text, str) else json.dumps(content))
    for name, replaced in files.items():
        (folder / f"{name.replace('_', '.') if name != 'images_0' else name}.npy").write_bytes(replaced)


def predictions(folder: Path, text: str | None = None, tensors: bytes | None = None) -> None:
    import numpy as np

    from ptpipe_torch import Predictions

    Predictions(np.array(["a", "b"]), np.arange(2), np.zeros((2, 3), np.float32)).save(folder)
    if text is not None:
        (folder / "predictions.json").write_text(text)
    if tensors is not None:
        (folder / "predictions.safetensors").write_bytes(tensors)


RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "nested": lambda record: "[" * 100_000,
    "a number of 10^6 digits": lambda record: '{"splits": ' + "9" * 1_000_000 + "}",
    "100,000 processes": lambda record: record["loader"].update(num_workers=100_000),
    "batches of nothing": lambda record: record["loader"].update(batch_size=0),
    "a mean of NaN": lambda record: record["info"].update(mean=[float("nan")]),
    "an unknown member": lambda record: record["loader"].update(collate_fn="os:system"),
    "splits elsewhere": lambda record: record["splits"].update({"../../x": 0}),
    "a split of no source": lambda record: record["splits"].update(train=7),
    "images of 10^9 pixels": lambda record: record["sources"][0].update(kind="files", root="/", size=10**9),
    "an unknown augmentation": lambda record: record["loader"].update(augment=["__import__"]),
}
ARRAYS = {
    "2^62 pixels": {"images_0": npy("(4611686018427387904, 1, 1, 1)")},
    "2^36 ids": {"train_ids": npy("(68719476736,)", "|S1")},
    "ids of 2^31 bytes": {"train_ids": npy("(3,)", "|S2147483647")},
    "ids of no bytes": {"train_ids": npy("(4611686018427387904,)", "|S0")},
    "negative positions": {"train_positions": npy("(3,)", "<i8", b"\xff" * 24)},
    "positions beyond": {"train_positions": npy("(3,)", "<i8", b"\x7f" * 24)},
    "fewer labels": {"train_labels": npy("(1,)", "<i8", bytes(8))},
    "labels of objects": {"train_labels": npy("(3,)", "|O", pickle.dumps(Payload()))},
    "a pickle": {"train_labels": pickle.dumps(Payload())},
    "a zip": {"train_labels": b"PK\3\4" + bytes(50)},
    "a header of code": {"train_labels": npy("(__import__('os').system('touch canary'),)", "<i8")},
    "a long header": {"train_labels": npy("(" * 9000 + ")" * 9000, "<i8")},
    "nothing": {"train_labels": b""},
}
LONG_IDS = json.dumps({"ids": ["a" * 1_000_000, *["b"] * 100_000], "metrics": {}})

ATTACKS = [
    *(
        Attack(f"stored data, {name}", partial(data, record=change), "stored_data", "(IntegrityError|StageError): .")
        for name, change in RECORDS.items()
    ),
    *(
        Attack(
            f"stored data, {name}", partial(data, **files), "stored_data", "IntegrityError: not a stored data set: ."
        )
        for name, files in ARRAYS.items()
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
