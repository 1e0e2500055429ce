"""How far outputs are from a teacher's, for each task.

Shape legend: B samples, K classes, L tokens, H height, W width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import StageError
from ptpipe_torch import (
    Classification,
    LanguageModeling,
    MultiLabel,
    Regression,
    Segmentation,
    Task,
    TokenClassification,
)
from ptpipe_torch.task.own_functions import OwnFunctionsTask

B, K, L, H, W = 5, 4, 6, 3, 2
NAMES = ("a", "b", "c", "d")
CLASSES = Classification(class_names=NAMES)


def tensors(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator) * 3, torch.randn(shape, generator=generator) * 3


def losses(task: Task, temperature: float, targets: dict[str, torch.Tensor], *shape: int) -> torch.Tensor:
    own, wanted = tensors(*shape)
    (name,) = (spec.name for spec in task.outputs)
    return task.teacher_losses({name: own}, {name: wanted}, targets, temperature)


def divergences(temperature: float, *shape: int) -> torch.Tensor:
    """Return torch's KL divergence of each pair of rows of classes, which are the last axis."""
    own, wanted = (of.double() / temperature for of in tensors(*shape))
    return nn.KLDivLoss(reduction="none")(F.log_softmax(own, -1), F.softmax(wanted, -1)).sum(-1) * temperature**2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_a_class_for_each_sample(temperature: float) -> None:
    found_B = losses(CLASSES, temperature, {}, B, K)
    torch.testing.assert_close(found_B.double(), divergences(temperature, B, K), rtol=1e-5, atol=1e-6)


def test_at_a_high_temperature_it_is_half_of_the_logits_variance() -> None:
    """As Hinton et al. derive in section 2.1: there the gradient is that of squared differences, over K."""
    own, wanted = (of - of.mean(1, keepdim=True) for of in tensors(B, K))
    expected_B = (own - wanted).double().square().sum(1) / (2 * K)
    found_B = losses(CLASSES, 500.0, {}, B, K).double()
    torch.testing.assert_close(found_B, expected_B, rtol=0.05, atol=0)


def test_a_class_for_each_token_and_pixel_that_counts() -> None:
    tags_BL = torch.randint(0, K, (B, L))
    tags_BL[:, 4:], tags_BL[0] = -1, -1  # padding; a text of padding alone
    expected_BL = divergences(2.0, B, L, K)
    for task, name in (
        (TokenClassification(class_names=NAMES), "tags"),
        (LanguageModeling(vocabulary_size=K), "next_tokens"),
    ):
        found_B = losses(task, 2.0, {name: tags_BL}, B, L, K)
        assert found_B[0] == 0
        torch.testing.assert_close(found_B[1:].double(), expected_BL[1:, :4].mean(1), rtol=1e-5, atol=1e-6)
    task = Segmentation(class_names=NAMES, shape_HW=(H, W))
    masks_BHW = torch.randint(0, K, (B, H, W))
    masks_BHW[:, 0] = task.ignore
    own, wanted = (of.reshape(B, H, W, K).movedim(3, 1) for of in tensors(B, H * W, K))
    found_B = task.teacher_losses({"logits": own}, {"logits": wanted}, {"masks": masks_BHW}, 2.0)
    expected_B = divergences(2.0, B, H * W, K)[:, W:].mean(1)
    torch.testing.assert_close(found_B.double(), expected_B, rtol=1e-5, atol=1e-6)


def test_labels_are_pairs_of_classes() -> None:
    found_B = losses(MultiLabel(label_names=NAMES), 3.0, {}, B, K)
    own, wanted = (torch.stack([of.double(), torch.zeros(B, K)], -1) / 3 for of in tensors(B, K))
    expected_BK = nn.KLDivLoss(reduction="none")(F.log_softmax(own, -1), F.softmax(wanted, -1)).sum(-1) * 9
    torch.testing.assert_close(found_B.double(), expected_BK.mean(1), rtol=1e-5, atol=1e-6)


def test_predictions_are_compared_in_standard_deviations() -> None:
    task = Regression(target_names=("x", "y"), mean=(0.0, 1.0), std=(2.0, 10.0))
    own, wanted = tensors(B, 2)
    expected_B = ((own - wanted) / torch.tensor([2.0, 10.0])).square().mean(1)
    torch.testing.assert_close(losses(task, 7.0, {}, B, 2), expected_B)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_that_are_the_teachers_have_no_loss_and_no_gradient(dtype: torch.dtype) -> None:
    logits = tensors(B, K)[0].to(dtype).requires_grad_()
    for task in (CLASSES, MultiLabel(label_names=NAMES)):
        found_B = task.teacher_losses({"logits": logits}, {"logits": logits.detach()}, {}, 2.0)
        assert found_B.dtype == torch.float32
        assert found_B.abs().max() < 1e-6
        (gradient,) = torch.autograd.grad(found_B.sum(), logits)
        assert gradient.abs().max() < 1e-6


def test_a_task_with_ones_own_functions_has_the_built_in_ones() -> None:
    task = OwnFunctionsTask(base=_stored(CLASSES))
    assert task.can_be_distilled
    assert torch.equal(losses(task, 2.0, {}, B, K), losses(CLASSES, 2.0, {}, B, K))


def _stored(task: Task) -> dict[str, Any]:
    content = task.to_json()
    assert isinstance(content, dict)
    return content


class Counting(Classification):
    """A task of somebody's that has no measure."""

    teacher_losses = Task.teacher_losses


def test_another_task_cannot_be_distilled() -> None:
    task = Counting(class_names=NAMES)
    assert not task.can_be_distilled
    with pytest.raises(StageError, match="the task Counting can't be distilled"):
        task.teacher_losses({}, {}, {}, 1.0)
