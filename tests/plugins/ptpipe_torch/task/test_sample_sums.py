"""What comparisons draw samples from: the totals give the figures of the same samples, for every built-in task.

Shape legend: N samples, R draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptpipe import source_code
from ptpipe_torch import (
    Classification,
    LanguageModeling,
    MultiLabel,
    Regression,
    Segmentation,
    Task,
    TeacherOutputs,
    TokenClassification,
)
from ptpipe_torch.task.class_task import SmoothedTask
from ptpipe_torch.task.own_functions import OwnFunction, OwnFunctionsTask
from ptpipe_torch.task.ranking import RANKING_ROWS
from ptpipe_torch.task.teacher_outputs import TeacherOutput

N, L = 23, 5
Tensors = dict[str, torch.Tensor]
CLASSES = tuple("abcdefg")
GENERATOR = torch.Generator().manual_seed(3)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def randint(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR)


CASES: dict[str, tuple[Task, Tensors, Tensors]] = {
    "classification": (Classification(class_names=CLASSES), {"logits": randn(N, 7)}, {"labels": randint(0, 7, N)}),
    "two classes": (Classification(class_names=("a", "b")), {"logits": randn(N, 2)}, {"labels": randint(0, 2, N)}),
    "positive class": (
        Classification(
            class_names=("a", "b", "c"),
            positive_class="b",
            label_smoothing=0.1,
            focal_gamma=2.0,
            class_weights=(0.5, 2.0, 1.0),
        ),
        {"logits": randn(N, 3)},
        {"labels": randint(0, 3, N)},
    ),
    "average precision": (
        Classification(class_names=("a", "b"), positive_class="b", positive_metric="average_precision"),
        {"logits": randn(N, 2)},
        {"labels": randint(0, 2, N)},
    ),
    "all classes": (
        Classification(class_names=("a", "b", "c"), ovr_metric="roc_auc_ovr"),
        {"logits": randn(N, 3)},
        {"labels": randint(0, 3, N)},
    ),
    "labels": (
        MultiLabel(label_names=("x", "y", "never")),
        {"logits": randn(N, 3) - torch.tensor([0, 0, 99])},
        {"labels": randint(0, 2, N, 3).float() * torch.tensor([1, 1, 0])},
    ),
    "entities": (
        TokenClassification(class_names=("B-x", "B-y", "I-x", "I-y", "O")),
        {"logits": randn(N, L, 5)},
        {"tags": randint(-1, 5, N, L)},
    ),
    "words without a token": (
        TokenClassification(class_names=("B-x", "B-y", "I-x", "I-y", "O"), has_missed=True),
        {"logits": randn(N, L, 5)},
        {"tags": randint(-1, 5, N, L), "missed": randint(-1, 5 * L, N, 3)},
    ),
    "tags": (
        TokenClassification(class_names=("u", "v"), class_weights=(1.0, 3.0)),
        {"logits": randn(N, L, 2)},
        {"tags": randint(-1, 2, N, L)},
    ),
    "next token": (
        LanguageModeling(vocabulary_size=4),
        {"logits": randn(N, L, 4)},
        {"next_tokens": randint(-1, 4, N, L)},
    ),
    "regression": (
        Regression(target_names=("a", "b"), mean=(1.0, -2.0), std=(0.5, 3.0), loss="huber"),
        {"predictions": randn(N, 2)},
        {"targets": torch.stack([randn(N), torch.full((N,), 4.0)], dim=1)},
    ),
    "maps": (
        Regression(target_names=("a", "b"), mean=(1.0, -2.0), std=(0.5, 3.0), positions=(4, 3), data_range=2.0),
        {"predictions": randn(N, 2, 4, 3)},
        {"targets": torch.stack([randn(N, 4, 3), torch.full((N, 4, 3), 4.0)], dim=1)},
    ),
    "teacher": (
        TeacherOutputs(
            every_output=(
                TeacherOutput(name="boxes", dtype="float32", shape=(2, 4), std=(0.5, 3.0)),
                TeacherOutput(name="embedding", dtype="float32", shape=(), std=(2.0,)),
            )
        ),
        {"boxes": randn(N, 2, 4), "embedding": randn(N)},
        {"boxes": randn(N, 2, 4), "embedding": randn(N)},
    ),
    "pixels": (
        Segmentation(class_names=("a", "b", "never"), shape_HW=(4, 3), ignore=9),
        {"logits": randn(N, 3, 4, 3) - torch.tensor([0, 0, 99])[:, None, None]},
        {"masks": torch.where(randn(N, 4, 3) > 1, 9, randint(0, 2, N, 4, 3))},
    ),
}


@pytest.fixture(params=[*CASES, "own functions"])
def case(request: pytest.FixtureRequest, tmp_path: Path, modules_forgotten: None) -> tuple[Task, Tensors, Tensors]:
    if request.param in CASES:
        return CASES[request.param]
    file = tmp_path / "mine.py"
    file.write_text("def far(logits, labels): return logits[:, 0].abs()\n")
    base, outputs, targets = CASES["classification"]
    own = OwnFunction(address="mine.py:far", source=source_code(file).digest)
    task = OwnFunctionsTask(base=base.to_json(), loss=own, metric=own, higher_is_better=False)
    return task.with_source_functions([f"{file}:far"]), outputs, targets


@pytest.mark.parametrize("name", [name for name, (task, _, _) in CASES.items() if isinstance(task, SmoothedTask)])
def test_smoothing_changes_losses_alone(name: str) -> None:
    task, outputs, targets = CASES[name]
    plain, smoothed = task.with_label_smoothing(0), task.with_label_smoothing(0.3)
    assert not smoothed.losses(outputs, targets).equal(plain.losses(outputs, targets))
    for method in ("samples", "sums", "sample_sums"):
        found, expected = (getattr(of, method)(outputs, targets) for of in (smoothed, plain))
        assert found.keys() == expected.keys()
        assert all(found[key].equal(expected[key]) for key in expected), method


def figures_of(task: Task, outputs: Tensors, targets: Tensors, rows: Any) -> dict[str, Any]:
    parts = ({name: tensor[rows] for name, tensor in side.items()} for side in (outputs, targets))
    sums = {name: total.numpy() for name, total in task.sums(*parts).items()}
    return task.figures(sums, len(rows))


def names_of_sums(task: Task) -> set[str]:
    """The metrics that no ranking of all samples is needed for: see `test_ranking`."""
    return {metric.name for metric in task.metrics} - {*RANKING_ROWS}


@pytest.mark.parametrize("by_default", [False, True])
def test_every_draw_has_the_figures_of_its_samples(case, by_default) -> None:
    task, outputs, targets = case
    kind = Task if by_default else type(task)  # what a task of a plugin's inherits
    rows = {name: of.numpy() for name, of in kind.sample_sums(task, outputs, targets).items()}
    assert {len(of) for of in rows.values()} == {N}
    draws = [np.random.default_rng(seed).integers(0, N, N) for seed in range(5)]
    totals = {name: np.stack([of[draw].sum(0, dtype=np.float64) for draw in draws]) for name, of in rows.items()}
    values = kind.metric_values(task, totals, N)
    assert values.keys() == names_of_sums(task)
    for row, draw in enumerate(draws):
        expected = figures_of(task, outputs, targets, torch.from_numpy(draw))
        for name, values_R in values.items():
            assert values_R.shape == (len(draws),)
            assert values_R[row] == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name


def test_a_metric_is_computed_from_what_has_its_name_alone(case) -> None:
    task, outputs, targets = case
    rows = {name: of.numpy() for name, of in task.sample_sums(outputs, targets).items()}
    assert rows.keys() == names_of_sums(task)
    totals = {name: of.sum(0, dtype=np.float64)[None] for name, of in rows.items()}
    before = task.metric_values(totals, N)
    for name, total in totals.items():
        after = task.metric_values(totals | {name: total * 0.5 + 0.1}, N)
        assert {other for other in after if after[other] != before[other]} == {name}


def test_bool_rows_are_fractions_of_the_samples(case) -> None:
    task, outputs, targets = case
    figures = figures_of(task, outputs, targets, torch.arange(N))
    for name, rows_N in task.sample_sums(outputs, targets).items():
        if rows_N.dtype == torch.bool:
            assert rows_N.shape == (N,) and figures[name] == int(rows_N.sum()) / N


def test_rows_of_a_thousand_classes_stay_small() -> None:
    task = Classification(class_names=tuple(map(str, range(1000))), positive_class="3")
    rows = task.sample_sums({"logits": randn(N, 1000)}, {"labels": randint(0, 1000, N)})
    assert sum(of.nbytes for of in rows.values()) < 16 * N


def test_of_the_worst_rows_nothing_is_right(case) -> None:
    task, outputs, targets = case
    by_metric = {metric.name: metric for metric in task.metrics}
    before = {name: of.numpy() for name, of in task.sample_sums(outputs, targets).items()}
    worst = task.worst_sums(before)
    assert worst.keys() <= before.keys()
    for name, rows in worst.items():
        assert rows.shape == before[name].shape
        totals = [{key: of.sum(0, dtype=np.float64)[None] for key, of in before.items()} for _ in range(2)]
        totals[1][name] = rows.sum(0, dtype=np.float64)[None]
        values = [float(task.metric_values(of, N)[name][0]) for of in totals]
        assert by_metric[name].higher_is_better and values[0] > values[1] == 0


def test_every_fraction_of_a_built_in_task_has_a_worst_row(case) -> None:
    task, outputs, targets = case
    rows = {name: of.numpy() for name, of in task.sample_sums(outputs, targets).items()}
    fractions = {metric.name for metric in task.metrics if metric.is_fraction} & names_of_sums(task)
    assert fractions <= {*task.worst_sums(rows), *(name for name, of in rows.items() if of.ndim == 1)}
