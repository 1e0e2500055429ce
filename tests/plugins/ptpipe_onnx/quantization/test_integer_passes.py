"""Passes behind the quantizer, on hand-made graphs in the form that it writes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from ptpipe_onnx.kernels import Kernels
from ptpipe_onnx.quantization.integer_passes import write_with_quicker_kernels

from ..test_qdq_passes import Draft, types_of

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


def test_a_product_whose_sum_is_not_rounded_keeps_its_rounding(tmp_path) -> None:
    draft = Draft()
    weight = draft.weight(RNG.integers(-127, 128, (6, 5)), 0.01)
    product = draft.quantize(draft.node("MatMul", [draft.quantize("images", 0.05, 120), weight]), 0.1, 100)
    total = draft.node("Add", [product, draft.array(np.ones(5), np.float32)])
    _, kernels = written(draft, total, ("N", 7, 6), tmp_path)
    assert kernels.integer == {"QLinearConv": 1} and kernels.float == {"Add": 1}


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
    ("scale", "zero_point", "has_reader", "is_exact"),
    [
        (0.031, 128, False, True),
        (0.031, 128, True, False),
        (0.29, 128, False, False),
        (0.02, 60, False, False),
        (0.01, 200, False, False),
        (0.02, 0, False, False),
    ],
    ids=["whole steps", "read elsewhere", "few steps", "range above -3", "range within -3 and 3", "positive"],
)
def test_hardswish_is_a_product_of_integers(
    scale: float, zero_point: int, has_reader: bool, is_exact: bool, run_onnx: Run, tmp_path
) -> None:
    draft = Draft()
    x = draft.quantize("images", scale, zero_point)
    value = draft.quantize(draft.node("HardSwish", [x]), 0.03, 20)
    if has_reader:
        value = draft.quantize(draft.node("Add", [value, x]), 0.05, 100)
    model, kernels = written(draft, value, ("N", 4, 6, 6), tmp_path)
    assert kernels.integer["QLinearMul"] == 1 and not {"HardSwish", "HardSigmoid"} & set(kernels.float)
    assert kernels.integer["QLinearAdd"] == (not is_exact) + has_reader
    images = RNG.uniform(-6, 6, (2, 4, 6, 6)).astype(np.float32)
    before, after = (run_onnx(of, images) for of in (model.SerializeToString(), tmp_path / "quicker.onnx"))
    half_step_of_x, half_step_of_factor = 1.1 * 0.5 * scale * is_exact, 0.5 / 255 * (not is_exact)
    allowed = half_step_of_x + 6 * half_step_of_factor + 0.051
    assert np.abs(after - before).max() < allowed, "and a step of the output"


def test_ranges_are_those_of_int8_too(run_onnx: Run, tmp_path) -> None:
    draft = Draft()
    grids = [
        [draft.array(scale, np.float32), draft.array(zero, np.int8)] for scale, zero in ((0.02, -70), (0.02, -100))
    ]
    x = draft.node("DequantizeLinear", [draft.node("QuantizeLinear", ["images", *grids[0]]), *grids[0]])
    y = draft.node("QuantizeLinear", [draft.node("HardSwish", [x]), *grids[1]])
    model, _ = written(draft, draft.node("DequantizeLinear", [y, *grids[1]]), ("N", 4, 6, 6), tmp_path)
    assert types_of(onnx.load(tmp_path / "quicker.onnx"))["Mul"] == 1  # on x86, ONNX Runtime runs it in float
    images = RNG.uniform(-6, 6, (2, 4, 6, 6)).astype(np.float32)
    before, after = (run_onnx(of, images) for of in (model.SerializeToString(), tmp_path / "quicker.onnx"))
    assert np.abs(after - before).max() < 0.021
