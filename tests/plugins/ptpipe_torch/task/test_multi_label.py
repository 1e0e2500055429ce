"""Multi-label: losses and metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support
from torch.nn.functional import binary_cross_entropy_with_logits

from ptpipe import StageError
from ptpipe_torch import ArrayColumn, MultiLabel, Task

NAMES = ("wet", "cold", "never", "dark")
TASK = MultiLabel(label_names=NAMES)


def batch(num: int, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    labels_BK = (torch.rand(num, 4, generator=generator) > 0.6).float()
    labels_BK[:, 2] = 0
    return {"logits": torch.randn(num, 4, generator=generator) - torch.tensor([0.0, 0, 9, 0])}, {"labels": labels_BK}


def test_figures_are_those_of_scikit_learn_whatever_the_batches() -> None:
    parts = [batch(num, seed) for seed, num in enumerate((30, 1, 17))]
    sums = [TASK.sums(*part) for part in parts]
    figures = TASK.figures({name: sum(part[name].numpy() for part in sums) for name in sums[0]}, 48)
    labels = torch.cat([targets["labels"] for _, targets in parts]).numpy()
    predicted = torch.cat([outputs["logits"] > 0 for outputs, _ in parts]).numpy()
    assert figures["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro", zero_division=0))
    assert figures["exact_match"] == accuracy_score(labels, predicted)
    precision, recall, f1, support = precision_recall_fscore_support(labels, predicted, zero_division=0)
    for k, row in enumerate(figures["per_label"]):
        assert row["name"] == NAMES[k] and row["support"] == support[k]
        assert (row["others"], row["predicted"]) == (48 - support[k], predicted[:, k].sum())
        assert (row["f1"], row["precision"] or 0, row["recall"] or 0) == pytest.approx((f1[k], precision[k], recall[k]))
    expected = torch.cat([TASK.losses(*part) for part in parts]).double().mean().item()
    assert figures["loss"] == pytest.approx(expected)


def test_losses_of_samples() -> None:
    outputs, targets = batch(5, 3)
    mean = binary_cross_entropy_with_logits(outputs["logits"], targets["labels"])
    torch.testing.assert_close(TASK.losses(outputs, targets).mean(), mean)


def test_what_is_kept_of_a_sample() -> None:
    outputs = {"logits": torch.tensor([[1.0, -1.0, -1.0, 2.0]])}
    kept = TASK.samples(outputs, {"labels": torch.tensor([[1.0, 1.0, 0.0, 1.0]])})
    assert kept["prediction"].tolist() == [[1, 0, 0, 1]] and kept["score"].tolist() == [0.75]
    assert Task.from_json(TASK.to_json()) == TASK


def test_other_values_than_0_and_1_are_refused() -> None:
    labels_NK = np.zeros((3, 4), np.float32)
    labels_NK[1, 3] = 2
    with pytest.raises(StageError, match=r"^split val has a dark other than 0 and 1$"):
        TASK.check_targets("val", {"labels": ArrayColumn(labels_NK)})
