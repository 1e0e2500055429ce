"""A network whose outputs are random can't be compared with its int8 form, and is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_quant import DynamicConfig, PrepareConfig, PrepareQatConfig, dynamic, prepare, prepare_qat
from ptpipe_torch import builder

from .conftest import BACKENDS, NUM_CLASSES, make_model


class Dropping(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.3))


@builder
def dropping() -> nn.Module:
    """Drops in eval mode too."""
    return Dropping(nn.Flatten(), nn.Linear(64, NUM_CLASSES))


@pytest.mark.parametrize(
    ("stage", "config"), [(prepare, PrepareConfig), (prepare_qat, PrepareQatConfig), (dynamic, DynamicConfig)]
)
def test_its_line_is_named(ctx, stage: Any, config: Any) -> None:
    message = r"^this network draws random numbers in eval mode too \(.*:\d+: `return .*functional.dropout\(x, 0.3\)"
    with pytest.raises(StageError, match=message):
        stage(config(backend=BACKENDS[0]), ctx, make_model(dropping))
