"""Memory that the workers of a machine share, with real processes."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ptpipe_elastic.torch_elastic import run_workers
from ptpipe_torch.distributed import shared_memory
from ptpipe_torch.distributed.shared_memory import share_memory
from ptpipe_torch.distributed.worker_group import SINGLE_WORKER, WorkerGroup

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or not dist.is_gloo_available(),
    reason="shared memory is for Linux on x86",
)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)  # of forked processes; the others see the variable
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(task: str, num_workers: int = 2) -> list[Any]:
        folder = tmp_path / "results"
        folder.mkdir()
        run_workers("shared_memory_work", [str(folder), task], num_workers, tmp_path / "logs")
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.iterdir())]

    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.usefixtures("forked_workers")
def test_results_are_those_of_the_process_group(results: Any, num_workers: int) -> None:
    assert results("reduces", num_workers) == [0] * num_workers


@pytest.mark.usefixtures("forked_workers")
def test_every_worker_has_the_same_bits(results: Any) -> None:
    assert results("fractions", 3) == [True] * 3


@pytest.mark.usefixtures("forked_workers")
def test_what_does_not_fit_is_refused(results: Any) -> None:
    assert results("fits_exactly") == ["refused", "refused"]


def test_a_dead_worker_is_not_waited_for(results: Any) -> None:
    ((message, waited_s),) = results("dies")
    assert message == "the connection to worker 1 was lost"
    assert waited_s < 2


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_left_the_stage_is_not_waited_for_while_its_process_lives(results: Any) -> None:
    (kind, message), other = results("fails")
    assert (kind, message) == ("WorkerGroupError", "worker 1 has gone")
    assert other == ["ValueError", "broken"]


@pytest.mark.usefixtures("forked_workers")
def test_a_hanging_worker_is_named(results: Any) -> None:
    (kind, message), _ = results("hangs")
    assert kind == "WorkerGroupError"
    assert "did not answer for 1.5 s" in message


def test_alone_and_in_crowds_there_is_none() -> None:
    assert share_memory(SINGLE_WORKER, 10) is None
    assert share_memory(WorkerGroup(0, 9), 10) is None


def test_another_file_is_not_taken_for_ours() -> None:
    token = bytes(range(16))
    descriptor = shared_memory._make_file(4096, token)
    assert descriptor is not None
    with tempfile.TemporaryFile() as other:
        other.write(bytes(4096))
        other.flush()
        pid = os.getpid()
        try:
            ours = shared_memory._open_file(pid, descriptor, 4096, token)
            assert ours is not None
            os.close(ours)
            assert shared_memory._open_file(pid, descriptor, 8192, token) is None
            assert shared_memory._open_file(pid, descriptor, 4096, token[::-1]) is None
            assert shared_memory._open_file(pid, other.fileno(), 4096, token) is None
            assert shared_memory._open_file(pid, 99_999, 4096, token) is None
        finally:
            os.close(descriptor)
