"""`precision: auto` takes the faster precision, and measuring it changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ptpipe import Context
from ptpipe.events import Event, Notice
from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER
from ptpipe_train import supervised
from ptpipe_train.precision import PrecisionChoice, choose_precision

from .conftest import Lab, assert_same_bits

LONG = 200
"""Batches of a training from which on a slow bf16 gets a notice."""


def set_step_ms(monkeypatch: pytest.MonkeyPatch, fp32: float, bf16: float) -> list[int]:
    """Replace the measurement; the result counts its calls."""
    calls: list[int] = []

    def measure(*_: object, cuda_graphs: bool) -> list[float]:
        calls.append(1)
        return [fp32, bf16]

    monkeypatch.setattr(supervised, "measure_step_ms", measure)
    return calls


@pytest.mark.parametrize("prepared", [False, True], ids=["float", "fake quantization"])
def test_auto_is_bit_equal_to_the_precision_it_resolves_to(lab: Lab, *, prepared: bool) -> None:
    """With the real measurement: dropout, batch norm, observers, augmentation, order of samples are unchanged."""
    model = lab.make_model(norm=True, dropout=0.5)
    if prepared:
        model = prepare_qat(PrepareQatConfig(backend="fbgemm"), lab.context(), model)
    data = lab.make_data(100, 30, augment=["shift"])
    auto = lab.train_afresh(model, data, epochs=2, precision="auto")
    metrics = auto.metrics
    assert metrics["precision"] in ("fp32", "bf16")
    assert 0 < metrics[f"{metrics['precision']}_step_ms"] == min(metrics["fp32_step_ms"], metrics["bf16_step_ms"])
    chosen = lab.train_afresh(model, data, epochs=2, precision=metrics["precision"])
    assert_same_bits(auto.model, chosen.model)
    assert metrics["history"] == chosen.metrics["history"]


@pytest.mark.parametrize(("fp32", "bf16", "expected"), [(1.0, 2.0, "fp32"), (2.0, 1.0, "bf16")])
def test_auto_takes_the_faster(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, fp32: float, bf16: float, expected: str
) -> None:
    set_step_ms(monkeypatch, fp32, bf16)
    model, data = lab.make_model(norm=True, dropout=0.5), lab.make_data(augment=["shift"])
    auto = lab.train_afresh(model, data, epochs=2, precision="auto")
    assert (auto.metrics["precision"], auto.metrics["fp32_step_ms"], auto.metrics["bf16_step_ms"]) == (
        expected,
        fp32,
        bf16,
    )
    assert auto.notices == []
    assert_same_bits(auto.model, lab.train_afresh(model, data, epochs=2, precision=expected).model)


def test_a_restart_takes_the_precision_that_was_measured_first(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = set_step_ms(monkeypatch, 2.0, 1.0)
    first = lab.train(lab.make_model(), lab.make_data(32), epochs=1, precision="auto")
    set_step_ms(monkeypatch, 1.0, 2.0)
    second = lab.train(lab.make_model(), lab.make_data(32), epochs=1, precision="auto")
    assert first.metrics["precision"] == second.metrics["precision"] == "bf16"
    assert len(calls) == 1
    (lab.scratch / "precision.json").write_text("[1.0", encoding="utf-8")
    assert lab.train(lab.make_model(), lab.make_data(32), epochs=1, precision="auto").metrics["precision"] == "fp32"
    assert json.loads((lab.scratch / "precision.json").read_text(encoding="utf-8")) == [1.0, 2.0]


def test_bf16_that_is_slower_on_this_cpu_gets_a_notice(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = set_step_ms(monkeypatch, 10.0, 18.8)
    for _ in range(2):
        trained = lab.train(lab.make_model(), lab.make_data(16), epochs=LONG, precision="bf16")
        (notice,) = trained.notices
        assert notice.startswith("precision bf16: a step takes 1.88x as long as in fp32 on this CPU (18.8 ms, 10 ms)")
        assert trained.metrics["precision"] == "bf16"
    assert len(calls) == 1


def test_bf16_that_is_faster_gets_none(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    set_step_ms(monkeypatch, 10.0, 10.4)
    trained = lab.train(lab.make_model(), lab.make_data(16), epochs=LONG, precision="bf16")
    assert trained.notices == []
    assert trained.metrics["bf16_step_ms"] == 10.4


def test_a_short_training_in_bf16_is_not_measured(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = set_step_ms(monkeypatch, 10.0, 18.8)
    assert lab.train(lab.make_model(), lab.make_data(16), epochs=LONG - 1, precision="bf16").notices == []
    assert calls == []


def test_fp32_is_not_measured(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = set_step_ms(monkeypatch, 1.0, 2.0)
    trained = lab.train(lab.make_model(), lab.make_data(16), epochs=1)
    assert calls == []
    assert "fp32_step_ms" not in trained.metrics
    assert not (lab.scratch / "precision.json").exists()


def test_a_cuda_device_without_bf16_instructions_gets_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    events: list[Event] = []
    ctx = Context("t", "train.supervised", 7, tmp_path, _tell=events.append)
    choice = choose_precision("bf16", torch.device("cuda"), ctx, SINGLE_WORKER, LONG, lambda _: pytest.fail("measured"))
    assert choice == PrecisionChoice("bf16", {})
    (notice,) = [event.text for event in events if isinstance(event, Notice)]
    assert "no bf16 instructions" in notice
