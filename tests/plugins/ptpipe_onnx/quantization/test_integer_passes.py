"""Passes behind the quantizer, on hand-made graphs in the form that it writes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from ptpipe_onnx.kernels import Kernels
from ptpipe_onnx.quantization.integer_passes import write_with_quicker_kernels

from ..test_qdq_passes import Draft

Run = Callable[..., np.ndarray]
RNG = np.random.default_rng(6)


def written(draft: Draft, output: str, shape: tuple[int | str, ...], tmp_path) -> tuple[onnx.ModelProto, Kernels]:
    model = draft.finished(output, shape)
    onnx.save_model(model, tmp_path / "quantized.onnx")
    write_with_quicker_kernels(tmp_path / "quantized.onnx", tmp_path / "quicker.onnx")
    onnx.checker.check_model(tmp_path / "quicker.onnx", full_check=True)
    return model, Kernels.of(tmp_path / "quicker.onnx", tmp_path)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_product_is_rounded_behind_its_bias(is_first: bool, run_onnx: Run, tmp_path) -> None:
    draft = Draft()
    weight = draft.weight(RNG.integers(-127, 128, (6, 5)), RNG.uniform(0.002, 0.02, 5), axis=1)
    product = draft.quantize(draft.node("MatMul", [draft.quantize("images", 0.05, 120), weight]), 0.5, 128)
    bias = draft.array(RNG.normal(size=5), np.float32)
    total = draft.node("Add", [bias, product] if is_first else [product, bias])
    model, kernels = written(draft, draft.quantize(total, 0.5, 128), ("N", 7, 6), tmp_path)
    assert kernels.integer == {"QLinearConv": 1} and not kernels.float
    x = (RNG.normal(size=(3, 7, 6)) * 3).astype(np.float32)
    before, after = (run_onnx(of, x) for of in (model.SerializeToString(), tmp_path / "quicker.onnx"))
    steps = np.abs(after - before) / 0.5
    assert 0 < steps.max() < 1.001, "a second rounding is gone"


def test_a_product_with_another_reader_keeps_its_rounding(run_onnx: Run, tmp_path) -> None:
    draft = Draft()
    weight = draft.weight(RNG.integers(-127, 128, (6, 5)), 0.01)
    product = draft.quantize(draft.node("MatMul", [draft.quantize("images", 0.05, 120), weight]), 0.1, 100)
    total = draft.quantize(draft.node("Add", [product, draft.array(np.ones(5), np.float32)]), 0.1, 110)
    both = draft.quantize(draft.node("Mul", [total, product]), 0.1, 110)
    model, _ = written(draft, both, ("N", 7, 6), tmp_path)
    x = (RNG.normal(size=(3, 7, 6)) * 3).astype(np.float32)
    np.testing.assert_allclose(
        run_onnx(tmp_path / "quicker.onnx", x), run_onnx(model.SerializeToString(), x), atol=1e-5
    )


@pytest.mark.parametrize(
    ("scale", "zero_point", "has_reader", "is_product"),
    [(0.031, 128, False, True), (0.031, 128, True, False), (0.29, 128, False, False), (0.02, 60, False, False)],
    ids=["alone", "read elsewhere", "few steps", "range above -3"],
)
def test_hardswish_is_a_product_of_integers_where_three_is_a_number_of_steps(
    scale: float, zero_point: int, has_reader: bool, is_product: bool, run_onnx: Run, tmp_path
) -> None:
    draft = Draft()
    x = draft.quantize("images", scale, zero_point)
    value = draft.quantize(draft.node("HardSwish", [x]), 0.03, 20)
    if has_reader:
        value = draft.quantize(draft.node("Add", [value, x]), 0.05, 100)
    model, kernels = written(draft, value, ("N", 4, 6, 6), tmp_path)
    assert (kernels.integer["QLinearMul"] == 1) == is_product
    images = RNG.uniform(-5, 5, (2, 4, 6, 6)).astype(np.float32)
    before, after = (run_onnx(of, images) for of in (model.SerializeToString(), tmp_path / "quicker.onnx"))
    differences = np.abs(after - before)
    assert differences.max() < (0.07 if is_product else 1e-5), "half a step of x and of y, for a scale 0.3 % larger"
