"""Where the time of a step goes, and the profiler's files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import ptpipe
from ptpipe_train.step_times import PARTS, StepTimes

MANIFEST = """
version: 1
name: profiled
seed: 7
stages:
  data: {uses: data.synthetic, with: {num_train: 300}}
  net: {uses: model.mlp}
  train: {uses: train.supervised, with: {epochs: 1, batch_size: 32, profile: {steps: STEPS}}}
"""


def test_parts_are_means_of_a_step() -> None:
    times = StepTimes(torch.device("cpu"))
    for _ in range(2):
        with times.part("forward"):
            time.sleep(0.02)
        times.step_done()
    found = dict(zip(PARTS, times.means_ms(), strict=True))
    assert 20 <= found.pop("forward") < 60
    assert set(found.values()) == {0.0}


def test_waiting_for_data_is_counted() -> None:
    times = StepTimes(torch.device("cpu"))

    def slow() -> object:
        for number in range(3):
            time.sleep(0.01)
            yield number

    assert list(times.waiting_for(slow())) == [0, 1, 2]
    times.step_done()
    assert times.means_ms()[PARTS.index("data")] >= 30


def test_what_follows_the_last_gradient_is_communication() -> None:
    times, weight = StepTimes(torch.device("cpu")), torch.nn.Parameter(torch.ones(3))
    times.watch([weight])
    with times.backward():
        weight.sum().backward()
        time.sleep(0.02)
    times.step_done()
    found = dict(zip(PARTS, times.means_ms(), strict=True))
    assert found["communication"] >= 20 > found["backward"] > 0


@pytest.mark.parametrize("steps", [2, 500], ids=["some", "more than there are"])
def test_a_profile_is_a_trace_and_a_table_in_the_runs_folder(tmp_path: Path, steps: int) -> None:
    manifest = tmp_path / "profiled.yaml"
    manifest.write_text(MANIFEST.replace("STEPS", str(steps)), encoding="utf-8")
    result = ptpipe.run(manifest, artifacts=tmp_path / "artifacts")
    assert result.exit_code == 0
    folder = result.folder / "files" / "train"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "aten::addmm" in (folder / "operators.txt").read_text()
    parts = result.stages["train"].metrics["step_ms"]
    assert isinstance(parts, dict)
    assert parts.keys() == {"data", "forward", "backward", "optimizer"}
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    assert [event["path"].rpartition("/")[2] for event in events if event["type"] == "attachment"] == [
        "trace.json",
        "operators.txt",
    ]
