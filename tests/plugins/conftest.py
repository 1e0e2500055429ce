"""Fixtures of several plugins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_PTPIPE_DATA = os.environ.get("PTPIPE_DATA")


@pytest.fixture(autouse=True)
def no_data_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is found in $PTPIPE_DATA, unless a test asks for it."""
    monkeypatch.delenv("PTPIPE_DATA", raising=False)


@pytest.fixture
def real_data(no_data_of_this_machine: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$PTPIPE_DATA as it was before the fixture above removed it."""
    if not _PTPIPE_DATA or not (Path(_PTPIPE_DATA) / "mnist").is_dir():
        pytest.skip("PTPIPE_DATA has no mnist")
    root = Path(_PTPIPE_DATA).resolve()
    monkeypatch.setenv("PTPIPE_DATA", str(root))
    return root


@pytest.fixture
def forked_workers(fork_server: None) -> Iterator[None]:
    """Fork the workers of the test's stages: see `forked_workers.py`."""
    from .forked_workers import forked_workers  # imports torch, which the core's tests run without

    with forked_workers():
        yield
