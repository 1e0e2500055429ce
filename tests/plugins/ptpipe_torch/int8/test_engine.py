"""Quantized engines: selecting one, error messages, and the probe of `ptpipe doctor`."""

from __future__ import annotations

import pytest
import torch

from ptpipe import StageError
from ptpipe_torch.int8.engine import (
    PROBE_STEP,
    deprecations_silenced,
    probe_error,
    quantized_engine,
    supported_engines,
    unsupported_engine,
)


def test_an_engine_is_selected_and_restored() -> None:
    before = torch.backends.quantized.engine
    other = next(engine for engine in supported_engines() if engine != before)
    with quantized_engine(other):
        assert torch.backends.quantized.engine == other
    with quantized_engine(None):
        assert torch.backends.quantized.engine == before
    assert torch.backends.quantized.engine == before


def test_an_unsupported_engine_is_an_error() -> None:
    supported = ", ".join(supported_engines())
    message = f"torch does not support int8 backend tpu on this machine (supported: {supported})"
    assert unsupported_engine("tpu") == message
    assert unsupported_engine(supported_engines()[0]) is None
    with pytest.raises(StageError, match="does not support int8 backend tpu"), quantized_engine("tpu"):
        pass


@pytest.mark.parametrize("backend", supported_engines())
def test_the_probe_differs_by_rounding_only(backend) -> None:
    assert 0 < probe_error(backend) <= PROBE_STEP / 2  # the sums are no multiples of 8, so int8 must round them


@pytest.mark.skipif("fbgemm" not in supported_engines(), reason="fbgemm is for x86 processors")
@pytest.mark.parametrize(("max_level", "saturates"), [(127, False), (255, True)])
def test_fbgemm_saturates_in_depthwise_convolutions_of_8_bit_activations(max_level, saturates) -> None:
    """Its 3x3 kernel for padding 1 adds pairs of products in 16 bits, also on processors with VNNI (torch 2.13)."""
    images_NCHW = torch.full((1, 8, 8, 8), float(max_level))
    weights_OIHW = torch.full((8, 1, 3, 3), 127.0)
    expected = torch.nn.functional.conv2d(images_NCHW, weights_OIHW, padding=1, groups=8)
    scale = expected.max().item() / 255
    with quantized_engine("fbgemm"), deprecations_silenced():
        images = torch.quantize_per_tensor(images_NCHW, 1.0, 0, torch.quint8)
        weights = torch.quantize_per_tensor(weights_OIHW, 1.0, 0, torch.qint8)
        packed = torch.ops.quantized.conv2d_prepack(weights, torch.zeros(8), [1, 1], [1, 1], [1, 1], 8)
        found = torch.ops.quantized.conv2d(images, packed, scale, 0).dequantize()
    assert ((found - expected).abs().max().item() > 10 * scale) is saturates
