from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from ptpipe import StageError
from ptpipe_torch import runtime
from ptpipe_torch.runtime import freed_memory_kept, quantized_engine, seeded, torch_threads


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, ptpipe_torch.runtime; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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


def test_an_engine_is_set_and_put_back() -> None:
    before = torch.backends.quantized.engine
    offered = next(e for e in torch.backends.quantized.supported_engines if e not in ("none", before))
    with quantized_engine(offered):
        assert torch.backends.quantized.engine == offered
    with quantized_engine(None):
        assert torch.backends.quantized.engine == before
    assert torch.backends.quantized.engine == before
    with pytest.raises(StageError, match="backend tpu is not offered here"), quantized_engine("tpu"):
        pass
