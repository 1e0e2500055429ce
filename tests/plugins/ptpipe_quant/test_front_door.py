from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

import ptpipe_quant
from ptpipe import Stage
from ptpipe_quant import CalibrateConfig, DynamicConfig, PrepareConfig, PrepareQatConfig, ptpipe_stages
from ptpipe_quant.cpu import default_backend, wants_reduced_range

WITH_DATA = {
    "quant.calibrate": ["model", "ranges"],
    "quant.analyze": ["output"],
    "quant.tune": ["model", "trials"],
    "quant.smooth": ["output"],
    "quant.adaround": ["output"],
    "quant.bias_correct": ["output"],
}
"""Their outputs."""
OTHERS = {"quant.dynamic", "quant.prepare", "quant.prepare_qat", "quant.convert", "quant.equalize"}
NEEDED = {"quant.tune": {"max_drop": 0.01}}
"""Options without defaults."""


def config_of(stage: Stage, **options: object) -> Any:
    return stage.config_type(**NEEDED.get(stage.kind, {}), **options)


def test_the_front_door_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import ptpipe_quant, ptpipe_quant.checks, ptpipe_quant.cpu, sys, json\n"
        f"needed = {NEEDED}\n"
        "for stage in ptpipe_quant.ptpipe_stages():\n"
        "    stage.fingerprint and stage.fingerprint(stage.config_type(**needed.get(stage.kind, {})))\n"
        "print(json.dumps([name for name in ('torch', 'numpy', 'safetensors') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_kinds_and_ports() -> None:
    stages: list[Stage] = list(ptpipe_stages())
    assert {stage.kind for stage in stages} == {*WITH_DATA, *OTHERS}
    for stage in stages:
        inputs, outputs = ([port.name for port in ports] for ports in (stage.inputs, stage.outputs))
        assert inputs == (["model", "data"] if stage.kind in WITH_DATA else ["model"])
        assert outputs == WITH_DATA.get(stage.kind, ["output"])
        assert "torch" in stage.packages
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
        if "reduce_range" not in stage.config_type.model_fields:
            assert stage.fingerprint is None
            continue
        assert stage.fingerprint(config_of(stage, backend="fbgemm")) == {
            "reduce_range": wants_reduced_range("fbgemm")[0]
        }
        assert stage.fingerprint(config_of(stage, reduce_range=True)) == {"backend": default_backend()}
        assert stage.fingerprint(config_of(stage, backend="fbgemm", reduce_range=True)) is None


@pytest.mark.parametrize(("machine", "engine"), [("x86_64", "fbgemm"), ("aarch64", "qnnpack"), ("arm64", "qnnpack")])
def test_the_default_engine_is_one_of_this_processor(monkeypatch, machine, engine) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    (stage,) = (stage for stage in ptpipe_stages() if stage.kind == "quant.prepare")
    config = config_of(stage)
    assert (config.backend, config.engine) == ("auto", engine)
    assert config_of(stage, backend="onednn").engine == "onednn"
    assert stage.fingerprint(config)["backend"] == engine
    assert stage.preflight(config) == []


def test_preflight_names_an_unsupported_backend(monkeypatch) -> None:
    monkeypatch.setattr("ptpipe_torch.int8.engine.supported_engines", lambda: ("qnnpack",))
    for stage in ptpipe_stages():
        if stage.preflight is not None:
            assert list(stage.preflight(config_of(stage, backend="qnnpack"))) == []
            assert list(stage.preflight(config_of(stage, backend="fbgemm"))) == [
                "torch does not support int8 backend fbgemm on this machine (supported: qnnpack)"
            ]


def test_the_plugin_uses_public_hooks() -> None:
    assert ptpipe_quant.ptpipe_stages.ptpipe_impl
    assert ptpipe_quant.ptpipe_check.ptpipe_impl
