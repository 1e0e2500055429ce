from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ptpipe_elastic.doctor import _ending, _remedy, check_collectives, checks
from ptpipe_elastic.torch_elastic import WorkerFailure

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")


def ended(exit_code=1, message="", last_lines=()):
    return WorkerFailure(1, exit_code, message, is_stage_error=False, is_consequence=False, last_lines=last_lines)


def children():
    """Processes of this one that are still there."""
    if not Path("/proc").is_dir():
        pytest.skip("processes are looked up in /proc")
    paths = Path("/proc").glob("[0-9]*/stat")
    parents = {path.parent.name: path.read_text().rpartition(")")[2].split()[1] for path in paths if path.exists()}
    return [child for child, parent in parents.items() if parent == str(os.getpid())]


def test_without_workers_nothing_is_started(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert [check.subject for check in checks(0)] == ["comm"]


@pytest.mark.slow
def test_two_workers_work_together_and_times_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, others = signal.getsignal(signal.SIGALRM), children()
    found = check_collectives("gloo", 2)
    assert (found.state, found.subject) == ("ok", "2 workers, gloo"), found
    times_ms = dict(re.findall(r"([\w-]+) ([\d.]+) ms", found.detail))
    assert set(times_ms) == {"all-reduce", "broadcast", "barrier"}
    assert all(0 < float(ms) < 20_000 for ms in times_ms.values())
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGALRM) == before
    assert children() == others


@pytest.mark.slow
def test_workers_that_do_not_come_in_time_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    timer, others = signal.getitimer(signal.ITIMER_REAL)[0], children()
    found = check_collectives("gloo", 2, timeout_s=0.2)  # importing torch takes longer
    assert found.state == "fail"
    assert re.search(r"not done within 0\.6 s|hung|ended with exit code 1", found.detail)
    assert found.remedy
    assert list(tmp_path.iterdir()) == []
    assert children() == others
    assert abs(signal.getitimer(signal.ITIMER_REAL)[0] - timer) < 30  # pytest-timeout's goes on


@pytest.mark.slow
def test_a_process_that_waits_in_vain_ends_by_itself(tmp_path):
    """As one whose partner never comes."""
    with_nobody = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment = {**os.environ, **with_nobody, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ptpipe_elastic.collectives", "gloo", "3", str(tmp_path / "times.json"), "barrier:4:5"],
        env=environment, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert time.monotonic() - start < 40
    assert not (tmp_path / "times.json").exists()


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (ended(-9), "worker 1 was killed by SIGKILL"),
        (ended(-6, last_lines=("terminate called", " bad_alloc ", "")), "killed by SIGABRT; its last line: bad_alloc"),
        (ended(1, "RuntimeError: no"), "worker 1 ended with exit code 1; its last line: RuntimeError: no"),
        (ended(1, "<NONE>", ("Timeout (0:00:40)!", 'File "x"')), "worker 1 hung: it was not done after 40 s"),
    ],
)
def test_endings_are_told_in_a_line(failure, words):
    assert words in _ending(failure, timeout_s=20)


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("ifa != nullptr. Unable to find address for: x", "ip link set lo up"),
        ("worker 0 was killed by SIGKILL", "memory"),
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
        ("gai error: -2 - Name or service not known", "/etc/hosts"),
        ("No space left on device", "/dev/shm"),
        ("Timed out waiting 20000ms for recv operation", "loopback"),
    ],
)
def test_each_failure_has_its_remedy(ending, words):
    assert words in _remedy("gloo", ending)


def test_the_remedy_names_the_interfaces_that_are_there():
    assert "lo" in re.split(r"[:,;] ?|\)", _remedy("gloo", "Unable to find address for: lo").partition("machine: ")[2])
    assert "/dev/shm" in _remedy("nccl", "unhandled system error")


def test_the_front_door_stays_light():
    code = "import ptpipe_elastic, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
