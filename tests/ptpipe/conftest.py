"""Fixtures for the core: its commands, without waiting for an interpreter and its imports each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import CommandLine, environment
from .forked_commands import CommandFork


@pytest.fixture(scope="session")
def command_fork() -> Iterator[CommandFork]:
    """The process that has imported the core."""
    fork = CommandFork(environment())
    yield fork
    fork.end()


@pytest.fixture
def run_cli(tmp_path: Path, command_fork: CommandFork) -> CommandLine:
    """The command line, run in `tmp_path`; what runs to its end is forked, unless `real=True`."""
    return CommandLine(tmp_path, command_fork)
