"""The conversion to the reference form leaves torch as it was."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn
from torch.ao.nn.quantized import reference
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.convert import convert
from torch.ao.quantization.quantize_fx import prepare_fx

from ptpipe_torch.int8.fx import backend_config
from ptpipe_torch.int8.reference_form import reference_form


class OnDevice(nn.Module):
    """A convolution whose weight is put where the images are, as libraries of filters do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel = torch.stack([torch.full((1, 2, 2), 0.25, device=x.device)] * 3)
        return nn.functional.conv2d(self.conv(x), kernel, groups=3)


@pytest.fixture
def prepared(recwarn: pytest.WarningsRecorder) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    mapping = get_default_qconfig_mapping("x86").set_object_type(nn.functional.conv2d, None)
    return prepare_fx(OnDevice().eval(), mapping, (torch.zeros(1, 3, 8, 8),))


def test_a_weight_that_reads_the_device_of_an_input(prepared: torch.fx.GraphModule) -> None:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = prepared(x)
    with pytest.raises(KeyError):  # torch alone
        convert(copy.deepcopy(prepared), is_reference=True, backend_config=backend_config())
    found = reference_form(prepared, backend_config())(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.abs().max()) / 20)


def test_torch_is_as_it_was(prepared: torch.fx.GraphModule) -> None:
    conversion = sys.modules[convert.__module__]
    before = conversion._run_weight_observers, reference.Conv2d.reset_parameters
    reference_form(prepared, backend_config())
    assert (conversion._run_weight_observers, reference.Conv2d.reset_parameters) == before
