"""Nearest upsampling of integers, written as copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ptpipe_onnx.graph import remove_unused
from ptpipe_onnx.upsampling import copy_pixels, use_resizing
from ptpipe_torch.model.onnx_file import session_options
from ptpipe_torch.ort import ort

from .test_latency_passes import passed, run_types
from .test_qdq_passes import IMAGES_NCHW, Draft, conv, types_of

Run = Callable[..., np.ndarray]
COPIES = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def upsampled(
    scales: Sequence[float], *, step: float = 0.05, shape: Sequence[Any] = ("N", 4, 6, 6), **options: Any
) -> onnx.ModelProto:
    """Two convolutions, the second on larger images. For the number of samples, if it is known, sizes are given."""
    draft = Draft()
    value = draft.quantize(conv(draft, draft.quantize("images", 0.05, 128)), 0.05, 128)
    by = ["", draft.array(scales, np.float32)]
    if isinstance(shape[0], int):
        sizes = [int(size * scale) for size, scale in zip(shape, scales, strict=True)]
        by = ["", "", draft.array(sizes, np.int64)]
    resize = draft.node("Resize", [value, *by], **{**COPIES, **options})
    value = conv(draft, draft.quantize(resize, step, 128))
    return onnx.shape_inference.infer_shapes(draft.finished(draft.quantize(value, 0.05, 128), shape))


def written(model: onnx.ModelProto) -> onnx.ModelProto:
    """Apply the pass, and remove what nothing reads, as an export does."""
    content = ir.serde.deserialize_model(passed(model, copy_pixels))
    remove_unused(content)
    return ir.serde.serialize_model(content)


@pytest.mark.parametrize("samples", ["N", len(IMAGES_NCHW)])
@pytest.mark.parametrize("factors", [(2, 2), (3, 1), (1, 2), (4, 3)])
def test_pixels_and_rows_are_copied(
    factors: tuple[int, int], samples: str | int, run_onnx: Run, tmp_path: Path
) -> None:
    model = upsampled((1, 1, *factors), shape=(samples, 4, 6, 6))
    after = written(model)
    assert "Resize" in run_types(model, tmp_path)
    assert "Resize" not in run_types(after, tmp_path)
    for optimize in (False, True):
        expected, found = (run_onnx(of.SerializeToString(), IMAGES_NCHW, optimize=optimize) for of in (model, after))
        assert found.shape[2:] == (6 * factors[0], 6 * factors[1])
        assert np.array_equal(found, expected)
        assert len(np.unique(found)) > 50


def test_transpositions_vanish_between_integer_convolutions(tmp_path: Path) -> None:
    model = upsampled((1, 1, 2, 2))
    options = session_options(num_threads=1)
    counts = []
    for name, content in (("before", model), ("after", written(model))):
        options.optimized_model_filepath = str(tmp_path / f"{name}.onnx")
        ort.InferenceSession(content.SerializeToString(), options, providers=["CPUExecutionProvider"])
        counts.append(types_of(onnx.load(tmp_path / f"{name}.onnx"))["Transpose"])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("factors", [(2, 2), (3, 1), (1, 2)])
def test_it_is_undone(factors: tuple[int, int], run_onnx: Run) -> None:
    model = upsampled((1, 1, *factors))
    content = ir.serde.deserialize_model(written(model))
    assert use_resizing(content.graph)
    assert not use_resizing(content.graph)
    remove_unused(content)
    after = ir.serde.serialize_model(content)
    onnx.checker.check_model(after, full_check=True)
    assert types_of(after) == types_of(model)
    expected, found = (run_onnx(of.SerializeToString(), IMAGES_NCHW) for of in (model, after))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "model",
    [
        upsampled((1, 1, 2, 2), mode="linear"),
        upsampled((1, 1, 2, 2), coordinate_transformation_mode="align_corners"),
        upsampled((1, 1, 1.5, 2)),
        upsampled((1, 1, 2, 2), step=0.06),
        upsampled((1, 1, 2, 2), shape=("N", 4, "H", 6)),
        upsampled((1, 1, 1, 1)),
        upsampled((1, 1, 1.5, 2), shape=(3, 4, 6, 6)),
    ],
    ids=["linear", "aligned", "no whole factor", "another grid", "any height", "no larger", "no whole size"],
)
def test_another_resizing_is_left_alone(model: onnx.ModelProto) -> None:
    assert types_of(written(model))["Resize"] == 1
