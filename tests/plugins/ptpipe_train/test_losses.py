"""Losses and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch import Batch, Classification
from ptpipe_train.device import DeviceSettings
from ptpipe_train.parallel import Objective
from ptpipe_train.parallel.ddp import SingleProcess


class Detached(nn.Linear):
    """Loses the gradient as NumPy does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(super().forward(x).detach().numpy())


@pytest.mark.parametrize("loses", [False, True])
def test_a_loss_without_a_gradient_is_explained(loses: bool) -> None:
    network = (Detached if loses else nn.Linear)(3, 2)
    strategy = SingleProcess(network, DeviceSettings(torch.device("cpu")))
    batch = Batch({"x": torch.randn(4, 3)}, {"labels": torch.tensor([0, 1, 1, 0])}, torch.arange(4))
    objective, scaler = Objective(4, Classification(class_names=("a", "b"))), torch.amp.GradScaler(enabled=False)
    if loses:
        with pytest.raises(
            StageError, match=r"^nothing can be learned: the loss has no gradient of what is trained\. "
        ):
            strategy.forward_backward(batch, objective, scaler, last=True)
    else:
        assert strategy.forward_backward(batch, objective, scaler, last=True) > 0
        assert network.weight.grad is not None
