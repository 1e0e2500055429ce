from __future__ import annotations

import gc
import os
import platform
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ptpipe_torch import runtime
from ptpipe_torch.runtime import cpu_random_states, freed_memory_kept, released_memory, seeded, torch_threads

from ...processes import is_running


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, ptpipe_torch.runtime; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_threads_are_set_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    with pytest.raises(ZeroDivisionError), torch_threads(1):
        _ = 1 / 0
    assert torch.get_num_threads() == before
    monkeypatch.setattr("ptpipe.host.num_threads", lambda: 3)
    with torch_threads(None):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


def test_random_numbers_are_seeded_and_the_outer_stream_is_restored() -> None:
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
from contextlib import ExitStack
from ptpipe_torch.runtime import freed_memory_kept, large_blocks_mapped

how, num_values = sys.argv[1:]

def allocate():
    return torch.ones(int(num_values))[0].item()

torch.set_num_threads(1)
with ExitStack() as stack:
    if "mapped" in how:
        stack.enter_context(large_blocks_mapped())
    if how == "mapped again":
        with freed_memory_kept():
            allocate()
    elif "kept" in how:
        stack.enter_context(freed_memory_kept())
    for _ in range(10):  # until the block has found its place: what torch allocates at first may take a part of it
        allocate()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        allocate()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="about the malloc of glibc 2.35 and later")
def test_kept_memory_costs_no_page_faults() -> None:
    def num_faults(how: str, num_values: int) -> int:
        command = [sys.executable, "-c", PAGE_FAULTS, how, str(num_values)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    # 20 blocks of 40 MB, which glibc never keeps of itself: 195312 pages of 4 KiB, or 381 huge ones of 2 MiB.
    assert num_faults("kept", 10_000_000) < 200
    assert num_faults("given back", 10_000_000) > 350
    # 20 blocks of 8 MB, which it keeps: 39063 pages, or 76 huge ones.
    assert num_faults("kept", 2_000_000) < 60
    assert num_faults("kept while mapped", 2_000_000) < 60
    assert num_faults("mapped", 2_000_000) > 75
    assert num_faults("mapped again", 2_000_000) > 75


def test_memory_is_given_back_afterwards() -> None:
    for _ in range(2):
        with freed_memory_kept():
            assert torch.ones(10_000_000).sum() == 10_000_000


class Cycle:
    """An object that only the garbage collector frees, as a traced network is."""

    def __init__(self, num_mb: int) -> None:
        self.itself, self.weights = self, torch.ones(num_mb << 18)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident set size from /proc")
@pytest.mark.parametrize(("num_mb", "want"), [(100, True), (1, False)])
def test_garbage_is_collected_where_the_process_has_grown(num_mb: int, want: bool) -> None:
    gc.disable()
    try:
        with released_memory():
            reference = weakref.ref(Cycle(num_mb))
        assert (reference() is None) is want
    finally:
        gc.enable()


def test_nothing_is_collected_where_the_size_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime, "_STATM", tmp_path / "none")
    gc.disable()
    try:
        with released_memory():
            reference = weakref.ref(Cycle(100))
        assert reference() is not None
    finally:
        gc.enable()
        gc.collect()


def test_a_child_ends_soon_after_its_killed_parent() -> None:
    child = "from ptpipe_torch.runtime import exit_with_parent; exit_with_parent(); print(flush=True); input()"
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline_s, os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(1), random.random, np.random.random], ids=["torch", "random", "numpy"]
)
def test_drawing_a_number_on_the_cpu_changes_the_random_states(draw: Callable[[], object]) -> None:
    before = cpu_random_states()
    assert cpu_random_states() == before
    draw()
    assert cpu_random_states() != before
