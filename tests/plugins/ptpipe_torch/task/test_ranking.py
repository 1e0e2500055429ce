"""Area under the ROC curve and average precision, against scikit-learn's. Shape legend: N samples, L labels."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from ptpipe_torch import Classification, MultiLabel
from ptpipe_torch.task.ranking import Ranking, rows_of_samples, with_ranking

RANDOM = np.random.default_rng(11)
N = 400
HAS_N = RANDOM.random(N) < 0.1
SCORES_N = (RANDOM.normal(size=N) + 1.5 * HAS_N).astype(np.float32)
CASES = {
    "all different": SCORES_N,
    "few values": np.round(SCORES_N),
    "two values": np.sign(SCORES_N),
    "constant": np.zeros(N, np.float32),
    "perfect": HAS_N.astype(np.float32),
    "inverted": SCORES_N * 0 - HAS_N,
    "infinite": np.where(SCORES_N > 2, np.inf, SCORES_N),
}


def rows(scores: npt.NDArray[np.floating], has: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    stacked = np.stack([scores, has], axis=-1).astype(np.float32)
    return stacked[:, None] if stacked.ndim == 2 else stacked


def values(rows_NL2: npt.NDArray[np.float32]) -> tuple[float, float]:
    found = Ranking(rows_NL2).values(np.ones((len(rows_NL2), 1)))
    return float(found["roc_auc"][0]), float(found["average_precision"][0])


def expected(scores_N: npt.NDArray[np.floating], has_N: npt.NDArray[np.bool_]) -> tuple[float, float]:
    finite_N = np.nan_to_num(scores_N.astype(float), posinf=99.0)  # scikit-learn refuses infinity
    return float(roc_auc_score(has_N, finite_N)), float(average_precision_score(has_N, finite_N))


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_scikit_learn_with_ties(name: str) -> None:
    scores_N = CASES[name]
    assert values(rows(scores_N, HAS_N)) == pytest.approx(expected(scores_N, HAS_N), abs=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_the_samples_changes_no_bit(name: str) -> None:
    order_N = RANDOM.permutation(N)
    assert values(rows(CASES[name], HAS_N)[order_N]) == values(rows(CASES[name], HAS_N))


@pytest.mark.parametrize("name", CASES)
def test_a_draw_has_the_metrics_of_its_samples(name: str) -> None:
    rows_NL2 = rows(CASES[name], HAS_N)
    draws_RN = RANDOM.integers(0, N, (70, N))
    draws_RN[3] = np.flatnonzero(~HAS_N)[0]  # nothing to find
    draws_RN[4] = np.flatnonzero(HAS_N)[0]  # and nothing else
    counts_RN = np.stack([np.bincount(draw_N, minlength=N) for draw_N in draws_RN]).astype(float)
    found = Ranking(rows_NL2).values(counts_RN.T)
    of_float32 = Ranking(rows_NL2).values(counts_RN.T.astype(np.float32))
    assert all((of_float32[metric] == found[metric]).all() for metric in found)
    for row, draw_N in enumerate(draws_RN):
        own = found["roc_auc"][row], found["average_precision"][row]
        assert own == pytest.approx(values(rows_NL2[draw_N]), abs=1e-14), row
    assert (found["roc_auc"][3], found["average_precision"][3]) == (0, 0)
    assert (found["roc_auc"][4], found["average_precision"][4]) == (0, 1)


def test_a_score_of_nan_gives_nan() -> None:
    scores_N = SCORES_N.copy()
    scores_N[7] = np.nan
    assert all(map(math.isnan, values(rows(scores_N, HAS_N))))


@pytest.mark.parametrize("name", CASES)
def test_the_area_is_1_minus_the_mean_placement(name: str) -> None:
    ranking = Ranking(rows(CASES[name], HAS_N))
    placements_N, (num_found, num_others) = ranking.placements()[:, 0], ranking.supports[0]
    assert (num_found, num_others) == (HAS_N.sum(), (~HAS_N).sum())
    area = expected(CASES[name], HAS_N)[0]
    assert 1 - placements_N[HAS_N].mean() / (2 * num_others) == pytest.approx(area)
    assert 1 - placements_N[~HAS_N].mean() / (2 * num_found) == pytest.approx(area)


def test_several_labels_have_the_mean_of_those_with_a_value() -> None:
    has_NL = RANDOM.random((N, 4)) < (0.3, 0.05, 0.0, 1.0)
    scores_NL = RANDOM.normal(size=(N, 4)) + has_NL
    has_NL[:, 2:] = (False, True)
    known = roc_auc_score(has_NL[:, :2], scores_NL[:, :2].astype(np.float32), average="macro")
    precision = average_precision_score(has_NL[:, [0, 1, 3]], scores_NL[:, [0, 1, 3]].astype(np.float32))
    assert values(rows(scores_NL, has_NL)) == pytest.approx((known, precision))
    assert values(rows(scores_NL[:, 2:3], has_NL[:, 2:3])) == (0, 0)


def logits_of(num_classes: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_classes)
    labels_N = torch.randint(0, num_classes, (300,), generator=generator)
    logits_NK = scale * torch.randn(300, num_classes, generator=generator)
    logits_NK[torch.arange(300), labels_N] += scale
    return logits_NK, labels_N


@pytest.mark.parametrize("num_classes", [2, 3, 7])
@pytest.mark.parametrize("number", [0, 1])
def test_a_class_is_ranked_by_its_probability(num_classes: int, number: int) -> None:
    logits_NK, labels_N = logits_of(num_classes)
    names = tuple("abcdefg"[:num_classes])
    task = Classification(class_names=names, positive_class=names[number])
    found_NL2 = rows_of_samples(task, {"logits": logits_NK}, {"labels": labels_N})["ranked"]
    probabilities_N = logits_NK.double().softmax(1)[:, number].numpy()
    assert values(found_NL2) == pytest.approx(expected(probabilities_N, labels_N.numpy() == number), abs=1e-12)
    batches = [
        rows_of_samples(task, {"logits": logits_NK[part]}, {"labels": labels_N[part]})["ranked"]
        for part in torch.arange(300).split(7)
    ]
    assert (np.concatenate(batches) == found_NL2).all(), "whatever the batches"


def test_sure_networks_are_ranked_where_probabilities_in_float32_are_1() -> None:
    logits_NK, labels_N = logits_of(2, scale=40.0)
    task = Classification(class_names=("a", "b"), positive_class="b")
    found = values(rows_of_samples(task, {"logits": logits_NK}, {"labels": labels_N})["ranked"])
    exact_N = (logits_NK[:, 1].double() - logits_NK[:, 0].double()).numpy()
    assert found == pytest.approx(expected(exact_N, labels_N.numpy() == 1), abs=1e-12)
    rounded_N = logits_NK.softmax(1)[:, 1].numpy()
    assert len(np.unique(rounded_N)) < 250 and found[0] != pytest.approx(expected(rounded_N, labels_N == 1)[0])


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        ("f1", ["f1", "roc_auc", "average_precision", "accuracy", "loss"]),
        ("roc_auc", ["roc_auc", "f1", "average_precision", "accuracy", "loss"]),
        ("average_precision", ["average_precision", "f1", "roc_auc", "accuracy", "loss"]),
    ],
)
def test_a_positive_class_has_them_and_one_is_primary(metric: str, names: list[str]) -> None:
    task = Classification(class_names=("a", "b"), positive_class="b", positive_metric=metric)
    assert [metric.name for metric in task.metrics] == names
    logits_NK, labels_N = logits_of(2)
    outputs, targets = {"logits": logits_NK}, {"labels": labels_N}
    figures = task.figures({name: of.numpy() for name, of in task.sums(outputs, targets).items()}, 300)
    found = with_ranking(task, figures, rows_of_samples(task, outputs, targets)["ranked"])
    of_ranking = found["roc_auc"], found["average_precision"]
    assert of_ranking == pytest.approx(expected(logits_NK.double().softmax(1)[:, 1].numpy(), labels_N.numpy() == 1))
    assert found | figures == found


def test_without_a_positive_class_there_are_none() -> None:
    logits_NK, labels_N = logits_of(2)
    task = Classification(class_names=("a", "b"))
    assert task.label_scores({"logits": logits_NK}, {"labels": labels_N}) is None
    assert [metric.name for metric in task.metrics] == ["accuracy", "loss"]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (2, "val has no sample of 'b': F1, roc_auc and average_precision are undefined there and count as 0"),
        (1, "val has samples of 'b' alone: roc_auc is undefined there and counts as 0"),
    ],
)
def test_a_split_of_one_kind_is_named(labels: int, sentence: str) -> None:
    task = Classification(class_names=("a", "b", "c"), positive_class="b")
    outputs, targets = {"logits": torch.randn(9, 3)}, {"labels": torch.full((9,), labels)}
    figures = task.figures({name: of.numpy() for name, of in task.sums(outputs, targets).items()}, 9)
    assert task.undefined(figures, "val") == [sentence]
    found = with_ranking(task, figures, rows_of_samples(task, outputs, targets)["ranked"])
    assert (found["roc_auc"], found["average_precision"]) == (0, 1 if labels == 1 else 0)


def test_more_than_a_hundred_labels_are_not_ranked() -> None:
    for num, has in ((100, True), (101, False)):
        task = MultiLabel(label_names=tuple(map(str, range(num))))
        ranked = task.label_scores({"logits": torch.zeros(2, num)}, {"labels": torch.zeros(2, num)})
        assert (ranked is not None) == has == ("roc_auc" in [metric.name for metric in task.metrics])


def test_a_label_that_every_sample_has_is_named() -> None:
    task = MultiLabel(label_names=("a", "b", "c"))
    labels = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    outputs, targets = {"logits": torch.randn(2, 3)}, {"labels": labels}
    figures = task.figures({name: of.numpy() for name, of in task.sums(outputs, targets).items()}, 2)
    assert task.undefined(figures, "val") == [
        "val has no sample of 'c': F1 is undefined there and counts as 0; roc_auc and average_precision leave it out",
        "val has no sample without 'a': roc_auc leaves it out",
    ]


def ovr(task: Classification, logits_NK: torch.Tensor, labels_N: torch.Tensor) -> tuple[float, float]:
    outputs, targets = {"logits": logits_NK}, {"labels": labels_N}
    figures = task.figures({name: of.numpy() for name, of in task.sums(outputs, targets).items()}, len(labels_N))
    found = with_ranking(task, figures, rows_of_samples(task, outputs, targets)["ranked"])
    return found["roc_auc_ovr"], found["average_precision"]


@pytest.mark.parametrize("decimals", [0, 6])
@pytest.mark.parametrize("num_classes", [3, 7])
def test_the_means_over_all_classes_are_those_of_scikit_learn(num_classes: int, decimals: int) -> None:
    logits_NK, labels_N = logits_of(num_classes, scale=1.5)
    logits_NK = logits_NK.round(decimals=decimals)
    task = Classification(class_names=tuple("abcdefg"[:num_classes]), ovr_metric="average_precision")
    assert [metric.name for metric in task.metrics][:3] == ["average_precision", "roc_auc_ovr", "accuracy"]
    # Probabilities as scikit-learn gets them: rounded, so that those of equal odds are equal.
    probabilities_NK = logits_NK.double().softmax(1).round(decimals=12).numpy()
    assert ovr(task, logits_NK, labels_N) == pytest.approx(
        (
            roc_auc_score(labels_N, probabilities_NK, multi_class="ovr", average="macro"),
            average_precision_score(labels_N, probabilities_NK, average="macro"),
        ),
        abs=1e-9,
    )


def test_classes_that_a_split_does_not_have_are_left_out_and_named() -> None:
    logits_NK, labels_N = logits_of(5)
    labels_N[labels_N == 3] = 1
    task = Classification(class_names=tuple("abcde"), ovr_metric="roc_auc_ovr")
    scores_NK = logits_NK.double().softmax(1).numpy()
    there = [0, 1, 2, 4]
    areas = [roc_auc_score(labels_N == k, scores_NK[:, k]) for k in there]
    precisions = [average_precision_score(labels_N == k, scores_NK[:, k]) for k in there]
    assert ovr(task, logits_NK, labels_N) == pytest.approx((np.mean(areas), np.mean(precisions)))
    figures = {"per_class": [{"name": name, "support": 0 if name == "d" else 5} for name in "abcde"]}
    assert task.undefined(figures, "val") == [
        "val has no sample of 'd': roc_auc_ovr and average_precision leave it out"
    ]
    assert ovr(task, logits_NK[:4], torch.zeros(4, dtype=torch.int64)) == (0, 1), "no other class"
    one = [{"name": name, "support": 5 if name == "d" else 0} for name in "abcde"]
    assert task.undefined({"per_class": one}, "val")[1:] == [
        "val has samples of 'd' alone: roc_auc_ovr is undefined there and counts as 0"
    ]


def test_odds_of_sure_networks_are_exact_and_no_batch_changes_them() -> None:
    logits_NK, labels_N = logits_of(4, scale=60.0)
    task = Classification(class_names=tuple("abcd"), ovr_metric="roc_auc_ovr")
    found_NL2 = rows_of_samples(task, {"logits": logits_NK}, {"labels": labels_N})["ranked"]
    exact_NK = logits_NK.double().numpy()
    for number in range(4):
        others_NK = np.delete(exact_NK, number, axis=1)
        assert found_NL2[:, number, 0] == pytest.approx(
            exact_NK[:, number] - np.logaddexp.reduce(others_NK, axis=1), rel=1e-6, abs=1e-6
        )
        assert (found_NL2[:, number, 1] == (labels_N == number).numpy()).all()
    batches = [
        rows_of_samples(task, {"logits": logits_NK[part]}, {"labels": labels_N[part]})["ranked"]
        for part in torch.arange(300).split(7)
    ]
    assert (np.concatenate(batches) == found_NL2).all()


@pytest.mark.parametrize(
    "options",
    [{"class_names": ("a", "b")}, {"class_names": tuple("abc"), "positive_class": "a"},
     {"class_names": tuple(map(str, range(101)))}],
)  # fmt: skip
def test_means_over_classes_are_of_3_to_100_without_a_positive_one(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="roc_auc_ovr is of 3 to 100 classes, without a positive one"):
        Classification(ovr_metric="roc_auc_ovr", **options)
