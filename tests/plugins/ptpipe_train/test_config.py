from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import ptpipe_train
from ptpipe_train import TrainConfig, train
from ptpipe_train.config import EarlyStopping, Schedule


def config(**options: Any) -> TrainConfig:
    return TrainConfig.model_validate_json(json.dumps(options), strict=True)


def test_importing_it_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, ptpipe_train; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_offers_one_kind_with_its_ports() -> None:
    (stage,) = ptpipe_train.ptpipe_stages()
    assert stage is train
    assert stage.kind == "train.supervised"
    assert [port.name for port in stage.inputs] == ["model", "data", "teacher"]
    assert "numpy" in stage.packages  # its generator makes the order of samples


@pytest.mark.parametrize("model", [TrainConfig, Schedule, EarlyStopping])
def test_every_option_is_described(model: type[BaseModel]) -> None:
    assert all(field.description for field in model.model_fields.values())


@pytest.mark.parametrize(
    ("options", "place", "words"),
    [
        ({"epochs": 0}, ("epochs",), "greater than or equal to 1"),
        ({"lr": 0}, ("lr",), "greater than 0"),
        ({"lr": "0.1"}, ("lr",), "number"),
        ({"precision": "int8"}, ("precision",), "'auto', 'fp32', 'bf16' or 'fp16'"),
        ({"optimizer": "adamw", "momentum": 0.9}, (), "options of the optimizer sgd"),
        ({"optimizer": "adamw", "nesterov": True}, (), "options of the optimizer sgd"),
        ({"nesterov": True, "momentum": 0}, (), "nesterov needs a momentum"),
        (
            {"accumulate": 2, "parallel": {"mode": "ddp", "workers": 2, "static_graph": True}},
            (),
            "static_graph can't be combined with accumulate",
        ),
        ({"schedule": {"name": "cosine", "gamma": 0.5}}, ("schedule",), "gamma is an option of the schedule step"),
        ({"schedule": {"final": 0.1}}, ("schedule",), "final is an option of the schedule cosine, not of auto"),
        ({"schedule": {"warmup": 1.0}}, ("schedule", "warmup"), "less than 1"),
        ({"schedule": {"warmup": -1}}, ("schedule", "warmup"), "greater than or equal to 0"),
        ({"schedule": "cosine"}, ("schedule",), "object"),
        (
            {"early_stopping": {"metric": "val_top1"}},
            ("early_stopping", "metric"),
            "val_top1 was renamed to val_accuracy",
        ),
        ({"early_stopping": {"metric": "loss"}}, ("early_stopping", "metric"), "should match pattern"),
        ({"early_stopping": {"metric": "val_"}}, ("early_stopping", "metric"), "should match pattern"),
        ({"early_stopping": {"metric": "val_f1 score"}}, ("early_stopping", "metric"), "should match pattern"),
        ({"early_stopping": {"patience": 0}}, ("early_stopping", "patience"), "greater than or equal to 1"),
        ({"learning_rate": 0.1}, ("learning_rate",), "Extra inputs"),
        ({"checkpoint_every_s": 0}, ("checkpoint_every_s",), "greater than 0"),
    ],
)
def test_refuses_wrong_options(options: dict[str, Any], place: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**options)
    assert any(error["loc"][: len(place)] == place and words in error["msg"] for error in caught.value.errors()), (
        caught.value.errors()
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "adamw", "schedule": {"name": "one_cycle", "warmup": 0.2}},
        {"schedule": {"name": "step", "gamma": 0.5, "every_epochs": 2, "warmup": 100}, "early_stopping": {}},
    ],
)
def test_a_config_with_its_defaults_filled_in_is_valid_again(options: dict[str, Any]) -> None:
    made = config(**options)
    assert TrainConfig.model_validate_json(made.model_dump_json(), strict=True) == made


@pytest.mark.parametrize("metric", ["val_loss", "val_SMAPE", "val__mape", "val_2nd", "val_größe"])
def test_early_stopping_monitors_any_function(metric: str) -> None:
    stopping = config(early_stopping={"metric": metric}).early_stopping
    assert stopping is not None and stopping.metric == metric


def test_a_warmup_is_steps_or_a_fraction_by_its_type() -> None:
    assert config(schedule={"warmup": 1}).schedule.warmup == 1
    assert isinstance(config(schedule={"warmup": 1}).schedule.warmup, int)
    assert isinstance(config(schedule={"warmup": 0.5}).schedule.warmup, float)


def test_preflight_names_what_this_machine_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ptpipe_train import device

    def missing(**options: Any) -> list[str]:
        assert train.preflight is not None
        return list(train.preflight(config(**options)))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "has_fast_fp16", lambda: False)
    assert missing() == missing(precision="bf16") == missing(device="cpu") == []
    assert "no CUDA device" in missing(device="cuda")[0]
    assert "use bf16" in missing(precision="fp16")[0]
    monkeypatch.setattr(device, "has_fast_fp16", lambda: True)
    assert missing(precision="fp16") == []
