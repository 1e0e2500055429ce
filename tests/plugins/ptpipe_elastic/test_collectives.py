"""An all-reduce among real processes, timed."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ptpipe import StageError
from ptpipe_elastic.collectives import time_all_reduce

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo"),
]


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files, empty again afterwards."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def test_two_workers_take_longer_for_more():
    small, large = time_all_reduce(2, [1 << 10, 1 << 24])
    assert 0 < small < 1
    # 16 MiB take 16,000 times the bytes: on the busiest machine not less than a few KiB.
    assert 2 * small < large < 30


def test_workers_that_cannot_meet(monkeypatch):
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "nosuch")
    with pytest.raises(StageError, match=r"timing an all-reduce failed .*gloo.*`ptpipe doctor --workers 2`"):
        time_all_reduce(2, [1024])
