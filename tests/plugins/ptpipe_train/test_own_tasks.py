"""Tasks of a plugin's own compute in the types that built-in ones do, and say where a division of batches matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from ptpipe_torch import Classification, Data

from .conftest import NUM_CLASSES, Lab, assert_same_bits


class PlainClasses(Classification):
    """As a user writes it: torch's loss of what the network returns."""

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(outputs["logits"], targets["labels"], reduction="none")


class ClassesOfABatch(PlainClasses):
    """Divided by the batch's sum of weights, as torch's mean of a weighted loss is."""

    def losses(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weights_B = torch.tensor([1.0, 2, 3, 4])[targets["labels"]]
        return super().losses(outputs, targets) * weights_B / weights_B.mean()

    def sums(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return Classification(class_names=self.class_names).sums(outputs, targets)


def data_of(lab: Lab, task: type[Classification], num_train: int = 100, num_val: int = 20) -> Data:
    data = lab.make_data(num_train, num_val)
    return Data(replace(data.info, task=task(class_names=tuple("abcd"[:NUM_CLASSES]))), data.splits, data.loader)


def test_its_losses_are_of_float32_in_bf16_too(lab: Lab) -> None:
    own, builtin = (
        lab.train_afresh(lab.make_model(), data_of(lab, task), epochs=2, precision="bf16")
        for task in (PlainClasses, Classification)
    )
    assert_same_bits(own.model, builtin.model)
    assert own.metrics["history"] == builtin.metrics["history"]


@pytest.mark.parametrize("options", [{"accumulate": 3}, {}], ids=["accumulated", "in one pass"])
def test_a_loss_that_depends_on_the_batch_gives_a_notice_where_batches_are_divided(
    lab: Lab, options: dict[str, Any]
) -> None:
    trained = lab.train(lab.make_model(), data_of(lab, ClassesOfABatch), **options)
    notices = [notice for notice in trained.notices if "depends on" in notice]
    expected = [
        "the loss of a sample depends on the other samples of its batch, of which a forward pass has 16, because a "
        "step of 48 is divided into 3: the result is not that of a step in one pass"
    ]
    assert notices == (expected if options else [])
    assert not lab.train_afresh(lab.make_model(), data_of(lab, PlainClasses), **options).notices
