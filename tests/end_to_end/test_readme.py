"""Every block of README.md's five minutes is run, in order, as a newcomer would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BUDGET, SHORT = "budget_s: 10", "budget_s: 1, batch_sizes: [1], threads: [one]"
"""The figures of latency are no part of the tour."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """Language and text of each block below the first heading of the tour."""
    tour = README.read_text(encoding="utf-8").partition("## Five minutes")[2].partition("## What is included")[0]
    return [(match[1], match[2]) for match in BLOCK.finditer(tour)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tour(tmp_path):
    command = tmp_path / "bin" / "ptpipe"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ptpipe "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    languages = []
    for language, text in blocks():
        languages.append(language)
        if language == "yaml":
            assert text.count(BUDGET) == 1
            (tmp_path / "first.yaml").write_text(text.replace(BUDGET, SHORT))
        elif language == "sh":
            finished = run(["bash", "-e", "-c", text], tmp_path, environment)
            assert finished.returncode == 0, finished.stdout
        elif language == "python":
            finished = run([sys.executable, "-c", text], tmp_path, environment)
            assert finished.returncode == 0, finished.stdout
        elif language == "console":
            for line, expected in transcript(text):
                assert run(["bash", "-c", line], tmp_path, environment).stdout == expected, line
    assert languages == ["yaml", "console", "sh", "sh", "sh", "python"]


def run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def transcript(text: str) -> list[tuple[str, str]]:
    """Each `$ command` of a console block with what is printed below it."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))
