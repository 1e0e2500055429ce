"""The words in which stages of several workers talk to each other."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import Context, StageError
from ptpipe_elastic.torch_elastic import run_workers
from ptpipe_torch.distributed.worker_group import (
    SINGLE_WORKER,
    WorkerGroup,
    WorkerGroupError,
    choose_comm,
    init_worker_group,
    is_comm_failure,
    ranks_from_slurm,
)

FLOATS = st.lists(st.floats(allow_nan=False), max_size=5)


@given(FLOATS)
def test_alone_every_operation_is_the_identity(values: list[float]) -> None:
    assert WorkerGroup(0, 1) == SINGLE_WORKER
    assert SINGLE_WORKER.all_reduce(values) == values
    assert SINGLE_WORKER.all_reduce(values) is not values
    assert SINGLE_WORKER.all_gather(values) == [values]
    assert SINGLE_WORKER.all_equal(b"anything")
    assert list(range(9))[SINGLE_WORKER.rank_slice(9)] == list(range(9))


@given(st.integers(0, 100), st.integers(1, 9))
def test_every_thing_belongs_to_one_rank(num: int, size: int) -> None:
    things = list(range(num))
    slices = [things[WorkerGroup(rank, size).rank_slice(num)] for rank in range(size)]
    assert sorted(thing for rank_slice in slices for thing in rank_slice) == things
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
}


@pytest.mark.parametrize(
    ("nodes", "address"),
    [
        ("node[003-005,9]", "node003"),
        ("node[9,003-005]", "node9"),
        ("n1,n2", "n1"),
        ("a-b7", "a-b7"),
        ("a-b7,c[1-3]", "a-b7"),
        ("gpu-a100-[12-15]", "gpu-a100-12"),
        ("host.domain.org", "host.domain.org"),
        ("", "localhost"),
    ],
)
def test_node_0_is_the_first_of_slurms_list(nodes: str, address: str) -> None:
    found = ranks_from_slurm({**SLURM, "SLURM_STEP_NODELIST": nodes})
    del found["MASTER_PORT"]
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
    }


def test_without_slurm_or_beside_torchrun_nothing_is_added() -> None:
    assert ranks_from_slurm({}) == {}
    assert ranks_from_slurm({"PATH": "/bin", "SLURM_JOB_ID": "1"}) == {}  # a batch script is no step
    assert ranks_from_slurm({**SLURM, "SLURM_STEP_NODELIST": "n1", "RANK": "0"}) == {}


def test_what_the_user_set_stays() -> None:
    found = ranks_from_slurm({**SLURM, "SLURM_STEP_NODELIST": "n[1-2]", "MASTER_ADDR": "n9", "MASTER_PORT": "1"})
    assert set(found) == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


@pytest.mark.parametrize(("tasks", "num"), [("2(x3)", "2"), ("4,2", "4"), ("1", "1"), ("", "1")])
def test_how_many_share_a_machine(tasks: str, num: str) -> None:
    assert ranks_from_slurm({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks})["LOCAL_WORLD_SIZE"] == num


@given(st.integers(0, 2**31))
def test_the_port_is_one_that_programs_may_take(job: int) -> None:
    assert 15_000 <= slurm_port(str(job)) < 30_000


def slurm_port(job: str, **task: str) -> int:
    return int(ranks_from_slurm({**SLURM, "SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": job, **task})["MASTER_PORT"])


def test_each_step_of_each_job_has_a_port_of_its_own_and_all_tasks_the_same() -> None:
    ports = {slurm_port(str(job), SLURM_STEP_ID=str(step)) for job in range(100, 105) for step in range(5)}
    assert len(ports) == 25
    assert slurm_port("100", SLURM_PROCID="0") == slurm_port("100", SLURM_PROCID="7")


@pytest.mark.parametrize(
    ("comm", "has_own_device", "has_nccl", "chosen"),
    [
        ("gloo", True, True, "gloo"),
        ("nccl", True, True, "nccl"),
        ("auto", True, True, "nccl"),
        ("auto", True, False, "gloo"),
        ("auto", False, True, "gloo"),
    ],
)
def test_nccl_where_each_process_has_a_device(comm, has_own_device, has_nccl, chosen, monkeypatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    assert choose_comm(comm, has_own_device) == chosen


def test_nccl_is_refused_where_processes_share_a_device() -> None:
    with pytest.raises(StageError, match=r"^comm nccl needs a CUDA device for each worker of a machine; use fewer"):
        choose_comm("nccl", has_own_device=False)


# The first words of what torch's gloo and stores say where a process was killed or stopped.
@pytest.mark.parametrize(
    ("error", "is_failure"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:12"), True),
        (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv"), True),
        (RuntimeError("Socket Timeout"), True),
        (RuntimeError("Broken pipe"), True),
        (dist.DistBackendError("anything"), True),
        (dist.DistNetworkError("anything"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_failures_for_want_of_another(error: RuntimeError, is_failure: bool) -> None:
    assert is_comm_failure(error) is is_failure


def test_team_errors_are_the_users_to_read() -> None:
    assert issubclass(WorkerGroupError, StageError)


@pytest.mark.parametrize("world_size", [None, "1", "3"])
def test_a_process_that_is_not_one_of_several(world_size: str | None, tmp_path: Path, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    before = dict(os.environ)
    ctx = Context("t", "train.supervised", 1, tmp_path, rank=0, num_workers=2)
    words = "train.supervised needs 2 workers; this process was not launched as one of them"
    with pytest.raises(StageError, match=re.escape(words)), init_worker_group(ctx):
        pytest.fail("no other worker")
    assert dict(os.environ) == before
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"SLURM_STEP_ID": "0"},
            "SLURM_STEP_ID is set without SLURM_JOB_ID, SLURM_LOCALID, SLURM_NTASKS, SLURM_PROCID",
        ),
        ({"WORLD_SIZE": "two"}, "this process was not launched as one of them"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT must be a host and its port, not '' and ''"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "not 'localhost' and 'x'"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"}, "not 'localhost' and '99999'"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a" * 99, "MASTER_PORT": "1"}, "can't be reached"),
    ],
)
def test_malformed_variables_are_named(variables: dict[str, str], words: str, tmp_path: Path, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restored at the end
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ctx = Context("t", "train.supervised", 1, tmp_path, rank=0, num_workers=2)
    with pytest.raises(StageError, match=re.escape(words)), init_worker_group(ctx):
        pytest.fail("no other worker")


def test_a_stage_of_one_worker_needs_no_process_group(tmp_path: Path) -> None:
    with init_worker_group(Context("t", "train.supervised", 1, tmp_path)) as workers:
        assert workers == SINGLE_WORKER
        assert not dist.is_initialized()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
@pytest.mark.usefixtures("forked_workers")
def test_two_processes_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    folder = tmp_path / "results"
    folder.mkdir()
    run_workers("worker_group_work", [str(folder)], 2, tmp_path / "logs")
    results = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    for rank in range(2):
        assert results[rank]["one"] == results[rank]["two"]
        words = results[rank]["one"]
        assert words["rank and size"] == [rank, 2]
        # In float64: in float32 the first would be off, and the second lose the 1.
        assert words["sum"] == [0.1 * 1 + 0.1 * 2, 2.0**54, 1.0]
        assert words["gather"] == [[0.0, 0.1], [1.0, 0.1]]
        assert words["agrees on equal"] is True
        assert words["agrees on unequal"] is False
        assert words["slice"] == ([0, 2, 4, 6], [1, 3, 5])[rank]
