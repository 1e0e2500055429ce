"""A run that is killed and run again ends as one that was not."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MANIFEST = """\
version: 1
name: resumed
seed: 3
stages:
  data:     {uses: data.digits}
  net:      {uses: model.small_cnn}
  pretrain: {uses: train.supervised, with: {epochs: 4, lr: 0.05, checkpoint_every_s: 0.1}}
  qat_net:  {uses: quant.prepare_qat, needs: {model: pretrain}, with: {backend: fbgemm}}
  finetune: {uses: train.supervised, needs: {model: qat_net}, with: {epochs: 2, lr: 0.005, checkpoint_every_s: 0.1}}
  int8:     {uses: quant.convert, needs: {model: finetune}}
"""


def start(manifest: Path, artifacts: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ptpipe", "run", str(manifest), "--artifacts", str(artifacts), "--json", "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outputs(finished: subprocess.Popen[str]) -> dict[str, object]:
    stdout, stderr = finished.communicate(timeout=240)
    assert finished.returncode == 0, stderr
    return {stage["stage_id"]: stage["outputs"] for stage in json.loads(stdout)["stages"]}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_random_moments(tmp_path):
    manifest = tmp_path / "resumed.yaml"
    manifest.write_text(MANIFEST)
    begin = time.perf_counter()
    undisturbed = outputs(start(manifest, tmp_path / "undisturbed"))
    whole_s = time.perf_counter() - begin
    moments = random.Random(11)
    for _ in range(6):
        run = start(manifest, tmp_path / "killed")
        time.sleep(moments.uniform(0.2, 0.7) * whole_s)
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=60)
    assert outputs(start(manifest, tmp_path / "killed")) == undisturbed


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(tmp_path, number, code):
    manifest = tmp_path / "resumed.yaml"
    manifest.write_text(MANIFEST.replace("epochs: 4", "epochs: 400"))
    run = start(manifest, tmp_path / "artifacts")
    scratch = tmp_path / "artifacts" / "scratch"
    deadline = time.monotonic() + 60
    while not any(scratch.rglob("step-*.json")):  # written last: the checkpoint is whole
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.05)
    run.send_signal(number)
    _, stderr = run.communicate(timeout=30)
    assert run.returncode == code, stderr
    assert "Traceback" not in stderr
    assert any(scratch.rglob("step-*.json")), "the checkpoint is what resuming needs"
