"""Shards through the command line: written of a data set, trained on, killed and resumed, in one process and two."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ptpipe
from ptpipe.api import RunResult
from ptpipe_torch import Data, Model
from ptpipe_torch.data.column import flatten
from ptpipe_torch.data.shards import TarColumn

from ..forks import run_forked
from ..plugins.forked_workers import forked_workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NETS = Path(__file__).parents[1] / "plugins" / "ptpipe_train" / "parallel_nets.py"
MANIFEST = """
version: 1
name: digits
seed: 7
plugins: [{plugin}]
stages:
  data:    {{uses: {kind}, with: {{batch_size: 32{options}}}}}
  net:     {{uses: model.plain}}
  train:
    uses: train.supervised
    with:
      {{epochs: 8, lr: 0.02, schedule: {{name: cosine}}, num_threads: 1, memory_format: contiguous,
      checkpoint_every_s: {checkpoint_every_s}}}
  test:    {{uses: eval.predict, needs: {{model: train}}}}
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ptpipe", *arguments, "--json"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> Any:
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    return json.loads(stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> Path:
    """Holds the digits as shards of 100 samples, and manifests that train on the digits and on these."""
    folder = tmp_path_factory.mktemp("shards")
    options = ", path: shards, shuffle_buffer: 400, num_workers: 0"
    for name, kind, given, every_s in (
        ("digits", "data.digits", "", 60),
        ("shards", "data.shards", options, 60),
        ("killed", "data.shards", options.replace("num_workers: 0", "num_workers: 1"), 0.001),
    ):
        text = MANIFEST.format(plugin=NETS, kind=kind, options=given, checkpoint_every_s=every_s)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    options = ("--output", "shards", "--samples-per-shard", "100", "--json")
    finished = run_forked(folder, "shards", "digits.yaml", "data", *options)
    assert finished.returncode == 0, finished.stderr
    written = json.loads(finished.stdout)
    assert [(of["split"], of["num_samples"], of["num_shards"]) for of in written] == [
        ("train", 1281, 13), ("val", 67, 1), ("test", 449, 5),
    ]  # fmt: skip
    return folder


def trained(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> RunResult:
    monkeypatch.chdir(folder)
    overrides = {f"train.{option}": value for option, value in options.items()}
    result = ptpipe.run(f"{name}.yaml", overrides, artifacts=folder / "artifacts")
    assert result.exit_code == 0, [stage.message for stage in result.stages.values()]
    return result


def test_training_on_them_is_training_on_the_data_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {name: trained(folder, name, monkeypatch) for name in ("digits", "shards")}
    data = results["shards"].artifact("data")
    assert isinstance(data, Data) and isinstance(flatten(data.splits["train"].inputs["images"])[0], TarColumn)
    accuracies = {name: result.stages["test"].metrics["accuracy"] for name, result in results.items()}
    assert min(accuracies.values()) > 0.9 and abs(accuracies["shards"] - accuracies["digits"]) < 0.03


def test_two_workers_end_where_one_process_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"epochs": 1, "batch_size": 92}
    single = trained(folder, "shards", monkeypatch, **options).artifact("train")
    parallel = {"mode": "ddp", "workers": 2}
    with forked_workers():
        ddp = trained(folder, "shards", monkeypatch, **options, parallel=parallel).artifact("train")
    assert isinstance(single, Model) and isinstance(ddp, Model)
    for name, tensor in single.tensors.items():
        assert (tensor - ddp.tensors[name]).abs().max() <= 1e-5 * tensor.abs().max(), name


@pytest.mark.thorough
def test_killed_and_resumed_it_ends_with_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("run", "killed.yaml", "--artifacts", "killed", "-s", "train.epochs=3")
    run = start(folder, *command)
    deadline = time.monotonic() + 60
    while not any((folder / "killed" / "scratch").rglob("step-*.json")):  # written last: the checkpoint is whole
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=60)
    resumed = answer(start(folder, *command))
    log = (folder / "killed" / "runs" / resumed["run_id"] / "log.txt").read_text(encoding="utf-8")
    assert "training resumes from the checkpoint of step" in log
    undisturbed = trained(folder, "shards", monkeypatch, epochs=3)
    (digest,) = (stage["outputs"]["output"]["digest"] for stage in resumed["stages"] if stage["stage_id"] == "train")
    assert digest == undisturbed.stages["train"].outputs["output"]["digest"]
