"""Operators that this project translates compute what torch does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from packaging.version import Version
from torch import nn

from ptpipe import StageError
from ptpipe_onnx import torch_exporter
from ptpipe_torch import BATCH, Signature, TensorSpec

from ...networks import Applied


class Patches(nn.Module):
    """Patches of images, and how many there are."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.unfold = nn.Unfold(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unfold(x)


F = nn.functional
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


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="torch.export (2.11) makes a constant of the height of F.unfold",
)
def test_of_images_of_any_height(run_onnx: Run) -> None:
    network = Patches({"kernel_size": 3, "padding": 1}).eval()
    content = ir.to_proto(exported(network, "height", "places")).SerializeToString()
    for x in (X_NCHW, X_NCHW[:, :, :5]):
        np.testing.assert_array_equal(run_onnx(content, x.numpy()), network(x).numpy())


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max pooling": lambda x: F.adaptive_max_pool2d(x, (3, 5)),
    "max pooling of multiples": lambda x: F.adaptive_max_pool2d(x, (4, 1)),
    "max pooling to more": lambda x: F.adaptive_max_pool2d(x, (9, 7)),
    "max pooling of sequences": lambda x: F.adaptive_max_pool1d(x.flatten(2), 5),
    "max pooling of volumes": lambda x: F.adaptive_max_pool3d(x[:, None], (1, 3, 2)),
    "average pooling of volumes": lambda x: F.adaptive_avg_pool3d(x[:, None], (2, 3, 2)),
    "average pooling of multiples": lambda x: F.adaptive_avg_pool3d(x[:, None], (1, 2, 7)),
    "kth value": lambda x: torch.kthvalue(x, 3, 2).values,
    "place of the kth value": lambda x: torch.kthvalue(x, 3, 2, keepdim=True).indices.float(),
    "median": lambda x: x.median(2).values,
    "median of an odd number": lambda x: x.median(-1, keepdim=True).values,
    "randomized ReLU": lambda x: F.rrelu(x, 0.1, 0.5),
    "sums of exponentials": lambda x: torch.logcumsumexp(100 * x, 2),
    "sums of exponentials of what is infinite": lambda x: torch.logcumsumexp(x.masked_fill(x < 0, -math.inf), -1),
    "hypotenuse": lambda x: torch.hypot(x, x + 1),
    **{
        f"distances, p = {p}": lambda x, p=p: torch.cdist(x, 2 * x[:, :, :3] + 1, p)
        for p in (0.0, 1.0, 2.0, 2.5, math.inf)
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, run_onnx: Run) -> None:
    network = Applied(FUNCTIONS[name]).eval()
    expected = network(X_NCHW)
    signature = Signature(
        (TensorSpec("x", "float32", (BATCH, 2, 8, 7)),), (TensorSpec("y", "float32", (BATCH, *expected.shape[1:])),)
    )
    content = ir.to_proto(torch_exporter.optimize(torch_exporter.export(network, signature, 18)))
    found = run_onnx(content.SerializeToString(), X_NCHW.numpy())
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-7)


def test_positions_of_largest_values_have_no_form() -> None:
    def positions(x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_max_pool2d(x, (3, 5), return_indices=True)[1].float()

    signature = Signature(
        (TensorSpec("x", "float32", (BATCH, 2, 8, 7)),), (TensorSpec("y", "float32", (BATCH, 2, 3, 5)),)
    )
    with pytest.raises(
        StageError, match=r"the positions that aten\.adaptive_max_pool2d returns have no ONNX form \(.*function\(x\)`\)"
    ):
        torch_exporter.export(Applied(positions).eval(), signature, 18)
