"""A stored task that names functions of the user's: it calls those that the manifest names, and no others.

`tests/plugins/ptpipe_data/test_python_file.py` has what the functions compute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ptpipe import IntegrityError, StageError, source_code
from ptpipe_torch import Classification, Regression
from ptpipe_torch.task.own_functions import OwnFunction, OwnFunctionsTask
from ptpipe_torch.task.task import Task

BASE = Classification(class_names=("a", "b")).to_json()
OUTPUTS, TARGETS = {"logits": torch.tensor([[3.0, 1.0]])}, {"labels": torch.tensor([1])}


@pytest.fixture
def file(tmp_path: Path, modules_forgotten: None) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "from os import system\ndef f(outputs, targets): return outputs[:, 0]\ndef g(*_): system('false')\n"
    )
    return path


def task_of(file: Path, address: str, **changes: Any) -> Task:
    function = {"address": address, "source": source_code(file).digest}
    content = OwnFunctionsTask(base=BASE).to_json() | {"loss": function} | changes
    return Task.from_json(content).with_source_functions([f"{file}:f"])


def test_a_stored_task_calls_a_function_that_is_named(file: Path) -> None:
    task = task_of(file, "mine.py:f")
    assert task.losses(OUTPUTS, TARGETS).tolist() == [3.0]
    assert (task.targets, task.outputs) == (Task.from_json(BASE).targets, Task.from_json(BASE).outputs)
    assert task.class_scores == {"logits": 1} and task.output_scale == task.output_shift == ()


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("mine.py:g", StageError),
        ("mine.py:system", StageError),
        ("../mine.py:f", IntegrityError),
        ("os:system", StageError),
        ("mine.py:f.__globals__", IntegrityError),
    ],
)
def test_it_calls_nothing_else(file: Path, address: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"no option above names this function|is not the address of"):
        task_of(file, address).losses(OUTPUTS, TARGETS)


def test_it_calls_nothing_without_a_manifest(file: Path) -> None:
    with pytest.raises(StageError, match="no option above names this function"):
        task_of(file, "mine.py:f").with_source_functions([]).losses(OUTPUTS, TARGETS)


@pytest.mark.parametrize("changes", [{"loss": "os:system"}, {"loss": {"address": "mine.py:f"}}, {"more": 1}])
def test_unknown_content_is_refused(file: Path, changes: Any) -> None:
    with pytest.raises(ValueError, match="validation error"):
        task_of(file, "mine.py:f", **changes)


def test_functions_of_ones_own_are_equal_by_code(file: Path) -> None:
    source = source_code(file).digest
    assert OwnFunction(address="mine.py:f", source=source) == OwnFunction(address="mine.py:f", source=source)


def test_what_a_metric_of_the_task_needs_is_reported_where_it_is_the_primary_one(file: Path) -> None:
    base = Regression(target_names=("y",), mean=(0.0,), std=(1.0,)).to_json()
    figures = {"per_target": [{"name": "y", "is_constant": True}]}
    own = {"address": "mine.py:f", "source": source_code(file).digest}
    assert OwnFunctionsTask(base=base, loss=OwnFunction(**own)).undefined(figures, "test")
    assert OwnFunctionsTask(base=base, metric=OwnFunction(**own)).undefined(figures, "test") == []
