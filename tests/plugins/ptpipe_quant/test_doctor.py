"""`ptpipe doctor` on torch's quantized engines."""

from __future__ import annotations

import torch

from ptpipe_quant import doctor
from ptpipe_quant.cpu import wants_reduced_range
from ptpipe_quant.doctor import run_checks
from ptpipe_torch.int8 import engine
from ptpipe_torch.int8.engine import probe_error, supported_engines

BACKENDS = ("fbgemm", "qnnpack", "x86", "onednn")


def test_each_engine_is_reported_once():
    before = torch.backends.quantized.engine
    found = {check.subject: check for check in run_checks()}
    assert list(found) == [f"int8 {backend}" for backend in BACKENDS]
    for backend in BACKENDS:
        state = found[f"int8 {backend}"].state
        if backend not in supported_engines():
            assert state == "warn"
        else:
            assert state == ("warn" if wants_reduced_range(backend)[0] else "ok")
    assert torch.backends.quantized.engine == before


def test_engines_of_x86_are_no_fault_of_other_processors(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    found = {check.subject: check for check in run_checks()}
    for engine_name in ("fbgemm", "x86"):
        check = found[f"int8 {engine_name}"]
        assert (check.state, check.detail) == ("ok", "for x86 processors alone")


def test_an_engine_that_computes_nonsense_is_found(monkeypatch):
    backend = supported_engines()[0]
    for module in (engine, doctor):  # sums beyond 64 saturate: wrong by more than half a step
        monkeypatch.setattr(module, "PROBE_STEP", 0.5)
    assert probe_error(backend) > 1
    check = doctor._run_engine(backend)
    assert (check.state, check.remedy != "") == ("fail", True)
    assert "wrong by" in check.detail


def test_an_engine_that_fails_is_found():
    check = doctor._run_engine("nonesuch")
    assert check.state == "fail"
    assert "nonesuch" in check.detail
    assert "\n" not in check.detail
