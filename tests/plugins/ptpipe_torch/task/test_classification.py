from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import ValidationError
from sklearn import metrics as sk
from torch.nn.functional import cross_entropy

from ptpipe import StageError
from ptpipe_torch import ArrayColumn, ArrayInfo, Classification, Metric, Task
from ptpipe_torch.task.classification import label_ranks, per_class

NAMES = tuple("abcdefgh")


def task_of(num_classes: int, label_smoothing: float = 0.0) -> Classification:
    return Classification(class_names=tuple(map(str, range(num_classes))), label_smoothing=label_smoothing)


def tensors(logits_NK: np.ndarray, labels_N: np.ndarray) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"logits": torch.from_numpy(logits_NK)}, {"labels": torch.from_numpy(labels_N)}


def sums_of(task: Task, logits_NK: np.ndarray, labels_N: np.ndarray, batch_size: int = 10_000) -> dict[str, np.ndarray]:
    """The sums of all batches, added."""
    totals: dict[str, np.ndarray] = {}
    for start in range(0, len(labels_N), batch_size):
        rows = slice(start, start + batch_size)
        for name, value in task.sums(*tensors(logits_NK[rows], labels_N[rows])).items():
            totals[name] = totals.get(name, 0) + value.numpy()
    return totals


def figures_of(logits_NK: np.ndarray, labels_N: np.ndarray, batch_size: int = 10_000) -> dict[str, Any]:
    task = task_of(logits_NK.shape[1])
    return task.figures(sums_of(task, logits_NK, labels_N, batch_size), len(labels_N))


def sample_logits(seed: int, num_samples: int = 500, num_classes: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are right about half the time, and labels of which class 7 is rare."""
    random = np.random.default_rng(seed)
    labels_N = np.minimum(random.integers(0, 20, num_samples) % 8, num_classes - 1)
    logits_NK = random.normal(size=(num_samples, num_classes)).astype(np.float32)
    logits_NK[np.arange(num_samples), labels_N] += 1.2
    return logits_NK, labels_N


@st.composite
def any_logits(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Logits with many ties, as int8 models give them."""
    num_samples, num_classes = draw(st.integers(1, 40)), draw(st.integers(2, 9))
    values = st.integers(-4, 4).map(lambda value: value / 2)
    logits_NK = draw(hnp.arrays(np.float32, (num_samples, num_classes), elements=values))
    labels_N = draw(hnp.arrays(np.int64, num_samples, elements=st.integers(0, num_classes - 1)))
    return logits_NK, labels_N


def test_figures_equal_scikit_learns() -> None:
    logits_NK, labels_N = sample_logits(1)
    task = Classification(class_names=NAMES)
    ours = task.figures(sums_of(task, logits_NK, labels_N), 500)
    predicted_N = logits_NK.argmax(axis=1)
    precision, recall, _, support = sk.precision_recall_fscore_support(labels_N, predicted_N, labels=range(8))
    exp_NK = np.exp(logits_NK.astype(np.float64))

    assert 0.3 < ours["accuracy"] < 0.8
    assert ours["accuracy"] == sk.accuracy_score(labels_N, predicted_N)
    assert ours["top5_accuracy"] == sk.top_k_accuracy_score(labels_N, logits_NK, k=5)
    assert ours["loss"] == pytest.approx(sk.log_loss(labels_N, exp_NK / exp_NK.sum(axis=1, keepdims=True)), rel=1e-9)
    assert ours["confusion"] == sk.confusion_matrix(labels_N, predicted_N).tolist()
    assert ours["class_names"] == list(NAMES)
    assert [row["name"] for row in ours["per_class"]] == list(NAMES)
    assert [row["precision"] for row in ours["per_class"]] == pytest.approx(precision.tolist())
    assert [row["recall"] for row in ours["per_class"]] == pytest.approx(recall.tolist())
    assert [row["support"] for row in ours["per_class"]] == support.tolist()


def test_figures_are_json_also_of_sums_that_workers_added_as_floats() -> None:
    logits_NK, labels_N = sample_logits(4)
    task = task_of(8)
    sums = sums_of(task, logits_NK, labels_N)
    figures = task.figures(sums, 500)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert task.figures({name: value.astype(np.float64) for name, value in sums.items()}, 500) == figures


def test_loss_does_not_overflow() -> None:
    logits_NK = np.array([[3e38, 0], [0, 1e5]], dtype=np.float32)
    assert figures_of(logits_NK, np.array([0, 1]))["loss"] == 0
    assert figures_of(logits_NK[1:], np.array([0]))["loss"] == pytest.approx(1e5)


def test_a_class_that_is_never_predicted_or_absent_has_no_precision_or_recall() -> None:
    rows = per_class(np.array([[1, 0, 1], [1, 0, 0], [0, 0, 0]]), "abc")
    assert rows == [
        {"name": "a", "precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2, "predicted": 2},
        {"name": "b", "precision": None, "recall": 0.0, "f1": 0.0, "support": 1, "predicted": 0},
        {"name": "c", "precision": 0.0, "recall": None, "f1": 0.0, "support": 0, "predicted": 1},
    ]
    logits_NK = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 1]], dtype=np.float32)
    figures = figures_of(logits_NK, np.array([0, 1, 0]))
    assert figures["per_class"] == [row | {"name": str(number)} for number, row in enumerate(rows)]


