"""Transposed convolutions of 2 x 2 in the form that fbgemm computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ptpipe_torch.int8.engine import transposed_convolution_error
from ptpipe_torch.int8.transposed import computed_form, copy_form, use_computed_forms

from ....processor import needs_fbgemm_fault


@pytest.mark.parametrize(("channels", "groups"), [((8, 4), 1), ((4, 8), 2)])
def test_the_form_computes_the_same(channels: tuple[int, int], groups: int) -> None:
    layer = nn.ConvTranspose2d(*channels, 2, 2, groups=groups)
    form = computed_form(layer, "fbgemm")
    assert form.kernel_size == (3, 3)
    assert layer.kernel_size == (2, 2)
    x = torch.randn(2, channels[0], 5, 4)
    torch.testing.assert_close(form(x), layer(x), rtol=1e-5, atol=1e-6)


@needs_fbgemm_fault
def test_fbgemm_computes_it() -> None:
    layer = nn.ConvTranspose2d(8, 8, 2, 2)
    assert transposed_convolution_error(layer, "fbgemm") > 100
    assert transposed_convolution_error(computed_form(layer, "fbgemm"), "fbgemm") < 1


@pytest.mark.parametrize(
    ("layer", "backend"),
    [
        (nn.ConvTranspose2d(8, 8, 2, 2), "qnnpack"),
        (nn.ConvTranspose2d(8, 8, 2, 2, output_padding=1), "fbgemm"),
        (nn.ConvTranspose2d(8, 8, 2, 1), "fbgemm"),
        (nn.ConvTranspose2d(8, 8, 4, 2, 1), "fbgemm"),
        (nn.ConvTranspose1d(8, 8, 2, 2), "fbgemm"),
        (nn.Conv2d(8, 8, 2, 2), "fbgemm"),
    ],
)
def test_others_are_left_as_they_are(layer: nn.Module, backend: str) -> None:
    assert computed_form(layer, backend) is layer
    use_computed_forms(nn.Sequential(layer), backend)
    assert layer.kernel_size in ((2,), (2, 2), (4, 4))


def test_another_layer_takes_the_form() -> None:
    layer, other = nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 8, 2, 2)
    use_computed_forms(nn.Sequential(layer), "fbgemm")
    copy_form(other, layer)
    other.weight = layer.weight
    other.bias = layer.bias
    x = torch.randn(2, 8, 5, 4)
    assert torch.equal(layer(x), other(x))
    plain = nn.Conv2d(8, 8, 2)
    copy_form(plain, layer)
    assert plain.kernel_size == (2, 2)
