"""A run that needs a library which is not installed ends before any work, with what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ptpipe import ExitCode

from ..conftest import environment
from ..forks import Fork, run_ptpipe

STAGES = """\
version: 1
name: small
seed: 7
stages:
  data:   {{uses: data.digits}}
  net:    {{uses: model.small_cnn}}
  float:  {{uses: train.supervised, needs: {{model: net}}, with: {{epochs: 1}}}}
  onnx:   {{uses: export.onnx, needs: {{model: float}}}}
  last:   {{uses: {kind}, needs: {{model: {model}}}}}
"""
MAIN = "\nfrom ptpipe.cli import main; main()"
WITHOUT = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] == {library!r} else find(name, *rest)
"""
OLDER = "import onnxruntime; onnxruntime.__version__ = '1.23.2'"
CASES = [
    (
        "export.openvino",
        "onnx",
        WITHOUT.format(library="openvino"),
        "OpenVINO is not installed: pip install 'ptpipe[openvino]'",
    ),
    (
        "export.executorch",
        "float",
        WITHOUT.format(library="executorch"),
        "ExecuTorch is not installed: pip install 'ptpipe[executorch]'",
    ),
    (
        "quant.weight_only",
        "onnx",
        OLDER,
        "onnxruntime 1.23.2 can't quantize weights to a given number of bits: pip install 'onnxruntime>=1.24'",
    ),
]


def run_after(start: str) -> None:
    """Be the command line, after these statements."""
    exec(start, {})
    run_ptpipe("run", "m.yaml")


def in_own_interpreter(folder: Path, start: str) -> tuple[int | None, str, str]:
    """Run it where nothing has been imported yet."""
    command = [sys.executable, "-c", start + MAIN, "run", "m.yaml"]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    ended = subprocess.run(command, cwd=folder, env=environment(), **options)
    return ended.returncode, ended.stdout, ended.stderr


def forked(folder: Path, start: str) -> tuple[int | None, str, str]:
    with Fork(run_after, start, environment=environment(), folder=folder) as process:
        out, err = process.communicate(120)
    return process.returncode, out, err


@pytest.mark.parametrize(("kind", "model", "start", "message"), CASES, ids=[kind for kind, *_ in CASES])
def test_nothing_is_trained_or_written(
    kind: str, model: str, start: str, message: str, tmp_path: Path, fork_server: None
) -> None:
    manifest = tmp_path / "m.yaml"
    manifest.write_text(STAGES.format(kind=kind, model=model), encoding="utf-8")
    run = in_own_interpreter if kind == "export.openvino" else forked
    assert run(tmp_path, start) == (ExitCode.USAGE, "", f"m.yaml:9:11: last: {message}\n")
    assert list(tmp_path.iterdir()) == [manifest]
