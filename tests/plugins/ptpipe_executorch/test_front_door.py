from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest

import ptpipe_executorch
from ptpipe import Context, StageError
from ptpipe_executorch import ExecuTorchConfig, ExecuTorchModel, export_executorch

HEAVY = ("torch", "numpy", "executorch", "torchao")
INSTALL = "ExecuTorch is not installed: pip install 'ptpipe[executorch]'"


def test_the_front_door_imports_nothing_heavy() -> None:
    code = f"import ptpipe_executorch, sys, json; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_kind_and_ports() -> None:
    assert [stage.kind for stage in ptpipe_executorch.ptpipe_stages()] == ["export.executorch"]
    ports = [(port.name, port.type.__name__) for port in export_executorch.inputs]
    assert ports == [("model", "Model"), ("data", "Data")]
    assert [port.type.__name__ for port in export_executorch.outputs] == ["ExecuTorchModel"]
    assert export_executorch.packages == ("torch", "executorch")


def test_options_are_explained_and_have_defaults() -> None:
    assert len(export_executorch.help) > 60
    assert all(field.description for field in ExecuTorchConfig.model_fields.values())
    assert ExecuTorchConfig().model_dump() == {
        "max_batch_size": 64,
        "max_length": 512,
        "split": "test",
        "num_samples": 512,
    }


@pytest.fixture
def without_executorch(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "executorch" else find_spec(name))


def test_what_to_install_is_said_before_any_work(without_executorch) -> None:
    assert export_executorch.preflight is not None
    assert list(export_executorch.preflight(ExecuTorchConfig())) == [INSTALL]


def test_a_worker_without_it_says_so_too(without_executorch, float_model, digits, tmp_path) -> None:
    """Where the preflight ran on another machine."""
    model = float_model("rows")
    with pytest.raises(StageError, match=f"^{re.escape(INSTALL)}$"):
        export_executorch(ExecuTorchConfig(), Context("mobile", "export.executorch", 7, tmp_path), model, digits)
    assert list(tmp_path.iterdir()) == []
    file = ExecuTorchModel(tmp_path / "model.pte", model.signature, "float32", ["logits"], 64)
    with pytest.raises(StageError, match=f"^{re.escape(INSTALL)}$"), file.predictor(1):
        pass
