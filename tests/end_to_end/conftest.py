"""The command line, forked from a process that has imported torch: see `tests/forks.py`.

How a real one starts, and measures latencies, is tested in `test_smoke.py`, `test_readme.py` and
`test_working_directory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ..conftest import Ended, environment
from ..forks import run_forked


@dataclass(frozen=True)
class ForkedCommandLine:
    """`cli("run", "m.yaml")`: what is left of a process that has ended."""

    folder: Path

    def __call__(self, *arguments: object, timeout_s: float = 240, **changes: str) -> Ended:
        """Run to the end."""
        words = map(str, arguments)
        finished = run_forked(self.folder, *words, timeout_s=timeout_s, environment=environment(**changes))
        return Ended(finished.returncode, finished.stdout, finished.stderr)


@pytest.fixture
def forked_cli(tmp_path: Path, fork_server: None) -> ForkedCommandLine:
    """The command line, run in `tmp_path`."""
    return ForkedCommandLine(tmp_path)
