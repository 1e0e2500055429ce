"""To which integer ties are rounded, whatever kernel torch has."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import fx, nn

from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.ties import mul, mul_relu, round_ties

F = nn.functional
SCALE, SIDE = 0.037, 4

Means = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


class Windows(nn.Module):
    """All means over windows of an image, in several spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.adaptive = nn.AvgPool2d(SIDE), nn.AdaptiveAvgPool2d((2, 2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.pool(x), self.adaptive(x), F.avg_pool2d(x, SIDE), F.adaptive_avg_pool2d(x, (2, 2))


class Others(nn.Module):
    """All other means of the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.adaptive = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        windows = x.unflatten(2, (2, SIDE)).unflatten(4, (2, SIDE))
        tiles = [x[:, :, row : row + SIDE, column : column + SIDE] for row in (0, SIDE) for column in (0, SIDE)]
        single = [self.adaptive(tiles[0]), F.adaptive_avg_pool2d(tiles[1], 1), F.avg_pool2d(tiles[2], SIDE)]
        means = torch.cat([*single, tiles[3].mean((2, 3), keepdim=True)], 2).unflatten(2, (2, 2)).flatten(3)
        return means, windows.mean((3, 5)), torch.mean(windows, dim=(3, 5))


def quantized(channels: int, zero_point: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return integers, and the means of their squares as exact numbers."""
    integers = np.random.default_rng(channels).integers(0, 256, (2, channels, 2 * SIDE, 2 * SIDE), dtype=np.uint8)
    means = integers.astype(np.float64).reshape(2, channels, 2, SIDE, 2, SIDE).mean((3, 5))
    assert np.any(means % 1 == 0.5)
    return torch._make_per_tensor_quantized_tensor(torch.from_numpy(integers), SCALE, zero_point), means


@pytest.mark.parametrize("engine", ["fbgemm", "x86", "onednn"])
@pytest.mark.parametrize("zero_point", [0, 7, 8, 101])
@pytest.mark.parametrize("means_of", [Windows, Others])
def test_means_are_rounded_alike_by_all_kernels(engine, zero_point, means_of) -> None:
    network = fx.symbolic_trace(means_of())
    round_ties(network, engine)
    with quantized_engine(engine), deprecations_silenced():
        formats = torch.contiguous_format, torch.channels_last
        for channels, memory_format in itertools.product((1, 3, 31, 32, 40), formats):
            x, means = quantized(channels, zero_point)
            expected = np.rint(means - zero_point) + zero_point
            for found in network(x.contiguous(memory_format=memory_format)):
                assert (found.q_scale(), found.q_zero_point()) == (SCALE, zero_point)
                np.testing.assert_array_equal(found.int_repr().numpy(), expected)


def test_float_tensors_are_averaged_as_before() -> None:
    x = torch.randn(2, 3, 2 * SIDE, 2 * SIDE, generator=torch.Generator().manual_seed(0))
    for means_of in (Windows, Others):
        network = fx.symbolic_trace(means_of())
        expected = network(x)
        round_ties(network, "fbgemm")
        assert all(torch.equal(one, other) for one, other in zip(network(x), expected, strict=True))


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.AvgPool1d(4), (2, 3, 8)),
        (nn.AdaptiveAvgPool1d(2), (2, 3, 8)),
        (nn.AvgPool3d(2), (2, 3, 4, 4, 4)),
        (nn.AdaptiveAvgPool3d(2), (2, 3, 4, 4, 4)),
        (nn.AvgPool2d(3, 2, ceil_mode=True), (2, 3, 6, 6)),
        (nn.AvgPool2d(3, padding=1, count_include_pad=False), (2, 3, 6, 6)),
    ],
    ids=str,
)
def test_other_forms(pool, shape) -> None:
    network = fx.symbolic_trace(nn.Sequential(pool))
    round_ties(network, "fbgemm")
    integers = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x = torch._make_per_tensor_quantized_tensor(integers, SCALE, 7)
    with quantized_engine("fbgemm"), deprecations_silenced():
        found = network(x).int_repr()
    assert torch.equal(found.double(), pool(integers.double() - 7).round() + 7)


@pytest.mark.parametrize("engine", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("zero_point", [0, 7, 8])
@pytest.mark.parametrize("gate_shape", [(2, 40, 1, 1), (2, 40, 8, 8)])
def test_products_become_the_even_integer(engine, zero_point, gate_shape) -> None:
    """Products with a gate of 1 / 256, whose output has the scale of the input."""
    x, _ = quantized(40, 7)
    gate = torch.randint(256, gate_shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch._make_per_tensor_quantized_tensor(gate, 1 / 256, 0)
    exact = (x.int_repr().double() - 7) * gate.double() / 256
    assert (exact % 1 == 0.5).any()
    with quantized_engine(engine), deprecations_silenced():
        for operator, least in ((mul, 0), (mul_relu, zero_point)):
            found = operator(x.contiguous(memory_format=torch.channels_last), y, SCALE, zero_point)
            expected = (exact + zero_point).round().clamp(least, 255)
            assert (found.q_scale(), found.q_zero_point()) == (SCALE, zero_point)
            assert torch.equal(found.int_repr().double(), expected)
