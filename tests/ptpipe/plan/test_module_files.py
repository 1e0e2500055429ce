"""Which modules a process has imported."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from ptpipe.plan.module_files import ImportLog


def test_another_name_of_a_module_is_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the main module of `python -m`, which multiprocessing also calls `__mp_main__`."""
    (tmp_path / "imported_once.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    log = ImportLog()
    monkeypatch.setitem(sys.modules, "__mp_main__", import_module("imported_once"))
    found = log.update()
    del sys.modules["imported_once"]
    assert found["imported_once"].is_new
    assert "__mp_main__" not in found
