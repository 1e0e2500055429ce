from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ptpipe import host
from ptpipe.check import CheckState
from ptpipe_torch.doctor import _device, run_checks


def found():
    return {check.subject: check for check in run_checks()}


def test_what_is_here():
    here = found()
    assert {"torch", "torchvision", "processor", "threads"} <= set(here)
    assert torch.__version__.startswith(here["torch"].detail)  # a CUDA build's metadata leave out "+cu130"
    assert here["threads"].detail.startswith(f"{host.num_threads()} of ")
    assert CheckState.FAIL not in {check.state for check in here.values()}


def test_features_are_those_that_the_kernel_names():
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or not (line := re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)):
        pytest.skip("/proc/cpuinfo has no flags of an x86 processor")
    names = {"avx512f": "avx512_f"}
    flags = {names.get(flag, flag) for flag in line[1].split()}
    detail = found()["processor"].detail
    for feature in ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16"):
        assert (re.search(rf"\b{feature}\b", detail) is not None) == (feature in flags)


def test_fewer_threads_are_noted(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if host.total_cpus() == 1:
        pytest.skip("this machine has one processor")
    threads = found()["threads"]
    assert (threads.state, threads.detail.startswith("1 of ")) == ("warn", True)


def test_without_cuda_none_is_reported():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    cuda = found()["cuda"]
    assert cuda.state in ("ok", "warn")
    broken = _device(0)  # a device that can't be used: none is there
    assert (broken.state, broken.subject) == ("fail", "cuda:0")
    assert "\n" not in broken.detail
    assert broken.remedy


@pytest.mark.gpu
def test_each_cuda_device_computes():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = found()["cuda:0"]
    assert device.state == "ok"
    assert torch.cuda.get_device_name(0) in device.detail


def test_a_torch_that_cannot_be_imported_is_one_line(tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text('raise OSError("libgomp.so.1: cannot open shared object file\\nmore")')
    code = "import ptpipe_torch\nfor check in ptpipe_torch.ptpipe_doctor(): print(check.state, check.detail)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "fail OSError: libgomp.so.1: cannot open shared object file"
    assert done.stderr == ""


def test_the_front_door_stays_light():
    code = "import ptpipe_torch, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