@pytest.mark.parametrize(("num_classes", "reported"), [(5, False), (6, True)])
def test_top5_is_reported_for_more_than_five_classes(num_classes: int, reported: bool) -> None:
    logits_NK, labels_N = sample_logits(2, num_classes=num_classes)
    assert ("top5_accuracy" in figures_of(logits_NK, labels_N)) is reported
    names = [metric.name for metric in task_of(num_classes).metrics]
    assert names == ["accuracy", *["top5_accuracy"] * reported, "loss"]


@pytest.mark.parametrize("batch_size", [1, 7, 499])
def test_sums_of_parts_add_up_to_the_sums_of_the_whole(batch_size: int) -> None:
    logits_NK, labels_N = sample_logits(3)
    whole, parts = (sums_of(task_of(8), logits_NK, labels_N, size) for size in (500, batch_size))
    assert whole.keys() == parts.keys() == {"confusion", "loss", "top5"}
    assert whole["loss"].dtype == parts["loss"].dtype == np.float64
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    for name in ("confusion", "top5"):
        assert whole[name].dtype == parts[name].dtype == np.int64 and (whole[name] == parts[name]).all()


@given(any_logits(), st.integers(1, 40))
@settings(deadline=None)
def test_figures_of_batches_are_those_of_the_whole(sample: tuple[np.ndarray, np.ndarray], batch_size: int) -> None:
    whole, parts = figures_of(*sample), figures_of(*sample, batch_size)
    assert parts.pop("loss") == pytest.approx(whole.pop("loss"), rel=1e-12, abs=1e-12)
    assert parts == whole


@given(any_logits())
@settings(deadline=None)
def test_confusion_agrees_with_support_and_accuracy(sample: tuple[np.ndarray, np.ndarray]) -> None:
    logits_NK, labels_N = sample
    ours = figures_of(logits_NK, labels_N)
    confusion_KK = np.array(ours["confusion"])
    assert confusion_KK.sum(axis=1).tolist() == np.bincount(labels_N, minlength=logits_NK.shape[1]).tolist()
    assert confusion_KK.sum() == len(labels_N)
    assert ours["accuracy"] == confusion_KK.trace() / len(labels_N)
    assert confusion_KK.trace() == (logits_NK.argmax(axis=1) == labels_N).sum()
    assert ours["accuracy"] <= ours.get("top5_accuracy", 1)


@given(any_logits())
@settings(deadline=None)
def test_ranks_order_ties_as_argmax_does(sample: tuple[np.ndarray, np.ndarray]) -> None:
    logits_NK, labels_N = sample
    order_NK = np.argsort(-logits_NK, axis=1, kind="stable")
    expected_N = np.argmax(order_NK == labels_N[:, None], axis=1)
    ranks_N = label_ranks(torch.from_numpy(logits_NK), torch.from_numpy(labels_N))
    assert ranks_N.dtype == torch.int64 and ranks_N.tolist() == expected_N.tolist()


@given(any_logits())
@settings(deadline=None)
def test_of_each_sample_its_prediction_score_label_and_logits_are_kept(sample: tuple[np.ndarray, np.ndarray]) -> None:
    logits_NK, labels_N = sample
    kept = task_of(logits_NK.shape[1]).samples(*tensors(logits_NK, labels_N))
    assert kept.keys() == {"prediction", "score", "labels", "logits"}
    assert kept["prediction"].dtype == torch.int64 and kept["score"].dtype == torch.float32
    assert kept["prediction"].tolist() == logits_NK.argmax(axis=1).tolist()  # the first of the greatest
    assert kept["score"].tolist() == (logits_NK.argmax(axis=1) == labels_N).tolist()
    assert kept["labels"].tolist() == labels_N.tolist() and kept["logits"].tolist() == logits_NK.tolist()


