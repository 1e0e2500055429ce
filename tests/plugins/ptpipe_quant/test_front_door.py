from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

import ptpipe_quant
from ptpipe import Stage
from ptpipe_quant import CalibrateConfig, DynamicConfig, PrepareConfig, PrepareQatConfig, ptpipe_stages
from ptpipe_quant.cpu import wants_reduced_range

KINDS = ["quant.dynamic", "quant.prepare", "quant.prepare_qat", "quant.calibrate", "quant.convert"]


def test_the_front_door_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import ptpipe_quant, ptpipe_quant.checks, ptpipe_quant.cpu, sys, json\n"
        "for stage in ptpipe_quant.ptpipe_stages():\n"
        "    stage.fingerprint and stage.fingerprint(stage.config_type())\n"
        "print(json.dumps([name for name in ('torch', 'numpy', 'safetensors') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_kinds_and_ports() -> None:
    stages: list[Stage] = list(ptpipe_stages())
    assert [stage.kind for stage in stages] == KINDS
    for stage in stages:
        inputs, outputs = ([port.name for port in ports] for ports in (stage.inputs, stage.outputs))
        assert inputs == (["model", "data"] if stage.kind == "quant.calibrate" else ["model"])
        assert outputs == (["model", "ranges"] if stage.kind == "quant.calibrate" else ["output"])
        assert stage.packages == ("torch",)
        assert all(field.description for field in stage.config_type.model_fields.values())
        assert len(stage.help.splitlines()[0]) < 100


@pytest.mark.parametrize(
    ("config_type", "options"),
    [
        (PrepareConfig, {"backend": "tensorrt"}),
        (PrepareConfig, {"reduce_range": "yes"}),
        (PrepareConfig, {"observer": "minmax"}),
        (PrepareQatConfig, {"freeze_at": 1.5}),
        (PrepareConfig, {"observer": "percentile", "percentile": 50}),
        (PrepareConfig, {"observer": "mse", "percentile": 99.9}),
        (PrepareQatConfig, {"observer": "mse"}),
        (CalibrateConfig, {"num_samples": 0}),
        (CalibrateConfig, {"split": "test"}),
        (DynamicConfig, {"skip": "head"}),
    ],
)
def test_wrong_options_are_refused(config_type, options) -> None:
    with pytest.raises(ValidationError):
        config_type.model_validate_json(json.dumps(options), strict=True)


def test_the_former_name_of_an_observer_is_explained() -> None:
    with pytest.raises(ValidationError, match="histogram was renamed to mse"):
        PrepareConfig.model_validate_json('{"observer": "histogram"}', strict=True)


def test_options_as_a_manifest_gives_them() -> None:
    config = PrepareConfig.model_validate_json('{"reduce_range": true, "skip": ["head"]}', strict=True)
    assert (config.reduce_range, config.skip) == (True, ("head",))


def test_the_key_holds_what_auto_decides_here() -> None:
    for stage in ptpipe_stages():
        if stage.kind in ("quant.calibrate", "quant.convert"):
            assert stage.fingerprint is None
            continue
        assert stage.fingerprint(stage.config_type(backend="fbgemm")) == {
            "reduce_range": wants_reduced_range("fbgemm")[0]
        }
        assert stage.fingerprint(stage.config_type(reduce_range=True)) is None


def test_preflight_names_an_unsupported_backend(monkeypatch) -> None:
    monkeypatch.setattr("ptpipe_torch.int8.engine.supported_engines", lambda: ("qnnpack",))
    for stage in ptpipe_stages():
        if stage.preflight is not None:
            assert list(stage.preflight(stage.config_type(backend="qnnpack"))) == []
            assert list(stage.preflight(stage.config_type(backend="fbgemm"))) == [
                "torch does not support int8 backend fbgemm on this machine (supported: qnnpack)"
            ]


def test_the_plugin_uses_public_hooks() -> None:
    assert ptpipe_quant.ptpipe_stages.ptpipe_impl
    assert ptpipe_quant.ptpipe_check.ptpipe_impl
