"""Classification metrics of logits: accuracy, cross-entropy, confusion matrix. numpy only.

Shape legend: N samples, K classes, R rows of a block of samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ptpipe import JSON

_BLOCK_ROWS = 4096
"""Samples per block, so that 50,000 x 1,000 logits need no float64 copy."""


def label_ranks(logits_NK: npt.NDArray[np.float32], labels_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the rank of each sample's label among its logits; (N,) int64, 0 where the prediction is correct.

    Equal logits, common in int8 models, are ranked by class index, as argmax does.
    """
    ranks_N = np.empty(len(labels_N), dtype=np.int64)
    for rows in _blocks(len(labels_N)):
        logits_RK, labels_R1 = logits_NK[rows], labels_N[rows, np.newaxis]
        own_R1 = np.take_along_axis(logits_RK, labels_R1, axis=1)
        tied_before_RK = (logits_RK == own_R1) & (np.arange(logits_RK.shape[1]) < labels_R1)
        ranks_N[rows] = ((logits_RK > own_R1) | tied_before_RK).sum(axis=1)
    return ranks_N


def count_correct(logits_NK: npt.NDArray[np.float32], labels_N: npt.NDArray[np.int64]) -> int:
    """Count the samples whose argmax is their label."""
    return int((logits_NK.argmax(axis=1) == labels_N).sum())


def cross_entropy(logits_NK: npt.NDArray[np.float32], labels_N: npt.NDArray[np.int64]) -> float:
    """Return the mean of -log softmax(logits)[label], in nats, summed in float64; N must not be 0."""
    total = 0.0
    for rows in _blocks(len(labels_N)):
        logits_RK = logits_NK[rows].astype(np.float64)
        shifted_RK = logits_RK - logits_RK.max(axis=1, keepdims=True)  # log-sum-exp: exp of at most 0 cannot overflow
        own_R = np.take_along_axis(shifted_RK, labels_N[rows, np.newaxis], axis=1)[:, 0]
        total += float((np.log(np.exp(shifted_RK).sum(axis=1)) - own_R).sum())
    return total / len(labels_N)


def confusion_matrix(
    predicted_N: npt.NDArray[np.int64], labels_N: npt.NDArray[np.int64], num_classes: int
) -> npt.NDArray[np.int64]:
    """Count samples by label (row) and prediction (column); (K, K) int64."""
    counts = np.bincount(labels_N * num_classes + predicted_N, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes).astype(np.int64, copy=False)


def per_class(confusion_KK: npt.NDArray[np.int64], class_names: Sequence[str]) -> list[JSON]:
    """Return name, precision, recall and support of each class; null where the divisor is 0."""
    predicted_K, support_K = confusion_KK.sum(axis=0), confusion_KK.sum(axis=1)
    return [
        {
            "name": name,
            "precision": int(confusion_KK[k, k]) / int(predicted_K[k]) if predicted_K[k] else None,
            "recall": int(confusion_KK[k, k]) / int(support_K[k]) if support_K[k] else None,
            "support": int(support_K[k]),
        }
        for k, name in enumerate(class_names)
    ]


def classification_metrics(
    logits_NK: npt.NDArray[np.float32], labels_N: npt.NDArray[np.int64], class_names: Sequence[str]
) -> dict[str, JSON]:
    """Return all metrics of a split: num_samples, top1, top5, loss, class_names, per_class, confusion.

    `top5` is omitted for five classes or fewer, where it is always 1.
    """
    confusion_KK = confusion_matrix(logits_NK.argmax(axis=1), labels_N, len(class_names))
    metrics: dict[str, JSON] = {"num_samples": len(labels_N), "top1": int(confusion_KK.trace()) / len(labels_N)}
    if len(class_names) > 5:
        metrics["top5"] = int((label_ranks(logits_NK, labels_N) < 5).sum()) / len(labels_N)
    return metrics | {
        "loss": cross_entropy(logits_NK, labels_N),
        "class_names": list(class_names),
        "per_class": per_class(confusion_KK, class_names),
        "confusion": confusion_KK.tolist(),
    }


def _blocks(num_rows: int) -> list[slice]:
    return [slice(start, start + _BLOCK_ROWS) for start in range(0, num_rows, _BLOCK_ROWS)]
