"""Fixtures of several plugins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def forked_workers(fork_server: None) -> Iterator[None]:
    """Fork the workers of the test's stages: see `forked_workers.py`."""
    from .forked_workers import forked_workers  # imports torch, which the core's tests run without

    with forked_workers():
        yield
