"""`ptpipe doctor` as a user calls it, with processes that really work together, or really can't."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ..conftest import environment
from ..forks import Fork, run_ptpipe

torch_distributed = pytest.importorskip("torch.distributed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch_distributed.is_gloo_available(), reason="this build of torch has no gloo"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"),
]
TEAM = "2 workers, gloo"


def start(temporary: Path) -> Fork:
    """Start the command, whose workers are real, from a process that has imported torch."""
    return Fork(run_ptpipe, "doctor", "--workers", "2", environment=environment(TMPDIR=str(temporary)))


@pytest.fixture
def temporary(tmp_path):
    """A folder for temporary files, empty again afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield folder
    # Importing torch's compiler makes it.
    assert [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")] == []


def workers_of(temporary):
    """Ids of the processes that were told to write below this test's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            words = path.read_bytes().decode().split("\0")
            if "ptpipe_elastic.collectives" in words and any(str(temporary) in word for word in words):
                found.append(int(path.parent.name))
    return sorted(found)


def wait_for_two(process, temporary):
    end = time.monotonic() + 60
    while len(found := workers_of(temporary)) < 2 or len(list(temporary.glob("*/logs/**/*.log"))) < 2:
        assert time.monotonic() < end, "no workers came"
        assert process.poll() is None, "it ended before"
        time.sleep(0.02)
    return found


def test_a_sound_machine(run_cli, temporary, tmp_path):
    ended = run_cli("doctor", "--workers", 2, "--json", TMPDIR=str(temporary))
    found = {check["subject"]: check for check in ended.json}
    failed = [check for check in ended.json if check["state"] == "fail"]
    assert (ended.code, failed) == (0, []), ended.err
    assert {"python", "torch", "torchvision", "int8 fbgemm", "onnx session", "comm", TEAM} <= set(found)
    assert "all-reduce" in found[TEAM]["detail"]
    assert "Traceback" not in ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"temporary"}


def test_a_comm_that_cannot_work(forked_cli, temporary):
    begin = time.monotonic()
    ended = forked_cli("doctor", "--workers", 2, TMPDIR=str(temporary), GLOO_DEVICE_TRANSPORT="nosuch")
    assert time.monotonic() - begin < 30
    assert ended.code == 1
    lines = ended.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"fail  {TEAM}"))
    assert "unsupported gloo device" in lines[at]
    assert "-> allow processes of this machine to connect over loopback" in lines[at + 1]
    assert lines[-1].endswith("1 failed")
    assert "Traceback" not in ended.out + ended.err
    assert workers_of(temporary) == []


def test_a_worker_that_is_killed(fork_server, temporary):
    with start(temporary) as process:
        os.kill(wait_for_two(process, temporary)[1], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    line = next(line for line in out.splitlines() if line.startswith(f"fail  {TEAM}"))
    assert "was killed by SIGKILL" in line
    assert "memory ran out" in out
    assert "Traceback" not in out + err
    assert workers_of(temporary) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_workers_too(fork_server, temporary, number, code):
    with start(temporary) as process:
        wait_for_two(process, temporary)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in out + err
    assert workers_of(temporary) == []
