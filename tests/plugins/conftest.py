"""Fixtures of several plugins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Fork the workers of the module's stages: see `forked_workers.py`."""
    from .forked_workers import forked_workers  # imports torch, which the core's tests run without

    with forked_workers():
        yield
