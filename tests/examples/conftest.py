from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..forks import run_forked

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Stranger:
    """A user of ptpipe with a folder of their own, and perhaps the example distribution."""

    folder: Path
    site: Path | None = None

    def python(self, *arguments: str | Path, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Run Python in the folder."""
        path = [str(self.site)] if self.site else []
        inherited = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])])}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def ptpipe(self, *arguments: str | Path, code: int = 0) -> Any:
        """Run a command with --json; it must end with that exit code. Without the distribution, it is forked."""
        words = (*arguments, "--json")
        finished = self.python("-m", "ptpipe", *words) if self.site else run_forked(self.folder, *words)
        assert finished.returncode == code, finished.stderr
        return json.loads(finished.stdout)

    def passes_tests(self, folder: str) -> None:
        """Run the tests in a folder as their author does, warnings being errors."""
        options = ["-q", "-W", "error", "-p", "no:cacheprovider", "--basetemp", self.folder / "temporary"]
        finished = self.python("-m", "pytest", *options, "--rootdir", folder, folder)
        assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example distribution installed by pip, without any network."""
    pytest.importorskip("hatchling", reason="building the example without a network needs hatchling (the dev extra)")
    source = tmp_path_factory.mktemp("source") / "ptpipe-example"
    shutil.copytree(EXAMPLES / "ptpipe-example", source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return target


@pytest.fixture
def stranger(tmp_path: Path, fork_server: None) -> Callable[..., Stranger]:
    """A stranger with a copy of one example in an otherwise empty folder."""

    def make(example: str, site: Path | None = None) -> Stranger:
        shutil.copytree(EXAMPLES / example, tmp_path / example, ignore=shutil.ignore_patterns("__pycache__"))
        return Stranger(tmp_path, site)

    return make
