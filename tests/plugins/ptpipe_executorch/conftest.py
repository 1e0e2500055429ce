"""Digits and the usual networks: those of the tests of ONNX files."""

from __future__ import annotations

from ..ptpipe_onnx.conftest import digits, dynamic_model, events, float_model, int8_model

__all__ = ["digits", "dynamic_model", "events", "float_model", "int8_model"]
