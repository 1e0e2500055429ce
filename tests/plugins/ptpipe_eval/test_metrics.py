from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn import metrics as sk

from ptpipe_eval import metrics

NAMES = tuple("abcdefgh")


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


def test_metrics_equal_scikit_learns() -> None:
    logits_NK, labels_N = sample_logits(1)
    ours = metrics.classification_metrics(logits_NK, labels_N, NAMES)
    predicted_N = logits_NK.argmax(axis=1)
    precision, recall, _, support = sk.precision_recall_fscore_support(labels_N, predicted_N, labels=range(8))
    exp_NK = np.exp(logits_NK.astype(np.float64))

    assert ours["num_samples"] == 500
    assert 0.3 < ours["top1"] < 0.8
    assert ours["top1"] == sk.accuracy_score(labels_N, predicted_N)
    assert ours["top5"] == sk.top_k_accuracy_score(labels_N, logits_NK, k=5)
    assert ours["loss"] == pytest.approx(sk.log_loss(labels_N, exp_NK / exp_NK.sum(axis=1, keepdims=True)), rel=1e-9)
    assert ours["confusion"] == sk.confusion_matrix(labels_N, predicted_N).tolist()
    assert [row["name"] for row in ours["per_class"]] == list(NAMES)
    assert [row["precision"] for row in ours["per_class"]] == pytest.approx(precision.tolist())
    assert [row["recall"] for row in ours["per_class"]] == pytest.approx(recall.tolist())
    assert [row["support"] for row in ours["per_class"]] == support.tolist()


def test_loss_does_not_overflow() -> None:
    logits_NK = np.array([[3e38, 0], [0, 1e5]], dtype=np.float32)
    assert metrics.cross_entropy(logits_NK, np.array([0, 1])) == 0
    assert metrics.cross_entropy(logits_NK[1:], np.array([0])) == pytest.approx(1e5)


def test_a_class_that_is_never_predicted_or_absent_has_no_precision_or_recall() -> None:
    logits_NK = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 1]], dtype=np.float32)
    rows = metrics.classification_metrics(logits_NK, np.array([0, 1, 0]), "abc")["per_class"]
    assert rows == [
        {"name": "a", "precision": 0.5, "recall": 0.5, "support": 2},
        {"name": "b", "precision": None, "recall": 0.0, "support": 1},
        {"name": "c", "precision": 0.0, "recall": None, "support": 0},
    ]


@pytest.mark.parametrize(("num_classes", "reported"), [(5, False), (6, True)])
def test_top5_is_reported_for_more_than_five_classes(num_classes: int, reported: bool) -> None:
    logits_NK, labels_N = sample_logits(2, num_classes=num_classes)
    assert ("top5" in metrics.classification_metrics(logits_NK, labels_N, NAMES[:num_classes])) is reported


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_NK, labels_N = sample_logits(3)
    whole = metrics.classification_metrics(logits_NK, labels_N, NAMES)
    monkeypatch.setattr(metrics, "_BLOCK_ROWS", 7)
    parts = metrics.classification_metrics(logits_NK, labels_N, NAMES)
    assert parts.pop("loss") == pytest.approx(whole.pop("loss"), rel=1e-12)
    assert parts == whole


@given(any_logits())
@settings(deadline=None)
def test_confusion_agrees_with_support_and_top1(sample: tuple[np.ndarray, np.ndarray]) -> None:
    logits_NK, labels_N = sample
    num_classes = logits_NK.shape[1]
    ours = metrics.classification_metrics(logits_NK, labels_N, [str(k) for k in range(num_classes)])
    confusion_KK = np.array(ours["confusion"])
    assert confusion_KK.sum(axis=1).tolist() == np.bincount(labels_N, minlength=num_classes).tolist()
    assert confusion_KK.sum() == len(labels_N)
    assert ours["top1"] == confusion_KK.trace() / len(labels_N)
    assert metrics.count_correct(logits_NK, labels_N) == confusion_KK.trace()
    assert ours["top1"] <= ours.get("top5", 1)


@given(any_logits())
@settings(deadline=None)
def test_ranks_order_ties_as_argmax_does(sample: tuple[np.ndarray, np.ndarray]) -> None:
    logits_NK, labels_N = sample
    order_NK = np.argsort(-logits_NK, axis=1, kind="stable")
    expected_N = np.argmax(order_NK == labels_N[:, None], axis=1)
    assert metrics.label_ranks(logits_NK, labels_N).tolist() == expected_N.tolist()


@given(any_logits(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_samples_changes_nothing(sample: tuple[np.ndarray, np.ndarray], random: object) -> None:
    logits_NK, labels_N = sample
    order_N = np.arange(len(labels_N))
    random.shuffle(order_N)
    names = [str(k) for k in range(logits_NK.shape[1])]
    one = metrics.classification_metrics(logits_NK, labels_N, names)
    other = metrics.classification_metrics(logits_NK[order_N], labels_N[order_N], names)
    assert other.pop("loss") == pytest.approx(one.pop("loss"), rel=1e-12, abs=1e-12)
    assert other == one


@given(any_logits(), st.floats(-100, 100, width=16))
@settings(deadline=None)
def test_loss_is_at_least_zero_and_blind_to_a_shift(sample: tuple[np.ndarray, np.ndarray], shift: float) -> None:
    logits_NK, labels_N = sample
    loss = metrics.cross_entropy(logits_NK, labels_N)
    assert loss >= 0
    assert metrics.cross_entropy(logits_NK + np.float32(shift), labels_N) == pytest.approx(loss, abs=1e-4)
