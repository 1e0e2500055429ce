from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from packaging.version import Version

from ptpipe_onnx import integer_products
from ptpipe_torch.ort import ort

from ...processor import ONNX_RUNTIME


def test_this_version_multiplies_right() -> None:
    if Version(integer_products.FIXED_IN) > ONNX_RUNTIME:
        pytest.skip("on a processor with AMX it does not")
    assert integer_products.are_right()


def test_one_wrong_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(ort.InferenceSession):
        def run(self, *arguments: Any) -> list[np.ndarray]:
            (sums,) = super().run(*arguments)
            sums[-1, -1] += 1
            return [sums]

    monkeypatch.setattr(ort, "InferenceSession", Wrong)
    assert not integer_products.are_right()


def test_the_file_is_a_product_alone() -> None:
    model = onnx.load_from_string(integer_products._MODEL)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["MatMulInteger"]
    assert integer_products._ROWS >= 32
    assert 17 <= integer_products._COLUMNS <= 31