@given(any_logits(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_samples_changes_nothing(sample: tuple[np.ndarray, np.ndarray], random: Any) -> None:
    logits_NK, labels_N = sample
    order_N = np.arange(len(labels_N))
    random.shuffle(order_N)
    one, other = figures_of(logits_NK, labels_N), figures_of(logits_NK[order_N], labels_N[order_N])
    assert other.pop("loss") == pytest.approx(one.pop("loss"), rel=1e-12, abs=1e-12)
    assert other == one


@given(any_logits(), st.floats(-100, 100, width=16))
@settings(deadline=None)
def test_loss_is_at_least_zero_and_blind_to_a_shift(sample: tuple[np.ndarray, np.ndarray], shift: float) -> None:
    logits_NK, labels_N = sample
    loss = figures_of(logits_NK, labels_N)["loss"]
    assert loss >= 0
    assert figures_of(logits_NK + np.float32(shift), labels_N)["loss"] == pytest.approx(loss, abs=1e-4)


@given(any_logits(), st.sampled_from([0.0, 0.1, 0.9]))
@settings(deadline=None)
def test_losses_are_one_for_each_sample(sample: tuple[np.ndarray, np.ndarray], smoothing: float) -> None:
    logits_NK, labels_N = sample
    num_classes = logits_NK.shape[1]
    losses_N = task_of(num_classes, smoothing).losses(*tensors(logits_NK, labels_N))
    assert losses_N.dtype == torch.float32 and losses_N.shape == (len(labels_N),)
    values_NK = logits_NK.astype(np.float64)
    log_softmax_NK = values_NK - np.log(np.exp(values_NK).sum(axis=1, keepdims=True))
    wanted_NK = (1 - smoothing) * np.eye(num_classes)[labels_N] + smoothing / num_classes
    assert losses_N.tolist() == pytest.approx((-wanted_NK * log_softmax_NK).sum(axis=1).tolist(), abs=1e-5)


def test_losses_of_half_precision_are_computed_in_float32() -> None:
    logits_NK, labels_N = sample_logits(5)
    (outputs, targets), task = tensors(logits_NK, labels_N), task_of(8)
    half = {"logits": outputs["logits"].bfloat16()}
    assert task.losses(half, targets).equal(task.losses({"logits": half["logits"].float()}, targets))


def test_smoothing_changes_what_is_trained_and_no_figure() -> None:
    sample = sample_logits(6)
    plain, smooth = task_of(8), task_of(8).with_label_smoothing(0.1)
    assert smooth == task_of(8, 0.1) and plain.label_smoothing == 0
    assert not smooth.losses(*tensors(*sample)).equal(plain.losses(*tensors(*sample)))
    assert smooth.figures(sums_of(smooth, *sample), 500) == plain.figures(sums_of(plain, *sample), 500)


def test_facts() -> None:
    task = Classification(class_names=("cat", "dog"))
    assert task.num_classes == 2
    assert task.targets == {"labels": ArrayInfo(dtype="int64")}
    assert [str(spec) for spec in task.outputs] == ["logits (batch, 2) float32"]
    assert task.primary_metric == Metric("accuracy", higher_is_better=True, is_fraction=True)
    assert [metric.higher_is_better for metric in task.metrics] == [True, False]


@pytest.mark.parametrize("facts", [{"class_names": ()}, {"class_names": ("a",), "label_smoothing": 1.0}])
def test_facts_that_make_no_sense_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Classification(**facts)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_without_a_class_is_refused(label: int) -> None:
    task = task_of(3)
    task.check_targets("val", {"labels": ArrayColumn(np.array([0, 1, 2]))})
    task.check_targets("val", {"labels": ArrayColumn(np.array([], dtype=np.int64))})
    with pytest.raises(StageError, match=f"^split val has the label {label}; classes are numbered 0 to 2$"):
        task.check_targets("val", {"labels": ArrayColumn(np.array([0, label, 1]))})


@pytest.mark.parametrize(
    ("metric", "value", "baseline", "drop"),
    [
        (Metric("accuracy", higher_is_better=True), 0.9901, 0.9931, 0.003),
        (Metric("accuracy", higher_is_better=True), 0.9931, 0.9901, -0.003),
        (Metric("loss", higher_is_better=False), 0.3, 0.1, 0.2),
        (Metric("loss", higher_is_better=False), 0.1, 0.3, -0.2),
    ],
)
def test_a_drop_is_how_much_worse_without_what_rounding_leaves(
    metric: Metric, value: float, baseline: float, drop: float
) -> None:
    assert metric.drop(value, baseline) == drop


def test_weights_of_classes_and_the_focal_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BK, labels_B = torch.randn(50, 3, generator=generator), torch.randint(0, 3, (50,), generator=generator)
    arguments = {"logits": logits_BK}, {"labels": labels_B}
    plain_B = cross_entropy(logits_BK, labels_B, reduction="none")
    weights_K = torch.tensor([2.0, 0.0, 0.5])
    weighted = Classification(class_names=tuple("abc"), class_weights=(2.0, 0.0, 0.5))
    torch.testing.assert_close(weighted.losses(*arguments), plain_B * weights_K[labels_B])
    torch.testing.assert_close(
        weighted.losses(*arguments), cross_entropy(logits_BK, labels_B, weight=weights_K, reduction="none")
    )
    focal = Classification(class_names=tuple("abc"), focal_gamma=2.0)
    torch.testing.assert_close(focal.losses(*arguments), plain_B * (1 - torch.exp(-plain_B)) ** 2)
    for task in (weighted, focal):
        mean = task.losses(*arguments).mean().item()
        smoothed = task.with_label_smoothing(0.1)
        for own in (task, smoothed):
            figures = own.figures({name: of.numpy() for name, of in own.sums(*arguments).items()}, 50)
            assert figures["loss"] == pytest.approx(mean, rel=1e-6), "val_loss is what train_loss is, unsmoothed"
        assert smoothed.losses(*arguments).mean().item() != pytest.approx(mean, rel=1e-3)


def test_smoothed_labels_are_weighted_by_class_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BK, labels_B = torch.randn(50, 3, generator=generator), torch.randint(0, 3, (50,), generator=generator)
    task = Classification(class_names=tuple("abc"), class_weights=(2.0, 0.0, 0.5), label_smoothing=0.3)
    weights_K = torch.tensor(task.class_weights)
    losses_B = task.losses({"logits": logits_BK}, {"labels": labels_B})
    expected = cross_entropy(logits_BK, labels_B, weight=weights_K, reduction="none", label_smoothing=0.3)
    assert torch.equal(losses_B, expected)
    focal = task.model_copy(update={"focal_gamma": 2.0})
    others_B = 1 - logits_BK.softmax(1).gather(1, labels_B[:, None])[:, 0]
    torch.testing.assert_close(
        focal.losses({"logits": logits_BK}, {"labels": labels_B}), expected * others_B**2, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("gamma", [0.2, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("num_classes", [1, 2, 5])
def test_the_focal_loss_has_a_gradient_wherever_the_network_is_sure(gamma: float, num_classes: int) -> None:
    task = Classification(class_names=tuple(map(str, range(num_classes))), focal_gamma=gamma)
    for scale in (1.0, 5.0, 30.0, 200.0, 1e30):
        logits_BK = scale * torch.randn(40, num_classes, generator=torch.Generator().manual_seed(1))
        labels_B = logits_BK.argmax(1)
        labels_B[::3] = 0
        found_BK = logits_BK.clone().requires_grad_()
        found_B = task.losses({"logits": found_BK}, {"labels": labels_B})
        found_B.sum().backward()
        assert found_B.isfinite().all() and found_BK.grad is not None and found_BK.grad.isfinite().all()
        if scale > 5 or num_classes == 1:
            continue  # 1 - p is 0 in float64 too
        expected_BK = logits_BK.double().requires_grad_()
        plain_B = cross_entropy(expected_BK, labels_B, reduction="none")
        expected_B = plain_B * (1 - torch.exp(-plain_B)) ** gamma
        expected_B.sum().backward()
        torch.testing.assert_close(found_B.double(), expected_B, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found_BK.grad.double(), expected_BK.grad, rtol=1e-5, atol=1e-6)


def test_f1_of_the_positive_class_is_the_primary_metric() -> None:
    rng = np.random.default_rng(5)
    labels_N, predicted_N = rng.integers(0, 2, 200), rng.integers(0, 2, 200)
    logits_NK = np.eye(2, dtype=np.float32)[predicted_N]
    task = Classification(class_names=("ham", "spam"), positive_class="spam")
    sums = task.sums({"logits": torch.from_numpy(logits_NK)}, {"labels": torch.from_numpy(labels_N)})
    figures = task.figures({name: total.numpy() for name, total in sums.items()}, 200)
    assert task.primary_metric.name == "f1"
    assert figures["f1"] == pytest.approx(sk.f1_score(labels_N, predicted_N))
    f1_K = sk.f1_score(labels_N, predicted_N, average=None)
    assert [row["f1"] for row in figures["per_class"]] == pytest.approx(f1_K)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"class_weights": (1.0,)}, "class_weights has a number for each class"),
        ({"class_weights": (1.0, -1.0)}, "greater than or equal to 0"),
        ({"positive_class": "eggs"}, "positive_class: 'eggs' is no class"),
    ],
)
def test_facts_that_do_not_fit_the_classes(facts: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Classification(class_names=("ham", "spam"), **facts)
