"""Python processes that import what this one does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_RUN_MODULE = """
import os, sys
from runpy import run_module
sys.path[:] = sys.argv[1].split(os.pathsep)
del sys.argv[:2]
run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process whose `sys.path` is this one's.

    `module`: its dotted name; it runs as `__main__`. `arguments`: what follows its file in `sys.argv`. `python -m`
    alone would import from the working directory before anything else: a user's `random.py`, or a stranger's.
    """
    path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
    return [sys.executable, "-P", "-c", _RUN_MODULE, path, module, *arguments]
