"""Numbers of a task on the device of its losses."""

from __future__ import annotations

import torch

from ptpipe_torch import Classification, Segmentation
from ptpipe_torch.task.constants import constant

CPU = torch.device("cpu")


def test_numbers_are_copied_once() -> None:
    weights = constant((1.0, 2.5), CPU)
    assert constant((1.0, 2.5), torch.device("cpu")) is weights
    assert weights.dtype == torch.float32 and weights.tolist() == [1.0, 2.5]
    assert constant((1.0, 2.5), CPU, torch.float64).dtype == torch.float64


def test_numbers_first_needed_in_inference_mode_can_be_trained_with() -> None:
    constant.cache_clear()
    logits = torch.zeros(1, 2, requires_grad=True)
    classes, pixels = ("a", "b"), {"masks": torch.zeros(1, 1, 1, dtype=torch.int64)}
    weighted = Classification(class_names=classes, class_weights=(1.0, 3.0))
    masks = Segmentation(class_names=classes, shape_HW=(1, 1), ignore=9, class_weights=(1.0, 3.0))
    with torch.inference_mode():
        weighted.losses({"logits": torch.zeros(1, 2)}, {"labels": torch.tensor([1])})
    (weighted.losses({"logits": logits}, {"labels": torch.tensor([1])}).sum() * constant((3.0,), CPU)).backward()
    masks.losses({"logits": logits[..., None, None]}, pixels).sum().backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0
