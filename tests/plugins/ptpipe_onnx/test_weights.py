"""Weights in an exported graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ptpipe_onnx.weights import _scales, store_weights
from ptpipe_torch.int8.layers import QuantizedWeight

CHANNELS = 3


@pytest.fixture
def weight():
    integers = np.random.default_rng(0).integers(-127, 128, (CHANNELS, 2, 3, 3)).astype(np.int8)
    return QuantizedWeight(integers, np.float32([0.01, 0.02, 0.03]), np.zeros(CHANNELS, np.int8))


def test_a_folded_batch_norm_is_found_in_the_scales(weight):
    factors = np.float32([1.5, -0.25, 0]).reshape(-1, 1, 1, 1)  # a channel may be turned round, or switched off
    scales = _scales(weight.dequantized() * factors, weight)
    np.testing.assert_allclose(scales.ravel(), weight.scales * factors.ravel(), rtol=1e-6)


def test_arrays_that_are_views_are_stored_too():
    table = np.arange(3072, dtype=np.float32).reshape(32, 96).T
    value = ir.Value(name="table", shape=ir.Shape(table.shape), const_value=ir.tensor(table, name="table"))
    node = ir.node("Identity", [value])
    graph = ir.Graph([], node.outputs, nodes=[node], initializers=[value], opset_imports={"": 18})
    assert not value.const_value.numpy().flags.c_contiguous
    store_weights(ir.Model(graph, ir_version=10), {})
    np.testing.assert_array_equal(graph.initializers["table"].const_value.numpy(), table)


def test_floats_that_are_no_multiple_of_the_integers_are_refused(weight):
    floats = weight.dequantized()
    floats[1, 0, 1, 1] += 0.02
    assert _scales(floats, weight) is None
    assert _scales(floats[:2], weight) is None


def test_a_channel_of_zeros_is_a_multiple_of_zeros():
    weight = QuantizedWeight(np.zeros((2, 1, 1, 1), np.int8), np.float32([1, 1]), np.zeros(2, np.int8))
    np.testing.assert_array_equal(_scales(np.zeros((2, 1, 1, 1), np.float32), weight).ravel(), [0, 0])
