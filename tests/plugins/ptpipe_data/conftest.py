from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ptpipe import Context
from ptpipe.events import Event, Notice

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    """Encode an array as IDX, independently of the reader."""
    header = bytes([0, 0, kind, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is fetched through a proxy, or written outside the test's folder, unless a test asks for it."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class RecordedEvents(list[Event]):
    """All events of a stage."""

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self if isinstance(event, Notice)]


@pytest.fixture
def events() -> RecordedEvents:
    return RecordedEvents()


@pytest.fixture
def ctx(tmp_path: Path, events: RecordedEvents) -> Context:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return Context("data", "data.test", seed=7, scratch=scratch, _tell=events.append)


@pytest.fixture
def write_idx_set() -> Callable[..., dict[str, bytes]]:
    """Write a tiny data set of four IDX files into a folder; return the unpacked content of each."""

    def write(
        folder: Path,
        *,
        num_train: int = 60,
        num_test: int = 20,
        side: int = 6,
        packed: bool = True,
        num_classes: int = 10,
    ) -> dict[str, bytes]:
        rng = np.random.default_rng(3)
        folder.mkdir(parents=True, exist_ok=True)
        contents = {}
        for prefix, num in (("train", num_train), ("t10k", num_test)):
            images = rng.integers(0, 256, (num, side, side), dtype=np.uint8)
            contents[f"{prefix}-images-idx3-ubyte"] = idx_bytes(images)
            contents[f"{prefix}-labels-idx1-ubyte"] = idx_bytes(np.arange(num) % num_classes)
        for name, content in contents.items():
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
            else:
                (folder / name).write_bytes(content)
        return contents

    return write
