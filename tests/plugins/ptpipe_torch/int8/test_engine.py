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
    transposed_convolution_error,
    unsupported_engine,
)

from ....processor import needs_fbgemm_fault


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


def test_kernels_of_x86_are_not_for_other_processors(monkeypatch) -> None:
    listed = set(torch.backends.quantized.supported_engines)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert set(supported_engines()) == listed - {"none", "fbgemm", "x86"}
    assert "does not support int8 backend fbgemm" in unsupported_engine("fbgemm")


@pytest.mark.parametrize("backend", supported_engines())
def test_the_probe_differs_by_rounding_only(backend) -> None:
    assert 0 < probe_error(backend) <= PROBE_STEP / 2  # the sums are no multiples of 8, so int8 must round them


def depthwise_error(engine: str, weight: int, *, kernel: int, channels: int, dimensions: int) -> float:
    """Return the largest error of a convolution of 255s with equal weights, in steps of its output."""
    convolve = getattr(torch.nn.functional, f"conv{dimensions}d")
    images = torch.full((1, channels, *[8] * dimensions), 255.0)
    weights = torch.full((channels, 1, *[kernel] * dimensions), float(weight))
    expected = convolve(images, weights, padding=kernel // 2, groups=channels)
    scale = expected.max().item() / 255
    geometry = ([1] * dimensions, [kernel // 2] * dimensions, [1] * dimensions, channels)
    with quantized_engine(engine), deprecations_silenced():
        quantized_images = torch.quantize_per_tensor(images, 1.0, 0, torch.quint8)
        quantized_weights = torch.quantize_per_tensor(weights, 1.0, 0, torch.qint8)
        prepack = getattr(torch.ops.quantized, f"conv{dimensions}d_prepack")
        packed = prepack(quantized_weights, torch.zeros(channels), *geometry)
        found = getattr(torch.ops.quantized, f"conv{dimensions}d")(quantized_images, packed, scale, 0).dequantize()
    return float((found - expected).abs().max()) / scale


DEPTHWISE = [
    {"kernel": 3, "channels": 8, "dimensions": 2},
    {"kernel": 3, "channels": 128, "dimensions": 2},
    {"kernel": 5, "channels": 8, "dimensions": 2},
    {"kernel": 7, "channels": 8, "dimensions": 2},
    {"kernel": 3, "channels": 8, "dimensions": 3},
]


@pytest.mark.parametrize("engine", [engine for engine in ("fbgemm", "x86") if engine in supported_engines()])
@pytest.mark.parametrize("layer", DEPTHWISE, ids=str)
def test_depthwise_convolutions_saturate_with_weights_beyond_64(engine, layer) -> None:
    """fbgemm's kernels add pairs of products in 16 bits, also with VNNI (torch 2.13); x86 uses them from 101 groups."""
    if engine == "x86" and layer["channels"] <= 100:
        pytest.skip("runs on oneDNN where the processor has VNNI")
    assert depthwise_error(engine, 127, **layer) > 10
    assert depthwise_error(engine, 64, **layer) < 1


@pytest.mark.parametrize("engine", supported_engines())
@pytest.mark.parametrize("layer", DEPTHWISE, ids=str)
def test_weights_to_64_saturate_on_no_engine(engine, layer) -> None:
    assert depthwise_error(engine, 64, **layer) < 1


@needs_fbgemm_fault
def test_the_probe_finds_transposed_convolutions_that_are_wrong() -> None:
    assert transposed_convolution_error(torch.nn.ConvTranspose2d(8, 8, 2, 2), "fbgemm") > 100  # torch 2.13
    for kernel_size, stride, padding in ((3, 2, 1), (4, 2, 1), (3, 1, 1)):
        layer = torch.nn.ConvTranspose2d(8, 8, kernel_size, stride, padding)
        assert transposed_convolution_error(layer, "fbgemm") < 1


@needs_fbgemm_fault
@pytest.mark.parametrize("channels", [(8, 8), (16, 32), (32, 16)])
def test_the_probe_finds_weights_that_do_not_come_back(channels) -> None:
    layer = torch.nn.ConvTranspose2d(*channels, 2)  # torch 2.13 computes this one right
    assert {transposed_convolution_error(layer, "fbgemm") for _ in range(5)} == {float("inf")}


@pytest.mark.skipif("qnnpack" not in supported_engines(), reason="qnnpack is not in this build")
def test_the_probe_passes_what_is_right_and_refuses_what_does_not_run() -> None:
    assert transposed_convolution_error(torch.nn.ConvTranspose2d(8, 8, 2, 2), "qnnpack") < 1
    if "onednn" in supported_engines():
        layer = torch.nn.ConvTranspose2d(8, 4, 3, 2, 1, output_padding=1)
        assert transposed_convolution_error(layer, "onednn") == float("inf")
