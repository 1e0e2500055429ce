"""Stored data sets of texts: rows of different lengths, and files that belong to them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .attack import Attack
from .models import Payload
from .stored import column, npy, task_facts


def texts(
    folder: Path,
    record: Callable[[dict[str, Any]], object] | None = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Save a small data set of tokens (column 0) and tags (column 1), then alter its record, or replace files."""
    import numpy as np

    from ptpipe_torch import Data, DatasetInfo, RaggedColumn, Split, TokenClassification, TokensInfo

    offsets = np.array([0, 2, 3])
    inputs = {"tokens": RaggedColumn(np.array([1, 2, 3]), offsets, 0)}
    split = Split(np.array(["a", "b"]), inputs, {"tags": RaggedColumn(np.array([0, 1, 0]), offsets, -1)})
    task = TokenClassification(class_names=("0", "1"))
    info = DatasetInfo("d", {"tokens": TokensInfo(vocabulary_size=4, max_length=4)}, task)
    Data(info, {"train": split}, assets={"tokenizer.json": b"{}"}).save(folder)
    if record is not None:
        content = json.loads((folder / "data.json").read_text())
        record(content)
        (folder / "data.json").write_text(json.dumps(content))
    for name, replaced in files.items():
        (folder / name).write_bytes(replaced)


def int64(*values: int) -> bytes:
    return npy(f"({len(values)},)", "<i8", b"".join(value.to_bytes(8, "little", signed=True) for value in values))


def asset(name: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update(assets=[name])


def token_facts(**facts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["info"]["inputs"]["tokens"].update(facts)


OFFSETS = {
    "beyond the values": int64(0, 2, 4),
    "short of the values": int64(0, 1, 2),
    "not from the first": int64(1, 2, 3),
    "negative": int64(0, -1, 3),
    "decreasing": int64(0, 4, 3),
    "of a distant row": int64(0, 2**62, 3),
    "of differences that overflow": int64(0, -(2**63), 3),
    "none": int64(),
    "one": int64(0),
    "of fewer rows": int64(0, 3),
    "of fractions": npy("(3,)", "<f8", bytes(24)),
    "of text": npy("(3,)", "|S8", bytes(24)),
    "of two axes": npy("(3, 1)", "<i8", bytes(24)),
    "2^60": npy("(1152921504606846976,)", "<i8"),
    "of objects": npy("(3,)", "|O", pickle.dumps(Payload())),
    "a pickle": pickle.dumps(Payload()),
    "nothing": b"",
}
LONG = {
    "column_0.npy": npy("(65537,)", "|u1", bytes(65537)),
    "column_0.offsets.npy": int64(0, 65537, 65537),
}
"""A row of a token too many."""
RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "an asset above": asset("../tokenizer.json"),
    "an asset of a path": asset("/etc/passwd"),
    "an asset in a folder": asset("a/b.json"),
    "an asset of no name": asset(""),
    "an asset that is hidden": asset(".json"),
    "an asset that is the record": asset("data.json"),
    "an asset that is an array": asset("column_0.npy"),
    "an asset of two lines": asset("tokenizer.json\n"),
    "an asset that is not there": asset("other.json"),
    "an asset that is a number": asset(7),
    "an asset of a long name": asset("a" * 5000 + ".json"),
    "an asset of a NUL": asset("a\0.json"),
    "padding of text": column(padding="0"),
    "padding of a fraction": column(padding=0.5),
    "rows of 10^12 values": column(length=10**12),
    "rows of no values": column(length=0),
    "rows of -1 values": column(length=-1),
    "rows of fewer values than there are": column(length=1),
    "tokens that are an array": column(kind="array"),
    "a vocabulary of 3": token_facts(vocabulary_size=3),
    "a vocabulary of text": token_facts(vocabulary_size="4"),
    "a padding token of none": token_facts(padding_id=4),
    "a digest that is none": token_facts(tokenizer_sha256="../x"),
    "tags of one class": task_facts(class_names=["0"]),
    "tags of no length": task_facts(length=0),
    "tags of another axis": task_facts(length="batch"),
    "another task of tokens": task_facts(type="ptpipe_torch:LanguageModeling"),
}
VALUES = {
    "a token beyond": int64(1, 4, 3),
    "a negative token": int64(1, -1, 3),
    "a token of 2^62": int64(1, 2**62, 3),
    "tokens of fractions": npy("(3,)", "<f8", bytes(24)),
    "tokens of bytes": npy("(3,)", "|u1", bytes(3)),
    "tokens of two axes": npy("(3, 1)", "<i8", bytes(24)),
    "2^62 tokens": npy("(4611686018427387904,)", "|u1"),
    "tokens that are objects": npy("(3,)", "|O", pickle.dumps(Payload())),
}
ATTACKS = [
    *(
        Attack(
            f"stored texts, offsets {name}",
            partial(texts, files={"column_0.offsets.npy": content}),
            "stored_data",
            "IntegrityError: not a stored data set: .",
        )
        for name, content in OFFSETS.items()
    ),
    *(
        Attack(f"stored texts, {name}", partial(texts, record=change), "stored_data", "(IntegrityError|StageError): .")
        for name, change in RECORDS.items()
    ),
    *(
        Attack(
            f"stored texts, {name}",
            partial(texts, files={"column_0.npy": content}),
            "stored_data",
            "(IntegrityError|StageError): .",
        )
        for name, content in VALUES.items()
    ),
    *(
        Attack(f"stored texts, {name}, listed", partial(texts, record=change), "stored_assets", "IntegrityError: .")
        for name, change in RECORDS.items()
        if name.startswith("an asset") and name not in ("an asset that is not there", "an asset of a long name")
    ),
    Attack("stored texts, a row of 65,537 tokens", partial(texts, files=LONG), "stored_data", "IntegrityError: not a"),
    Attack("stored texts, sound", texts, "stored_data", None),
]
