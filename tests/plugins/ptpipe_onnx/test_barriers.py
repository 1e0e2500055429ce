"""Barriers behind DequantizeLinear: ONNX Runtime leaves together what reads them, and they cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from packaging.version import Version

from ptpipe_onnx.barriers import drop_views
from ptpipe_onnx.graph import remove_unused
from ptpipe_onnx.latency_passes import use_quicker_kernels

from ...processor import ONNX_RUNTIME
from .conftest import Exported
from .test_activation_pass import check_same, gelu
from .test_latency_passes import run_operators
from .test_qdq_passes import Draft, conv, kernels_of, types_of

Run = Callable[..., np.ndarray]
SHAPES = [("N", 5, 6), ("N", "L", 6), (None, None, 6)]
RNG = np.random.default_rng(3)
X_NLI = RNG.normal(size=(2, 5, 6)).astype(np.float32) * 2


def rows(draft: Draft, *, is_product: bool) -> str:
    """What a product of matrices returns, or images with other axes last."""
    value = draft.quantize("images", 0.05, 100, dequantize=is_product)
    if is_product:
        value = draft.node("MatMul", [value, draft.weight(RNG.integers(-100, 100, (6, 6)), 0.01)])
        return draft.quantize(value, 0.05, 100)
    grid = draft.nodes[-1].input[1:]
    return draft.node("DequantizeLinear", [draft.node("Transpose", [value], perm=(0, 2, 1)), *grid])


@pytest.mark.parametrize("is_product", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_behind_a_product_or_moved_axes_it_copies_nothing(
    shape: Sequence[int | str | None], is_product: bool, run_onnx: Run, tmp_path: Path
) -> None:
    draft = Draft()
    value = rows(draft, is_product=is_product)
    model = draft.finished(draft.quantize(gelu(draft, value, "erf"), 0.04, 5), shape)
    after = check_same(model, run_onnx, 0.0401, X_NLI)
    types = types_of(after)
    assert (types["Flatten"], types["Max"], types["Shape"]) == (1, 0, shape[1] != 5)
    kernels = kernels_of(after, tmp_path)
    assert kernels.float == {"Gelu": 1}
    assert kernels.integer == ({"QLinearMatMul": 1} if is_product else {})
    for empty in ((0, 5, 6), (2, 0, 6)) if types["Shape"] else ((0, 5, 6),):
        before = run_onnx(model.SerializeToString(), np.zeros(empty, np.float32))
        assert run_onnx(after.SerializeToString(), np.zeros(empty, np.float32), optimize=True).shape == before.shape


@pytest.mark.parametrize("shape", SHAPES)
def test_a_softmax_of_products_stays_float(shape: Sequence[int | str | None], run_onnx: Run, tmp_path: Path) -> None:
    draft = Draft()
    value = draft.node("Softmax", [rows(draft, is_product=True)], axis=-1)
    model = onnx.shape_inference.infer_shapes(draft.finished(draft.quantize(value, 1 / 256, 0), shape))
    content = ir.serde.deserialize_model(model)
    use_quicker_kernels(content.graph)
    after = ir.serde.serialize_model(content)
    onnx.checker.check_model(after, full_check=True)
    assert (types_of(after)["Flatten"], types_of(after)["Max"]) == (1, 0)
    assert kernels_of(model, tmp_path).integer == {"QLinearMatMul": 1, "QLinearSoftmax": 1}
    kernels = kernels_of(after, tmp_path)
    assert (kernels.integer, kernels.float) == ({"QLinearMatMul": 1}, {"Softmax": 1})
    expected = run_onnx(model.SerializeToString(), X_NLI)
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), X_NLI), expected)


@pytest.mark.skipif(Version("1.32") > ONNX_RUNTIME, reason="earlier versions leave transpositions in front of a GELU")
def test_between_convolutions_it_lets_transpositions_pass(run_onnx: Run, tmp_path: Path) -> None:
    draft = Draft()
    value = draft.quantize(conv(draft, draft.quantize("images", 0.05, 100)), 0.05, 100)
    value = draft.quantize(gelu(draft, value, "erf"), 0.04, 5)
    model = draft.finished(draft.quantize(conv(draft, value), 0.05, 100))
    after = check_same(model, run_onnx, 0.0501)
    assert types_of(after)["Max"] == 1
    types = run_operators(after, tmp_path)
    assert (types["QLinearConv"], types["Gelu"], types["Transpose"]) == (2, 1, 2)


def test_the_views_of_a_file_can_be_dropped(exported: Callable[..., Exported], run_onnx: Run) -> None:
    """For OpenVINO; the network's own Flatten stays."""
    path = exported("attention", "fbgemm").file.path
    content = ir.load(path)
    assert drop_views(content.graph)
    remove_unused(content)
    assert not drop_views(content.graph)
    before, after = onnx.load(path), ir.serde.serialize_model(content)
    assert types_of(before) - types_of(after) == {"Flatten": 1, "Reshape": 1}
    images_NCHW = RNG.normal(size=(3, 1, 16, 16)).astype(np.float32)
    np.testing.assert_array_equal(run_onnx(after.SerializeToString(), images_NCHW), run_onnx(path, images_NCHW))
