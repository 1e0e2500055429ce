"""What tests that fork their commands rely on: see `forks.py`."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from .conftest import environment
from .forks import Fork, run_forked
from .processes import is_running

pytestmark = [pytest.mark.plugins, pytest.mark.usefixtures("fork_server")]

WARN = "import warnings; warnings.warn('old', DeprecationWarning); print(warnings.filters)"


def draw() -> None:
    print(random.random(), np.random.random())


def execute(program: str) -> None:
    exec(program, {"__name__": "elsewhere", "__file__": "elsewhere.py"})


def output(function: object, *arguments: str, **variables: str) -> tuple[str, str]:
    with Fork(function, *arguments, environment=environment(**variables)) as fork:  # type: ignore[arg-type]
        return fork.communicate(60)


def test_each_draws_other_random_numbers() -> None:
    numbers = [output(draw)[0].split() for _ in range(2)]
    assert all(one != other for one, other in zip(*numbers, strict=True)), numbers


@pytest.mark.parametrize("value", ["", "default", "ignore", "ignore,default::DeprecationWarning", "error"])
def test_warnings_are_shown_as_the_variable_wants(value: str) -> None:
    """As by an interpreter of its own, but for filters of the libraries that are imported."""
    code = f"exec({WARN!r}, {{'__name__': 'elsewhere'}})"
    real = subprocess.run([sys.executable, "-c", code], env=environment(PYTHONWARNINGS=value), capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    out, err = output(execute, WARN, PYTHONWARNINGS=value)
    assert ("DeprecationWarning: old" in err) == ("DeprecationWarning: old" in real.stderr)
    assert out.rstrip()[1:].endswith(real.stdout.rstrip()[1:])


def sleep(file: str) -> None:
    Path(file).write_text(json.dumps(os.getpid()), encoding="utf-8")
    time.sleep(600)


def test_one_that_takes_too_long_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with pytest.raises(subprocess.TimeoutExpired), Fork(sleep, str(tmp_path / "pid")) as fork:
            while not (tmp_path / "pid").exists():
                time.sleep(0.01)
            fork.communicate(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            run_forked(tmp_path, "doctor", timeout_s=0.01)
        assert not is_running(fork.pid) and fork.returncode == -9
        del fork
        gc.collect()
    assert [str(warning.message) for warning in shown] == []
