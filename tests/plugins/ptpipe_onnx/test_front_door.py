from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

import ptpipe_onnx
from ptpipe import Context, StageError
from ptpipe_onnx import ExportConfig, OpenVinoConfig, OpenVinoModel, export_onnx, export_openvino, quantize_weights
from ptpipe_onnx.checks import unsupported_opset
from ptpipe_onnx.quantization.config import WeightOnlyConfig

HEAVY = ("torch", "numpy", "onnx", "onnxruntime", "onnxscript", "openvino")


def test_the_front_door_imports_nothing_heavy() -> None:
    code = f"import ptpipe_onnx, sys, json; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_kind_and_ports() -> None:
    kinds = ["export.onnx", "export.openvino", "quant.onnx", "quant.weight_only"]
    assert [stage.kind for stage in ptpipe_onnx.ptpipe_stages()] == kinds
    assert [(port.name, port.type.__name__) for port in export_onnx.inputs] == [("model", "Model"), ("data", "Data")]
    assert [port.type.__name__ for port in export_onnx.outputs] == ["OnnxFile"]
    assert export_onnx.packages == ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime")


def test_options_are_explained_and_have_defaults() -> None:
    assert len(export_onnx.help) > 60
    assert all(field.description for field in ExportConfig.model_fields.values())
    assert ExportConfig().model_dump() == {
        "opset": 18,
        "ir_version": 10,
        "preprocessing": "none",
        "resize": False,
        "postprocessing": False,
        "split": "test",
        "num_samples": 512,
        "num_test_vectors": 8,
    }


@pytest.mark.parametrize(
    "options", [{"opset": 17}, {"opset": 24}, {"split": "all"}, {"num_samples": 0}, {"ir_version": 7}, {"ops": 1}]
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ExportConfig.model_validate_json(json.dumps(options), strict=True)


def test_preflight_knows_what_this_runtime_can_run() -> None:
    assert export_onnx.preflight is not None
    assert list(export_onnx.preflight(ExportConfig())) == []
    assert "does not run opset 200" in str(unsupported_opset(opset=200))
    assert "in IR version 99" in str(unsupported_opset(18, 99))


def test_a_worker_without_openvino_says_what_to_install(monkeypatch: pytest.MonkeyPatch, exported, digits, tmp_path):
    """Where the preflight ran on another machine."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openvino" else find_spec(name))
    install = re.escape("OpenVINO is not installed: pip install 'ptpipe[openvino]'")
    file = exported("cnn").file
    with pytest.raises(StageError, match=f"^{install}$"):
        export_openvino(OpenVinoConfig(), Context("vino", "export.openvino", 7, tmp_path), file, digits)
    assert list(tmp_path.iterdir()) == []
    model = OpenVinoModel(tmp_path, file.signature, "float32")
    with pytest.raises(StageError, match=f"^{install}$"), model.predictor():
        pass


@pytest.mark.parametrize(("version", "is_old"), [("1.23.2", True), ("1.24.0", False), ("1.100.1", False)])
def test_an_older_onnxruntime_is_named_with_its_remedy(version, is_old, monkeypatch, tmp_path, exported, digits):
    monkeypatch.setattr("onnxruntime.__version__", version)
    assert quantize_weights.preflight is not None
    problems = list(quantize_weights.preflight(WeightOnlyConfig()))
    message = f"onnxruntime {version} can't quantize weights to a given number of bits: pip install 'onnxruntime>=1.24'"
    assert problems == [message] * is_old
    if is_old:
        ctx = Context("small", "quant.weight_only", 7, tmp_path)
        with pytest.raises(StageError, match=f"^{re.escape(message)}$"):
            quantize_weights(WeightOnlyConfig(), ctx, exported("cnn").file, digits)
        assert list(tmp_path.iterdir()) == []
