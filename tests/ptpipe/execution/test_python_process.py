"""A process that imports what this one does, wherever it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ptpipe.launching import python_command

SHOW = """
import json, sys
if __name__ == "__main__":
    print(json.dumps([sys.argv[1:], sys.path, __spec__.name]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which has a module that Python needs in order to start another."""
    (tmp_path / "runpy.py").write_text("raise SystemExit('imported from the working directory')", encoding="utf-8")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "show.py").write_text(SHOW, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return modules


def test_it_has_the_path_of_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    command = python_command("show", "an argument", "-m")
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found == [["an argument", "-m"], sys.path, "show"]


def test_the_working_directory_is_on_it_where_this_process_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, and where Python runs without a script."""
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    monkeypatch.chdir(folder)
    found = json.loads(subprocess.run(python_command("show"), check=True, capture_output=True, text=True).stdout)
    assert found[1] == [*sys.path[:-1], str(folder)]
