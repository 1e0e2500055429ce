"""Convolutions of each sample with kernels of its own, as a file computes them.

Shape legend: N samples, C channels, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_onnx import torch_exporter
from ptpipe_torch import BATCH, Signature, TensorSpec

F = nn.functional


class OfSamples(nn.Module):
    """Convolves images with kernels that are made of them."""

    def __init__(self, is_transposed: bool, num_groups: int, **options: Any) -> None:
        super().__init__()
        self.is_transposed, self.num_groups, self.options = is_transposed, num_groups, options
        self.kernels = nn.Parameter(torch.randn(1, 4 if is_transposed else 6, 6 if is_transposed else 4, 3, 2))
        self.kernels_of_groups = self.kernels[:, :, : self.kernels.shape[2] // num_groups]

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        num, num_channels, height, width = x_NCHW.shape
        kernels = self.kernels_of_groups * x_NCHW.mean((1, 2, 3)).view(num, 1, 1, 1, 1).sigmoid()
        x = x_NCHW.reshape(1, num * num_channels, height, width)
        convolve: Any = F.conv_transpose2d if self.is_transposed else F.conv2d
        y = convolve(x, kernels.flatten(0, 1), **self.options, groups=num * self.num_groups)
        return y.view(num, -1, *y.shape[2:]).relu()


class Modulated(nn.Module):
    """StyleGAN's modulated convolution, with a bias for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.style, self.bias = nn.Parameter(torch.randn(1, 6, 4, 3, 3)), nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        num, num_channels, height, width = x_NCHW.shape
        style = x_NCHW.mean((2, 3))
        weight = self.weight * self.style(style).view(num, 1, num_channels, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8).view(num, 6, 1, 1, 1)
        x = x_NCHW.reshape(1, num * num_channels, height, width)
        weight = weight.view(num * 6, num_channels, 3, 3)
        return F.conv2d(x, weight, self.bias(style).view(-1), padding=1, groups=num).view(num, 6, height, width)


class Correlation(nn.Module):
    """A tracker's correlation of each channel with a patch of the other images."""

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        patches = x_NCHW[:, :, 1:4, 2:6]
        num, num_channels = patches.shape[:2]
        kernels = patches.reshape(num * num_channels, 1, *patches.shape[2:])
        y = F.conv2d(x_NCHW.reshape(1, num * num_channels, *x_NCHW.shape[2:]), kernels, groups=num * num_channels)
        return y.view(num, num_channels, *y.shape[2:])


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "modulated": Modulated,
    "correlation": Correlation,
    "strided": lambda: OfSamples(False, 1, stride=2, padding=(2, 0), dilation=(1, 2)),
    "grouped": lambda: OfSamples(False, 2),
    "transposed": lambda: OfSamples(True, 1, stride=2),
    "transposed_padded": lambda: OfSamples(
        True, 1, stride=(2, 3), padding=(1, 0), output_padding=(1, 2), dilation=(2, 1)
    ),
}


def exported(network: nn.Module, x_NCHW: torch.Tensor, *sides: int | str) -> bytes:
    shape = (BATCH, *network(x_NCHW).shape[1:2], *((sides and ("out_h", "out_w")) or network(x_NCHW).shape[2:]))
    inputs = (TensorSpec("x", "float32", (BATCH, x_NCHW.shape[1], *(sides or x_NCHW.shape[2:]))),)
    signature = Signature(inputs, (TensorSpec("y", "float32", shape),))
    return ir.to_proto(torch_exporter.optimize(torch_exporter.export(network, signature, 18))).SerializeToString()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_file_takes_any_number_of_samples(name: str, run_onnx: Callable[..., np.ndarray]) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]().eval()
    content = exported(network, torch.randn(2, 4, 7, 9))
    for num in (1, 2, 5):
        x_NCHW = torch.randn(num, 4, 7, 9)
        with torch.no_grad():
            expected = network(x_NCHW).numpy()
        np.testing.assert_allclose(run_onnx(content, x_NCHW.numpy()), expected, atol=2e-5)


def test_images_of_any_size_are_refused_by_name() -> None:
    message = (
        r"aten\.conv2d with a group for each sample has no ONNX form but for images of one size "
        r"\(.*y = convolve\(.*\)\. Write it with other operators"
    )
    with pytest.raises(StageError, match=message):
        exported(OfSamples(False, 1).eval(), torch.randn(2, 4, 8, 8), "height", "width")


def test_padding_by_name_is_refused() -> None:
    with pytest.raises(
        StageError, match=r"aten\.conv2d with a group for each sample has no ONNX form but with padding in"
    ):
        exported(OfSamples(False, 1, padding="valid").eval(), torch.randn(2, 4, 8, 8))
