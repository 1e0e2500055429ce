"""The command, called in this process, over a manifest without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ptpipe_sweep.command import sweep

STAGES = """
one: {uses: toy.make, with: {value: 3}}
other: {uses: toy.make, with: {value: 1}}
sum: {uses: toy.add, needs: {a: one, b: other}}
gate: {uses: toy.gate, needs: {a: sum}, with: {least: 2}}
"""


@dataclass(frozen=True)
class Swept:
    """How a call of the command ended."""

    code: int | None
    out: str
    err: str
    error: BaseException | None

    @property
    def json(self) -> Any:
        assert self.error is None, self.error
        return json.loads(self.out)


@pytest.fixture
def swept(project) -> Callable[..., Swept]:
    """Call `ptpipe sweep` on the project's manifest."""
    if not project.manifest.exists():
        project.write(STAGES)

    def call(*arguments: object) -> Swept:
        words = [str(project.manifest), "--artifacts", str(project.artifacts), *map(str, arguments)]
        ended = CliRunner().invoke(sweep, words, standalone_mode=False)
        error = ended.exception
        if isinstance(error, click.ClickException):
            return Swept(2, ended.stdout, error.format_message(), error)
        return Swept(ended.return_value, ended.stdout, ended.stderr, error)

    return call


@pytest.fixture
def record(project) -> Callable[[], dict[str, Any]]:
    """Read the newest sweep's record."""

    def read() -> dict[str, Any]:
        folders: list[Path] = sorted((project.artifacts / "sweeps").iterdir(), key=lambda path: path.name[-5:])
        found: dict[str, Any] = json.loads((folders[-1] / "sweep.json").read_text(encoding="utf-8"))
        return found

    return read
