"""Facts of columns and tasks: stored by the address of their class, which must be one in a loaded plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import IntegrityError
from ptpipe_torch import (
    ArrayColumn,
    ArrayInfo,
    Classification,
    ColumnInfo,
    Data,
    DatasetInfo,
    ImageInfo,
    Metric,
    Split,
    Task,
    TensorSpec,
)
from ptpipe_torch.data.column_info import Conversion
from ptpipe_torch.facts import Facts


class Decibels(ColumnInfo):
    """A stranger's column: volts, given in decibels."""

    reference: float

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, "float32", ("batch",))

    def conversion(self, name: str) -> Conversion:
        return lambda values_B, channels_last: 20 * torch.log10(values_B / self.reference)


class Regression(Task):
    """A stranger's task."""

    unit: str = ""

    targets = property(lambda self: {"volume": ArrayInfo(dtype="float32")})
    outputs = property(lambda self: (TensorSpec("estimate", "float32", ("batch",)),))
    metrics = property(lambda self: (Metric("mae", higher_is_better=False),))

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (outputs["estimate"] - targets["volume"]).abs()

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"error": self.losses(outputs, targets).double().sum()}

    def figures(self, sums: Mapping[str, np.ndarray], num_samples: int) -> dict[str, Any]:
        return {"mae": float(sums["error"]) / num_samples}

    def samples(
        self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {"prediction": outputs["estimate"], "score": -self.losses(outputs, targets)}


FACTS = [
    ArrayInfo(dtype="int64"),
    ArrayInfo(dtype="float32", shape=(2, "length")),
    ImageInfo(shape_CHW=(3, 4, 5), mean=(0.1, 0.4, 0.7), std=(0.2, 0.3, 0.5)),
    Classification(class_names=("größe", ""), label_smoothing=0.1),
    Decibels(reference=0.775),
    Regression(unit="dB"),
]


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: type(facts).__name__)
def test_facts_come_back(facts: Facts) -> None:
    stored = json.loads(json.dumps(facts.to_json()))
    assert stored["type"] == f"{type(facts).__module__}:{type(facts).__name__}"
    base = Task if isinstance(facts, Task) else ColumnInfo
    for of in (base, type(facts)):
        again = of.from_json(stored)
        assert type(again) is type(facts) and again == facts


def test_a_data_set_of_a_strangers_facts_is_stored_and_read(tmp_path: Path) -> None:
    info = DatasetInfo("tones", {"volts": Decibels(reference=1.0)}, Regression(unit="dB"))
    volts = ArrayColumn(np.array([1, 10, 100], dtype=np.float32))
    volumes = ArrayColumn(np.array([0, 20, 41], dtype=np.float32))
    Data(info, {"test": Split(np.array(["a", "b", "c"]), {"volts": volts}, {"volume": volumes})}).save(tmp_path)
    again = Data.load(tmp_path)
    assert again.info == info and isinstance(again.info.task, Regression)
    (batch,) = again.batches("test")
    assert batch.inputs["volts"].tolist() == [0, 20, 40]
    sums = again.info.task.sums({"estimate": batch.inputs["volts"]}, batch.targets)
    figures = again.info.task.figures({name: value.numpy() for name, value in sums.items()}, len(batch))
    assert figures == {"mae": pytest.approx(1 / 3)}


@pytest.mark.parametrize(
    "address",
    [
        "os:system",
        "builtins:eval",
        "subprocess:Popen",
        "collections:OrderedDict",
        "pydantic:BaseModel",
        "ptpipe_torch:Model",
        "ptpipe_torch:Column",
        "ptpipe_torch:ColumnInfo",  # abstract
        "ptpipe_torch.facts:Facts",
        "ptpipe_torch:Classification",  # a task
        f"{__name__}:Regression",
        f"{__name__}:FACTS",
        f"{__name__}:missing",
        f"{__name__}:Decibels.spec",
        "no_such_module:Decibels",
        "ptpipe_torch.no_such_module:Decibels",
        "Decibels",
        ":",
        "",
    ],
)
def test_a_type_that_is_no_column_is_refused(address: str) -> None:
    with pytest.raises(IntegrityError):
        ColumnInfo.from_json({"type": address, "reference": 1.0})


@pytest.mark.parametrize("address", ["ptpipe_torch:Task", "ptpipe_torch:ArrayInfo", f"{__name__}:Decibels"])
def test_a_type_that_is_no_task_is_refused(address: str) -> None:
    with pytest.raises(IntegrityError, match=f"^{address} is not a Task$"):
        Task.from_json({"type": address})


def test_facts_of_another_class_are_refused() -> None:
    with pytest.raises(IntegrityError, match=r"is not a ImageInfo$"):
        ImageInfo.from_json(ArrayInfo(dtype="int64").to_json())


@pytest.mark.parametrize("content", [{}, {"type": None}, {"type": 3}, {"type": ["os:system"]}, {"type": {"a": 1}}])
def test_a_type_that_is_no_address_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        ColumnInfo.from_json(content)


@given(st.text(max_size=40))
def test_no_text_raises_anything_but_integrity_error(address: str) -> None:
    with pytest.raises(IntegrityError):
        Task.from_json({"type": address})


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"reference": "1.0"},
        {"reference": float("nan")},
        {"reference": None},
        {"reference": 1.0, "unknown": 2},
    ],
)
def test_facts_that_the_class_refuses(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ColumnInfo.from_json({"type": f"{__name__}:Decibels", **facts})


RESTORE = """
import sys; sys.path.insert(0, {folder!r})
from ptpipe import IntegrityError
from ptpipe_torch import ColumnInfo
{first}
try:
    print(ColumnInfo.from_json({{"type": "a_plugin.columns:Own"}}).spec("x"))
except IntegrityError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("import a_plugin.stages", "x (batch) float32"),
        ("", "a_plugin.columns:Own: its plugin is not loaded (name it under `plugins:`)"),
    ],
)
def test_a_class_is_found_where_its_plugin_is_loaded(tmp_path: Path, first: str, said: str) -> None:
    package = tmp_path / "a_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "stages.py").write_text("from ptpipe import hookimpl\n@hookimpl\ndef ptpipe_stages(): return []\n")
    (package / "columns.py").write_text(
        dedent("""
            from ptpipe_torch import ColumnInfo, TensorSpec
            class Own(ColumnInfo):
                def spec(self, name): return TensorSpec(name, "float32", ("batch",))
        """)
    )
    code = RESTORE.format(folder=str(tmp_path), first=first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr
