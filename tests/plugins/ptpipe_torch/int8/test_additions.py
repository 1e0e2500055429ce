"""Additions of scales that qnnpack's kernel refuses and takes, and of shapes that broadcast."""

from __future__ import annotations

import pytest
import torch

from ptpipe_torch.int8.additions import add, add_relu, has_addition_kernel
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine

SCALES = [
    (0.05, 0.02, 0.06, True),
    (0.05, 0.05e-6, 0.05, False),
    (0.05e-6, 0.05, 0.05, False),
    (1.0, 1.0, 1 / 300, False),
    (2.0**-14, 1.0, 1.0, True),  # the limits themselves
    (1.0, 2.0**-14.001, 1.0, False),
    (255.9, 1.0, 1.0, True),
    (256.0, 1.0, 1.0, False),
]


@pytest.mark.parametrize("operator", [add, add_relu])
@pytest.mark.parametrize(("first", "second", "scale", "has_kernel"), SCALES)
def test_sums_are_those_of_float32(operator, first, second, scale, has_kernel) -> None:
    random = torch.Generator().manual_seed(0)
    with quantized_engine("qnnpack"), deprecations_silenced():
        x, y = (
            torch.quantize_per_tensor(torch.randn(1, 4, 5, 5, generator=random) * 64 * step, step, 120, torch.quint8)
            for step in (first, second)
        )
        assert has_addition_kernel(x, y, scale) is has_kernel
        found = operator(x, y, scale, 100)
        if not has_kernel:
            with pytest.raises(RuntimeError, match="QNNPACK Add"):
                getattr(torch.ops.quantized, operator.__name__)(x, y, scale, 100)
    expected = x.dequantize() + y.dequantize()
    expected = expected.relu() if operator is add_relu else expected
    assert found.q_scale() == scale and found.q_zero_point() == 100
    limits = (-100 * scale, 155 * scale)
    assert (found.dequantize() - expected.clamp(*limits)).abs().max() <= (0.51 if not has_kernel else 1.01) * scale


SHAPES = [((2, 6, 1), (2, 1, 5)), ((2, 1, 5), (2, 6, 5)), ((5,), (2, 6, 5)), ((2, 6, 5), (5,)), ((2, 6, 5), (2, 6, 5))]


@pytest.mark.parametrize("engine", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("operator", [add, add_relu])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes_that_broadcast_make_no_warning(engine, operator, shapes, capfd) -> None:
    random = torch.Generator().manual_seed(1)
    with quantized_engine(engine), deprecations_silenced():
        x, y = (
            torch.quantize_per_tensor(torch.randn(shape, generator=random), 0.05, 128, torch.quint8) for shape in shapes
        )
        found = operator(x, y, 0.1, 100)
    expected = x.dequantize() + y.dequantize()
    expected = expected.relu() if operator is add_relu else expected
    assert found.shape == expected.shape
    assert (found.dequantize() - expected.clamp(-10, 15.5)).abs().max() <= 0.051
    assert capfd.readouterr().err == ""
