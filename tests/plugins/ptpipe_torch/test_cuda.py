"""A CUDA device is found without torch, where torch will find it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ptpipe_torch.cuda import finds_cuda_device

BUILDS = {
    "cuda": "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
    "hip": "cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n",
    "cpu": "cuda: Optional[str] = None\nhip: Optional[str] = None\n",
}


@pytest.mark.parametrize(
    ("build", "file", "environment", "expected"),
    [
        ("cuda", "dev/nvidia0", {}, True),
        ("cuda", "dev/nvidiactl", {}, False),
        ("cuda", "dev/dxg", {}, True),
        ("cuda", "proc/driver/nvidia/gpus/0000:01:00.0", {}, True),
        ("cuda", "dev/kfd", {}, False),
        ("cuda", "dev/nvidia0", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("cuda", "dev/nvidia0", {"CUDA_VISIBLE_DEVICES": "-1,0"}, False),
        ("cuda", "dev/nvidia0", {"CUDA_VISIBLE_DEVICES": "0,1"}, True),
        ("cuda", "dev/nvidia0", {"HIP_VISIBLE_DEVICES": "-1"}, True),
        ("hip", "dev/kfd", {}, True),
        ("hip", "dev/kfd", {"HIP_VISIBLE_DEVICES": "-1"}, False),
        ("cpu", "dev/nvidia0", {}, False),
        (None, "dev/nvidia0", {}, False),
    ],
)
def test_build_driver_and_environment_decide(
    tmp_path: Path, build: str | None, file: str, environment: dict[str, str], expected: bool
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    if build:
        (tmp_path / "version.py").write_text(BUILDS[build])
    assert finds_cuda_device(environment=environment, root=tmp_path, torch_folder=tmp_path) is expected


def test_on_this_machine_it_agrees_with_torch() -> None:
    assert finds_cuda_device() is torch.cuda.is_available()


def test_it_does_not_import_torch() -> None:
    code = "import sys; from ptpipe_torch.cuda import finds_cuda_device as f; f(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
