"""ONNX Runtime is imported without its telemetry, and the caller's environment stays as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPT_OUT = "ORT_DISABLE_TELEMETRY"


def files_left(folder: Path, code: str, **environment: str) -> list[str]:
    """Execute code in a process whose temporary folder this is; return what lies there afterwards."""
    without = {name: value for name, value in os.environ.items() if name not in {OPT_OUT, "CI", "GITHUB_ACTIONS"}}
    subprocess.run(
        [sys.executable, "-c", code], env={**without, "TMPDIR": str(folder), **environment}, timeout=60, check=True
    )
    return [path.name for path in folder.iterdir()]


def test_nothing_is_written_into_the_temporary_folder(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "ours", "as told")]
    for folder in folders:
        folder.mkdir()
    plain, ours, as_told = folders
    if not files_left(plain, "import onnxruntime"):
        pytest.skip("this ONNX Runtime writes nothing by itself")
    check = f"import os; from ptpipe_torch.ort import ort; ort.SessionOptions(); assert {OPT_OUT!r} not in os.environ"
    assert files_left(ours, check) == []
    told = f"import os; from ptpipe_torch.ort import ort; assert os.environ[{OPT_OUT!r}] == '0'"
    assert files_left(as_told, told, **{OPT_OUT: "0"}), "a user's choice counts"
