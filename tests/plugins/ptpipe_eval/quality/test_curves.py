"""The curves that reports draw: under them is the metric, and the few points that are kept follow them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, precision_score, recall_score, roc_auc_score, roc_curve

from ptpipe_eval.quality.curves import CURVES, curves_of, thinned
from ptpipe_eval.quality.details import tables_of
from ptpipe_torch import Classification, MultiLabel
from ptpipe_torch.task.ranking import RANKED, rows_of_samples, with_ranking

RANDOM = np.random.default_rng(3)
N = 3000


def tables(task, outputs, targets):
    sums = {name: total.numpy() for name, total in task.sums(outputs, targets).items()}
    ranked = rows_of_samples(task, outputs, targets).get(RANKED)
    figures = with_ranking(task, task.figures(sums, len(next(iter(outputs.values())))), ranked)
    return figures, curves_of(task, figures, ranked).get(CURVES, [])


def binary(decimals: int, fraction: float = 0.05):
    labels_N = (RANDOM.random(N) < fraction).astype(np.int64)
    logits_NK = np.zeros((N, 2), np.float32)
    logits_NK[:, 1] = np.round(RANDOM.normal(size=N) + 2.0 * labels_N - 1, decimals)
    task = Classification(class_names=("fine", "fraud"), positive_class="fraud")
    return task, {"logits": torch.from_numpy(logits_NK)}, {"labels": torch.from_numpy(labels_N)}


def area(points, *, ends=(0.0, 1.0)):
    x, y = np.array(points).T
    assert (x[0], x[-1]) == ends
    assert (np.diff(x) >= 0).all()
    return float(np.diff(x) @ (y[1:] + y[:-1])) / 2


@pytest.mark.parametrize("decimals", [0, 1, 7])
def test_the_areas_under_curves_are_the_metrics_of_scikit_learn_with_ties(decimals):
    task, outputs, targets = binary(decimals)
    figures, (row,) = tables(task, outputs, targets)
    has_N, scores_N = targets["labels"].numpy(), outputs["logits"][:, 1].numpy()
    assert row["roc_auc"] == pytest.approx(roc_auc_score(has_N, scores_N), abs=1e-12)
    assert row["average_precision"] == pytest.approx(average_precision_score(has_N, scores_N), abs=1e-12)
    assert (row["roc_auc"], row["average_precision"]) == pytest.approx(
        (figures["roc_auc"], figures["average_precision"])
    )
    assert area(row["roc"]) == pytest.approx(row["roc_auc"], abs=0.002)
    assert area(row["precision_recall"]) == pytest.approx(row["average_precision"], abs=0.004)
    assert row["fraction"] == has_N.mean()
    assert max(len(row["roc"]), len(row["precision_recall"])) <= 100


def test_infinite_scores_are_ties():
    labels_N = torch.tensor([1, 0, 1, 0, 1, 0])
    logits_NK = torch.zeros(6, 2)
    logits_NK[:, 1] = torch.tensor([torch.inf, torch.inf, 1, -torch.inf, -torch.inf, 0])
    task = MultiLabel(label_names=("fraud", "late"))
    outputs, targets = {"logits": logits_NK}, {"labels": torch.stack([labels_N, labels_N], 1).float()}
    figures, (_, row) = tables(task, outputs, targets)
    assert figures["average_precision"] == pytest.approx((0.5 + row["average_precision"]) / 2)
    assert row["average_precision"] == pytest.approx(5 / 9)


def test_the_kept_points_are_on_scikit_learns_curve():
    task, outputs, targets = binary(2)
    _, (row,) = tables(task, outputs, targets)
    rates, recalls, _ = roc_curve(targets["labels"], outputs["logits"][:, 1], drop_intermediate=False)
    for x, y in row["roc"]:
        assert np.hypot(rates - x, recalls - y).min() < 1e-5


def test_the_operating_point_is_that_of_the_predictions():
    task, outputs, targets = binary(1)
    _, (row,) = tables(task, outputs, targets)
    has_N, predicted_N = targets["labels"].numpy(), outputs["logits"].argmax(1).numpy()
    assert row["operating_point"] == pytest.approx(
        {
            "recall": recall_score(has_N, predicted_N),
            "precision": precision_score(has_N, predicted_N),
            "false_positive_rate": predicted_N[has_N == 0].mean(),
        }
    )
    rates = row["operating_point"]["false_positive_rate"], row["operating_point"]["recall"]
    assert np.hypot(*(np.array(row["roc"]) - rates).T).min() < 0.05


def test_labels_that_none_or_all_samples_have_are_left_out():
    labels_NK = (RANDOM.random((N, 4)) < (0.3, 0.0, 1.0, 0.01)).astype(np.float32)
    logits_NK = (RANDOM.normal(size=(N, 4)) + labels_NK).astype(np.float32)
    task = MultiLabel(label_names=("a", "none", "all", "rare"))
    _, rows = tables(task, {"logits": torch.from_numpy(logits_NK)}, {"labels": torch.from_numpy(labels_NK)})
    assert [row["name"] for row in rows] == ["a", "rare"]
    for row, k in zip(rows, (0, 3), strict=True):
        assert row["roc_auc"] == pytest.approx(roc_auc_score(labels_NK[:, k], logits_NK[:, k]))
        predicted_N = logits_NK[:, k] > 0
        assert row["operating_point"]["false_positive_rate"] == predicted_N[labels_NK[:, k] == 0].mean()


def test_a_class_that_is_never_predicted_has_no_precision():
    task, outputs, targets = binary(7)
    outputs["logits"][:, 0] = 99
    _, (row,) = tables(task, outputs, targets)
    assert row["operating_point"] == {"recall": 0, "precision": None, "false_positive_rate": 0}


def test_no_curve_without_a_ranking_or_without_samples_of_both_kinds():
    task, outputs, targets = binary(7)
    assert tables(Classification(class_names=("fine", "fraud")), outputs, targets)[1] == []
    assert tables(task, outputs, {"labels": torch.zeros(N, dtype=torch.int64)})[1] == []
    one = {name: of[:1] for name, of in outputs.items()}, {name: of[:1] for name, of in targets.items()}
    assert tables(task, *one)[1] == []


def test_curves_of_100_labels_are_small_enough_to_be_stored():
    labels_NK = (RANDOM.random((500, 100)) < 0.2).astype(np.float32)
    logits_NK = (RANDOM.normal(size=(500, 100)) + labels_NK).astype(np.float32)
    task = MultiLabel(label_names=tuple(f"label {number}" for number in range(100)))
    _, rows = tables(task, {"logits": torch.from_numpy(logits_NK)}, {"labels": torch.from_numpy(labels_NK)})
    kept = tables_of({CURVES: rows})
    assert len(kept[CURVES]) == 100 and len(json.dumps(kept)) < 150_000


def test_thinning_keeps_corners_and_leaves_out_what_lies_on_a_line():
    line = np.stack([np.linspace(0, 1, 50)] * 2, axis=1)
    assert thinned(line, 9).tolist() == [[0, 0], [1, 1]]
    corner = np.concatenate([np.stack([np.zeros(30), np.linspace(0, 1, 30)], axis=1), line[-10:] * [1, 0] + [0, 1]])
    assert thinned(corner, 9).tolist() == [[0, 0], [0, 1], [1, 1]]
    noisy = np.stack([np.linspace(0, 1, 500), RANDOM.random(500)], axis=1)
    assert len(thinned(noisy, 40)) == 40
