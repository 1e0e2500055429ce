"""The stored form of an analysis."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptpipe import IntegrityError
from ptpipe_quant.analysis.layer_errors import Effect, LayerError, LayerErrors, TensorError

EFFECTS = (Effect(30.0, 0.01, -0.01, 0.03), Effect(20.0, 0.0, -0.02, 0.02), Effect(None, 0.2, 0.1, 0.3))
WEIGHT = TensorError(40.0, -1.0, 1.0, 0.0, 0.99)
ERRORS = LayerErrors(
    tuple(LayerError(f"conv{i}", WEIGHT, None, effect) for i, effect in enumerate(EFFECTS)),
    EFFECTS[0],
    "accuracy",
    True,
    0.9,
    "val",
    512,
    0.95,
)


def test_it_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    ERRORS.save(tmp_path)
    assert LayerErrors.load(tmp_path) == ERRORS


def test_what_is_sure_to_cost_comes_first_then_what_is_noisy() -> None:
    assert [layer.name for layer in ERRORS.worst_first] == ["conv2", "conv1", "conv0"]


@pytest.mark.parametrize("content", ["", "{}", '{"layers": [1]}', "[]"])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "layer_errors.json").write_text(content, encoding="utf-8")
    with pytest.raises(IntegrityError, match="not a file of layer errors"):
        LayerErrors.load(tmp_path)


def test_the_summary_has_the_worst_layers() -> None:
    assert [row["layer"] for row in ERRORS.summary()["worst_layers"]] == ["conv2", "conv1", "conv0"]
