"""Embedding bags of one length are lookups and a reduction in a file; others stay as torch's exporter writes them."""

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


class Bags(nn.Module):
    """One vector for each text, whose ids 0 are padding."""

    def __init__(self, *, weighted: bool = False, flat: bool = False, **options: Any) -> None:
        super().__init__()
        self.bags, self.weighted, self.flat = nn.EmbeddingBag(9, 4, **options), weighted, flat

    def forward(self, ids_BL: torch.Tensor) -> torch.Tensor:
        if self.flat:
            offsets_B = torch.arange(0, ids_BL.numel(), ids_BL.shape[1])
            return self.bags(ids_BL.reshape(-1), offsets_B)
        return self.bags(ids_BL, per_sample_weights=ids_BL / 10) if self.weighted else self.bags(ids_BL)


IDS_BL = np.array([[1, 2, 3, 0, 0], [4, 4, 4, 4, 8], [0, 0, 0, 0, 0]])
SIGNATURE = Signature((TensorSpec("ids", "int64", (BATCH, 5)),), (TensorSpec("y", "float32", (BATCH, 4)),))


def exported(network: nn.Module) -> ir.Model:
    return torch_exporter.optimize(torch_exporter.export(network, SIGNATURE, 18))


@pytest.mark.parametrize("padding", [{}, {"padding_idx": 0}])
@pytest.mark.parametrize(
    "options", [{"mode": "sum"}, {"mode": "mean"}, {"mode": "max"}, {"mode": "sum", "weighted": True}]
)
def test_bags_of_one_length(
    options: dict[str, Any], padding: dict[str, int], run_onnx: Callable[..., np.ndarray]
) -> None:
    network = Bags(**options, **padding).eval()
    model = exported(network)
    assert "bags.weight" in model.graph.initializers
    assert not any(node.op_type in ("Loop", "If") for node in model.graph)
    assert isinstance(network.bags, nn.EmbeddingBag)
    found = run_onnx(ir.to_proto(model).SerializeToString(), IDS_BL)
    np.testing.assert_allclose(found, network(torch.from_numpy(IDS_BL)).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_bags_with_offsets_are_a_loop(run_onnx: Callable[..., np.ndarray]) -> None:
    network = Bags(mode="mean", flat=True).eval()
    model = exported(network)
    assert any(node.op_type == "Loop" for node in model.graph)
    found = run_onnx(ir.to_proto(model).SerializeToString(), IDS_BL)
    np.testing.assert_allclose(found, network(torch.from_numpy(IDS_BL)).detach().numpy(), rtol=1e-5, atol=1e-6)
