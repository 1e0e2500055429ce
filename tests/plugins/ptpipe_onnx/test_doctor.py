from __future__ import annotations

import onnxruntime
import pytest

from ptpipe_onnx import doctor, integer_products
from ptpipe_onnx.doctor import run_checks


def test_what_is_here():
    if not integer_products.are_right():
        pytest.skip("see test_integer_products")
    found = list(run_checks())
    assert [check.subject for check in found] == ["onnx", "onnxscript", doctor._runtime(), "onnx session"]
    assert {check.state for check in found} == {"ok"}
    assert found[2].detail == onnxruntime.__version__
    assert "CPU" in found[3].detail


def test_no_session_beside_a_version_that_does_not_fit(monkeypatch):
    monkeypatch.setattr("ptpipe.check._requirements", lambda: {"onnx": ">=100,<101"})
    found = list(run_checks())
    assert [check.state for check in found] == ["fail", "ok", "ok"]
    assert found[0].remedy == "pip install 'onnx>=100,<101'"


def test_a_session_that_fails_is_one_line(monkeypatch):
    monkeypatch.setattr(doctor, "_OPSET", 9999)  # which no release runs
    session = list(run_checks())[-1]
    assert (session.subject, session.state) == ("onnx session", "fail")
    assert session.detail
    assert "\n" not in session.detail


def test_wrong_products_of_integers_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr("ptpipe_onnx.integer_products.are_right", lambda: False)
    session = list(run_checks())[-1]
    assert (session.subject, session.state) == ("onnx session", "fail")
    assert session.detail.startswith(f"onnxruntime {onnxruntime.__version__} multiplies integers wrongly")
    assert session.remedy.endswith("onnxruntime>=1.25'")


def test_the_build_for_cuda_has_the_bounds_of_the_other(monkeypatch):
    monkeypatch.setattr("ptpipe.check._requirements", lambda: {"onnxruntime": ">=100"})
    monkeypatch.setattr(doctor, "_runtime", lambda: "onnxruntime-gpu")
    assert next(found.remedy for found in run_checks() if found.subject == "onnxruntime-gpu") == (
        "pip install 'onnxruntime-gpu>=100'"
    )
