from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import ptpipe_executorch
from ptpipe_executorch import ExecuTorchConfig, export_executorch

HEAVY = ("torch", "numpy", "executorch", "torchao")


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


def test_what_to_install_is_said_before_any_work(monkeypatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "executorch" else find_spec(name))
    assert export_executorch.preflight is not None
    messages = list(export_executorch.preflight(ExecuTorchConfig()))
    assert messages == ["ExecuTorch is not installed: pip install 'ptpipe[executorch]'"]
