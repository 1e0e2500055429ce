"""The form with signed integers computes what the reference network does, from int8 weights.

Shape legend: R rows, I inputs, O outputs.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch.int8 import fx
from ptpipe_torch.int8.decomposed import DEQUANTIZE, QUANTIZE
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.layers import QuantizedWeight
from ptpipe_torch.int8.signed_form import SignedDynamicLinear, use_signed_integers

from ....signatures import pictures


class Branches(nn.Module):
    """An int8 tensor with three readers, one of them float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = (nn.Conv2d(channels, 4, 3, padding=1) for channels in (1, 4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = self.left(x) + self.right(x) + torch.cos(x)
        return self.head(x.mean((2, 3)))


def int8_and_reference(backend: str) -> tuple[nn.Module, torch.fx.GraphModule, dict[str, QuantizedWeight]]:
    torch.manual_seed(0)
    with quantized_engine(backend), deprecations_silenced(), warnings.catch_warnings(action="ignore"):

        def prepared() -> torch.fx.GraphModule:
            torch.manual_seed(1)
            graph, scopes = fx.trace(Branches().eval(), pictures((1, 8, 8)))
            qconfig = torch.ao.quantization.get_default_qconfig(backend)
            per_tensor = torch.ao.quantization.default_qconfig
            mapping = fx.qconfig_mapping(backend, qconfig, per_tensor, is_qat=False)
            network = fx.add_observers(graph, scopes, mapping, is_qat=False)
            network(torch.randn(16, 1, 8, 8))
            return network

        int8 = fx.convert(prepared())
        return int8, *fx.reference_network(prepared(), int8)


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_it_computes_the_same_values_from_int8(backend) -> None:
    _, reference, weights = int8_and_reference(backend)
    x = torch.randn(9, 1, 8, 8)
    expected = reference(x)
    use_signed_integers(reference, weights)
    assert torch.equal(reference(x), expected)
    graph, state = reference.graph, reference.state_dict()
    assert sorted(weights) == ["head.weight", "left.weight", "right.weight", "stem.weight"]
    for name, weight in weights.items():
        assert name not in state and state[f"{name}_integers"].dtype is torch.int8
        assert np.array_equal(state[f"{name}_integers"].numpy(), weight.integers)
        assert (f"{name}_scales" in state) is (backend == "fbgemm")
    quantization = [node for node in graph.nodes if node.target in (QUANTIZE, DEQUANTIZE)]
    assert len(quantization) > 8 and {node.args[3:] for node in quantization} == {(-128, 127, torch.int8)}
    assert all(len(node.users) == 1 for node in quantization if node.target is DEQUANTIZE)


def test_a_weight_with_a_zero_point_is_refused_by_name() -> None:
    _, reference, weights = int8_and_reference("qnnpack")
    odd = weights["left.weight"]
    weights["left.weight"] = replace(odd, zero_points=np.ones_like(odd.zero_points))
    with pytest.raises(StageError, match=r"left\.weight has zero points other than 0"):
        use_signed_integers(reference, weights)


def test_a_dynamic_layer_quantizes_its_input_over_its_range() -> None:
    """The formula in float64: y = (round(x / s) - ...) s W + b; see `layers.expected_product`."""
    generator = np.random.default_rng(0)
    integers_OI = generator.integers(-127, 128, (5, 20)).astype(np.int8)
    scales_O = generator.uniform(0.01, 0.02, 5).astype(np.float32)
    weight = QuantizedWeight(integers_OI, scales_O, np.zeros(5, np.int8))
    x_RI = torch.from_numpy(generator.normal(size=(7, 20)).astype(np.float32))
    bias_O = torch.from_numpy(generator.normal(size=5).astype(np.float32))
    layer = SignedDynamicLinear("fc.weight", weight, bias_O)
    low, high = min(0.0, x_RI.min().item()), max(0.0, x_RI.max().item())
    scale = np.float64(np.float32((high - low) / 255))
    zero_point = np.rint(-128 - low / scale)
    levels_RI = np.clip(np.rint(x_RI.numpy() / scale) + zero_point, -128, 127) - zero_point
    expected_RO = levels_RI * scale @ (integers_OI * scales_O[:, None]).T.astype(np.float64) + bias_O.numpy()
    assert np.allclose(layer(x_RI).numpy(), expected_RO, atol=1e-4)
    assert not np.allclose(
        layer(x_RI).numpy(), (x_RI @ torch.from_numpy(weight.dequantized()).T + bias_O).numpy(), atol=1e-4
    )
    per_tensor = QuantizedWeight(integers_OI, np.float32(0.01).reshape(()), np.zeros((), np.int8))
    one = SignedDynamicLinear("fc.weight", per_tensor, None)
    assert one.weight_scales.shape == (5,)  # XNNPACK takes no other
    assert layer(x_RI).shape == one(x_RI).shape == (7, 5)
    assert any(name == "weight_integers" for name, _ in one.named_buffers())
