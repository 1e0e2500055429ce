"""`manifests/mnist_quantizers.yaml` on digits: our int8 file beside the one of ONNX Runtime's own quantizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptpipe import RunResult, run
from ptpipe_onnx.quantization.weight_only import missing_quantizer
from ptpipe_torch import OnnxFile

MANIFEST = Path(__file__).parents[2] / "manifests" / "mnist_quantizers.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_quantizer() is not None, reason=str(missing_quantizer())),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """On 8 x 8 digits instead of MNIST, and as small as they are."""
    folder = tmp_path_factory.mktemp("quantizers")
    text = MANIFEST.read_text(encoding="utf-8")
    assert "data.mnist, with: {fallback: digits}" in text
    text = text.replace("data.mnist, with: {fallback: digits}", "data.digits, with: {batch_size: 32}")
    (folder / "digits.yaml").write_text(text, encoding="utf-8")
    # After 5 epochs predictions are so close that another processor's rounding decides a gate. After 15 no quantizer
    # loses more than one sample, with any of six seeds.
    overrides = {"pretrain.epochs": 15, "compare.budget_s": 1}
    return run(folder / "digits.yaml", overrides, artifacts=folder / "artifacts")


def test_the_gates_judge_every_quantizer(finished: RunResult) -> None:
    outcomes = {name: str(stage.outcome) for name, stage in finished.stages.items()}
    assert outcomes.pop("size") in ("done", "refused"), "images are small, and so are layers"
    assert set(outcomes.values()) == {"done"}, {name: stage.message for name, stage in finished.stages.items()}


def test_one_comparison_has_them_all(finished: RunResult) -> None:
    (comparison,) = (output["summary"] for output in finished.stages["compare"].outputs.values())
    rows = {row["name"]: row for row in comparison["rows"]}
    assert {name: row["format"] for name, row in rows.items()} == {
        "onnx_float": "onnx float32",
        "onnx_int8": "onnx int8",
        "ort_int8": "onnx int8",
        "weights4": "onnx 4-bit weights",
    }
    baseline = rows["onnx_float"]
    assert baseline["accuracy"] >= 0.97
    for name in ("onnx_int8", "ort_int8", "weights4"):
        assert rows[name]["accuracy"] >= baseline["accuracy"] - 0.01
        assert rows[name]["size_bytes"] < 0.6 * baseline["size_bytes"]
    assert len({row["macs"] for row in rows.values()}) == 1
    assert rows["ort_int8"]["costs"]["float_operators"] == []


def test_files_are_delivered_with_their_agreement(finished: RunResult) -> None:
    for name in ("ort_int8", "weights4"):
        stage = finished.stages[name]
        assert [path.name for path in stage.deliverables] == ["model.onnx"]
        assert stage.metrics["top1_agreement"] >= 0.99
        file = finished.artifact(name)
        assert isinstance(file, OnnxFile) and file.parity["top1_agreement"] == stage.metrics["top1_agreement"]
