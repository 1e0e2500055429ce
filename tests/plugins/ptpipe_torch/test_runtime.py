from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ptpipe_torch import runtime
from ptpipe_torch.runtime import freed_memory_kept, num_cpus, seeded, torch_threads


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, ptpipe_torch.runtime; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of eight processors; the path of the file that limits it."""
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(runtime, "_CGROUP_CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path / "cpu.max"


@pytest.mark.parametrize(
    ("limit", "want"),
    [(None, 8), ("max 100000\n", 8), ("400000 100000\n", 4), ("150000 100000", 1), ("50000 100000", 1), ("?", 8)],
)
def test_a_containers_limit_counts(eight_cpus: Path, limit: str | None, want: int) -> None:
    if limit is not None:
        eight_cpus.write_text(limit, encoding="ascii")
    assert num_cpus() == want


@pytest.mark.parametrize(("value", "want"), [("3", 3), ("3,2", 3), ("64", 8), ("0", 8), ("", 8), ("many", 8)])
def test_the_users_own_limit_counts(eight_cpus: Path, monkeypatch: pytest.MonkeyPatch, value: str, want: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert num_cpus() == want


def test_threads_are_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    with pytest.raises(ZeroDivisionError), torch_threads(1):
        _ = 1 / 0
    assert torch.get_num_threads() == before
    monkeypatch.setattr(runtime, "num_cpus", lambda: 3)
    with torch_threads(None):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


def test_random_numbers_are_seeded_and_the_stream_outside_goes_on() -> None:
    torch.manual_seed(1)
    want = torch.rand(4)
    torch.manual_seed(1)
    first = torch.rand(2)
    with seeded(9):
        inside = torch.rand(3)
    assert torch.equal(torch.cat([first, torch.rand(2)]), want)
    with seeded(9, torch.device("cpu")):
        assert torch.equal(torch.rand(3), inside)


PAGE_FAULTS = """
import resource, sys, torch
from contextlib import nullcontext
from ptpipe_torch.runtime import freed_memory_kept

def allocate():
    return torch.ones(10_000_000)[0].item()  # 40 MB: more than glibc ever keeps of itself

torch.set_num_threads(1)
with freed_memory_kept() if sys.argv[1] == "kept" else nullcontext():
    for _ in range(10):  # until the block has found its place: what torch allocates at first may take a part of it
        allocate()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        allocate()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="about the malloc of glibc 2.35 and later")
def test_kept_memory_costs_no_page_faults() -> None:
    def num_faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", PAGE_FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    # 800 MB are 195312 pages of 4 KiB, or 381 of 2 MiB where the system gives huge ones.
    assert num_faults("kept") < 200
    assert num_faults("given back") > 350


def test_memory_is_given_back_afterwards() -> None:
    for _ in range(2):
        with freed_memory_kept():
            assert torch.ones(10_000_000).sum() == 10_000_000
