"""A task of a plugin's own is trained to the same weights, loss curve and metrics in every parallel mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ptpipe
from ptpipe.api import RunResult
from ptpipe_torch import Model

from .conftest import assert_same_bits, max_difference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

PLUGIN = Path(__file__).with_name("own_task_nets.py")
MANIFEST = f"""
plugins: [{PLUGIN}]
version: 1
name: own-task
seed: 3
stages:
  data: {{uses: data.texts_of_kinds}}
  net: {{uses: net.reader}}
  train: {{uses: train.supervised, with: {{epochs: 3, lr: 0.05, num_threads: 1}}}}
"""
MODES: dict[str, dict[str, Any]] = {
    "ddp": {"mode": "ddp", "workers": 2},
    "ddp, three workers": {"mode": "ddp", "workers": 3, "comm": "gloo"},
    "fsdp": {"mode": "fsdp", "workers": 2, "wrap": ["Linear"]},
    "pp": {"mode": "pp", "microbatches": 4},
    "ddp+pp": {"mode": "ddp+pp", "workers": 4, "microbatches": 4},
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.yaml"
    file.write_text(MANIFEST, encoding="utf-8")
    return file


def ran(manifest: Path, data: dict[str, Any] | None = None, store: str = "artifacts", **options: Any) -> RunResult:
    overrides = {f"train.{name}": value for name, value in options.items()}
    overrides |= {f"data.{name}": value for name, value in (data or {}).items()}
    return ptpipe.run(manifest, overrides, artifacts=manifest.parent / store)


def model_of(result: RunResult) -> Model:
    assert result.exit_code == 0, result.stages["train"].message
    model = result.artifact("train")
    assert isinstance(model, Model)
    return model


def assert_equal(one: RunResult, other: RunResult, tolerance: float) -> None:
    assert max_difference(model_of(one), model_of(other)) < tolerance
    histories = [result.stages["train"].metrics["history"] for result in (one, other)]
    assert histories[0][0].keys() == {"epoch", "lr", "train_loss", "val_macro_f1", "val_worst", "val_loss"}
    for expected, found in zip(*histories, strict=True):
        assert found == pytest.approx(expected, rel=tolerance)


ACCUMULATED = {"accumulate": 2, "clip_grad_norm": 0.3, "batch_size": 16}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, ACCUMULATED], ids=["plain", "accumulated"])
@pytest.mark.parametrize("mode", MODES)
def test_it_ends_where_one_process_does(manifest: Path, mode: str, options: dict[str, Any]) -> None:
    assert_equal(ran(manifest, **options), ran(manifest, parallel=MODES[mode], **options), 2e-5)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_with_two_inputs_and_named_outputs_too(manifest: Path, mode: str) -> None:
    both = {"has_numbers": True, "has_amount": True}
    assert_equal(ran(manifest, both, **ACCUMULATED), ran(manifest, both, parallel=MODES[mode], **ACCUMULATED), 2e-5)


def test_a_loss_that_compares_the_samples_of_a_micro_batch_sees_no_padding(manifest: Path) -> None:
    """61 samples in batches of 16: the last micro-batch has one sample, and room for three more."""
    single = ran(manifest, {"compares": True}, batch_size=4, accumulate=4)
    parallel = ran(manifest, {"compares": True}, batch_size=16, parallel=MODES["pp"])
    assert_equal(single, parallel, 2e-5)
    for result in (single, parallel):
        (notice,) = result.stages["train"].notices
        assert "of which a forward pass has 4, because a step of 16 is divided into 4" in notice


@pytest.mark.parametrize("data", [{"has_numbers": True}, {"has_amount": True}], ids=str)
def test_pipelines_refuse_several_inputs_and_outputs_before_work(manifest: Path, data: dict[str, Any]) -> None:
    result = ran(manifest, data, parallel=MODES["pp"])
    assert result.exit_code == 1
    assert "parallel mode pp takes networks of one" in result.stages["train"].message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
def test_in_bf16_it_ends_nearby(manifest: Path, mode: str) -> None:
    assert_equal(ran(manifest, precision="bf16"), ran(manifest, precision="bf16", parallel=MODES[mode]), 0.03)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("moment", ["losses:40", "sums:12"], ids=["training", "evaluation"])
@pytest.mark.parametrize("mode", MODES)
def test_killed_it_resumes_with_the_same_bits(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, moment: str
) -> None:
    """Also where three workers add gradients in messages, whose order torch chooses after its first backward pass."""
    options = {"parallel": MODES[mode], "checkpoint_every_s": 0.001, "epochs": 4, "batch_size": 8}
    undisturbed = ran(manifest, store="undisturbed", **options)
    (tmp_path / "once").touch()
    for name, value in {"DIE_AT": moment, "DIE_IN": "1", "DIE_ONCE": str(tmp_path / "once")}.items():
        monkeypatch.setenv(name, value)
    store = f"killed {mode} {moment}".replace(":", " ")
    killed = ran(manifest, store=store, **options)
    assert (killed.exit_code, "killed by SIGKILL" in killed.stages["train"].message) == (1, True)
    resumed = ran(manifest, store=store, **options)
    assert_same_bits(model_of(undisturbed), model_of(resumed))
    one, other = (result.stages["train"].metrics for result in (undisturbed, resumed))
    assert other["restarted_at_epochs"] and one["history"] == other["history"]
