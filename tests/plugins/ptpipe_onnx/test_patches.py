"""`F.unfold` as slices computes what torch does, and takes images of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from ptpipe_onnx import torch_exporter
from ptpipe_torch import BATCH, Signature, TensorSpec


class Patches(nn.Module):
    """Patches of images, and how many there are."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.unfold = nn.Unfold(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unfold(x)


Run = Callable[..., np.ndarray]
X_NCHW = torch.randn(3, 2, 8, 7, generator=torch.Generator().manual_seed(1))


def exported(network: nn.Module, height: int | str, num_places: int | str) -> ir.Model:
    num_values = network(X_NCHW).shape[1]
    given = TensorSpec("x", "float32", (BATCH, 2, height, 7))
    returned = TensorSpec("y", "float32", (BATCH, num_values, num_places))
    return torch_exporter.optimize(torch_exporter.export(network, Signature((given,), (returned,)), 18))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (2, 3), "padding": (0, 2), "stride": (1, 2)},
        {"kernel_size": 4, "stride": 4},
        {"kernel_size": (3, 1), "dilation": (2, 1), "padding": 1, "stride": 2},
        {"kernel_size": 1},
    ],
    ids=str,
)
def test_patches_are_slices(options: dict[str, Any], run_onnx: Run) -> None:
    network = Patches(options).eval()
    expected = network(X_NCHW).numpy()
    model = exported(network, 8, expected.shape[2])
    assert {node.op_type for node in model.graph} <= {"Pad", "Slice", "Unsqueeze", "Concat", "Reshape"}
    found = run_onnx(ir.to_proto(model).SerializeToString(), X_NCHW.numpy())
    np.testing.assert_array_equal(found, expected)


def test_of_images_of_any_height(run_onnx: Run) -> None:
    network = Patches({"kernel_size": 3, "padding": 1}).eval()
    content = ir.to_proto(exported(network, "height", "places")).SerializeToString()
    for x in (X_NCHW, X_NCHW[:, :, :5]):
        np.testing.assert_array_equal(run_onnx(content, x.numpy()), network(x).numpy())
