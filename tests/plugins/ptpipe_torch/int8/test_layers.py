"""QAT, int8 and dynamically quantized layers and their weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe_torch.int8 import layers
from ptpipe_torch.int8.engine import quantized_engine, supported_engines
from ptpipe_torch.int8.layers import QuantizedWeight, dynamic_linear_error, int8_weight, swap_dynamic_linears

from ....processor import reduced


def test_qat_layers_with_and_without_relu() -> None:
    relus = {type_.__name__: relu for type_, relu in layers._QAT_LAYERS.items()}
    expected = {
        f"{name}{n}d": "ReLU" in name for name in ("Conv", "ConvReLU", "ConvBn", "ConvBnReLU") for n in (1, 2, 3)
    }
    assert relus.items() >= (expected | {"Linear": False, "LinearReLU": True, "LinearBn1d": False}).items() - {
        ("ConvReLU1d", True)  # not in every release
    }


@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_are_rounded_to_int8(per_channel) -> None:
    weight = torch.randn(6, 3, 3, 3)
    quantized = int8_weight(weight, per_channel=per_channel, axis=1)
    limits = weight.abs().amax((0, 2, 3)) if per_channel else weight.abs().amax().repeat(3)
    step = (limits / 127).reshape(1, 3, 1, 1)
    expected = (weight / step).round()
    assert (quantized.int_repr() - expected).abs().max() <= 1  # torch multiplies by 1 / step: ties may fall otherwise
    assert (quantized.int_repr() == expected).float().mean() > 0.95
    torch.testing.assert_close(quantized.dequantize(), quantized.int_repr() * step)


def test_narrow_weights_of_a_dynamic_layer_have_seven_bits() -> None:
    torch.manual_seed(0)
    for narrow, largest in ((False, 127), (True, 64)):
        net = nn.Sequential(nn.Linear(200, 5))
        swap_dynamic_linears(net, ["0"], per_channel=True, narrow_weights=narrow)
        assert net[0].weight().int_repr().int().abs().max() == largest


@pytest.mark.parametrize("backend", supported_engines())
def test_a_dynamic_layer_differs_from_its_formula_by_rounding_alone(backend) -> None:
    torch.manual_seed(0)
    for per_channel, narrow, inputs, outputs in (
        (True, reduced(backend), 300, 300),
        (False, True, 7, 5),
        (True, True, 64, 1),
    ):
        net = nn.Sequential(nn.Linear(inputs, outputs, bias=per_channel))
        x = torch.randn(2, 20, inputs) + 1
        with quantized_engine(backend):
            swap_dynamic_linears(net, ["0"], per_channel=per_channel, narrow_weights=narrow)
            y = net(x)
            assert dynamic_linear_error(net[0], x, y) <= 1
            one_step_off = y + torch.tensor(torch._choose_qparams_per_tensor(x)[0]) * 0.05
            for wrong in (y * 1.001, one_step_off, y.flip(-1) if outputs > 1 else -y, y * torch.nan):
                assert dynamic_linear_error(net[0], x, wrong) > 1
            assert dynamic_linear_error(net[0], x[:0], y[:0]) == dynamic_linear_error(net[0], x / 0, y) == 0


def test_convolutions_may_share_a_weight() -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ConvTranspose2d(2, 2, 3))
    net[1].weight = net[0].weight
    packed = layers.round_weights(net, ["0", "1"], per_channel=True)
    for name, weight in packed.items():
        torch.testing.assert_close(net.get_parameter(name).detach(), weight.dequantize(), rtol=0, atol=0)


def test_a_weight_and_its_transpose_have_the_same_values() -> None:
    weight = QuantizedWeight(np.int8([[1, -2, 3], [4, 5, -6]]), np.float32([0.5, 2]), np.int8([0, 1]))
    expected = np.float32([[0.5, -1, 1.5], [6, 8, -14]])
    np.testing.assert_array_equal(weight.dequantized(), expected)
    np.testing.assert_array_equal(weight.transposed().dequantized(), expected.T)
