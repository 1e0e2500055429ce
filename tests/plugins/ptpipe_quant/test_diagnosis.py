from __future__ import annotations

import pytest
import torch

from ptpipe_quant import diagnosis
from ptpipe_quant.backends import offered_backends
from ptpipe_quant.cpu import wants_reduced_range
from ptpipe_quant.diagnosis import _largest_error, _probed, findings

BACKENDS = ("fbgemm", "qnnpack", "x86", "onednn")


def test_each_engine_is_said_once():
    before = torch.backends.quantized.engine
    found = {finding.subject: finding for finding in findings()}
    assert list(found) == [f"int8 {backend}" for backend in BACKENDS]
    for backend in BACKENDS:
        state = found[f"int8 {backend}"].state
        if backend not in offered_backends():
            assert state == "warn"
        else:
            assert state == ("warn" if wants_reduced_range(backend)[0] else "ok")
    assert torch.backends.quantized.engine == before


@pytest.mark.parametrize("backend", offered_backends())
def test_the_probe_computes(backend):
    error = _largest_error(backend)
    assert 0 < error <= 4  # the sums are no multiples of 8: nothing that was computed in float could be off


def test_an_engine_that_computes_nonsense_is_found(monkeypatch):
    backend = offered_backends()[0]
    monkeypatch.setattr(diagnosis, "_STEP", 0.5)  # sums beyond 64 saturate: wrong by more than half a step
    assert _largest_error(backend) > 1
    lack = _probed(backend)
    assert (lack.state, lack.remedy != "") == ("fail", True)
    assert "wrong by" in lack.detail


def test_an_engine_that_fails_is_found():
    lack = _probed("nonesuch")
    assert lack.state == "fail"
    assert "nonesuch" in lack.detail
    assert "\n" not in lack.detail
