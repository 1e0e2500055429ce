"""Which modules a process has imported."""

from __future__ import annotations

import sys
from importlib import import_module, reload
from pathlib import Path

import pytest

from ptpipe.plan.module_files import ImportLog, is_installed


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


def test_what_is_imported_again_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "imported_again.py"
    file.write_text("a = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    log, digests = ImportLog(), []
    module = import_module("imported_again")
    digests.append(log.update()["imported_again"].sha256)
    file.write_text("a = 22")
    assert log.update()["imported_again"].sha256 == digests[0]  # of what was imported
    reload(module)
    digests.append(log.update()["imported_again"].sha256)
    file.write_text("a = 333")
    del sys.modules["imported_again"]
    assert "imported_again" not in log.update()
    import_module("imported_again")
    digests.append(log.update()["imported_again"].sha256)
    del sys.modules["imported_again"]
    assert len(set(digests)) == 3


def test_what_installers_recorded_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip install --target .` leaves it: packages beside the user's own modules."""
    monkeypatch.syspath_prepend(str(tmp_path))
    information = tmp_path / "acme_libs-1.0.dist-info"
    information.mkdir()
    recorded = ["acme_lib/__init__.py,sha256=x,3", "acme_one.py,,", "bin/tool,,", "../../lib/acme_out.py,,"]
    (information / "RECORD").write_text("\n".join([*recorded, "acme_libs-1.0.dist-info/RECORD,,"]))
    files = ["acme_lib/deep.py", "acme_one.py", "acme_one_more.py", "acme_out.py", "bin/tool.py", "own.py"]
    found = [is_installed(str(tmp_path / file)) for file in files]
    assert found == [True, True, False, False, False, False]
    assert not is_installed(str(tmp_path.parent / "acme_one.py"))
