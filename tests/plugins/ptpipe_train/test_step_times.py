"""Duration of the parts of a step, utilization, and the profiler's files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import ptpipe
from ptpipe_train.step_times import PARTS, StepTimes, Utilization

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


class LateClock:
    """Like a device's stream: marks can be read only once the device has reached them."""

    def __init__(self) -> None:
        self.at, self.now = 0, 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def seconds(self, begin: int, end: int) -> float | None:
        return float(end - begin) if end <= self.at else None


def test_what_the_device_has_not_done_yet_is_read_later() -> None:
    clock = LateClock()
    times = StepTimes(torch.device("cpu"), clock)
    for _ in range(2):
        with times.part("forward"):
            clock.now += 2
        with times.backward():
            clock.now += 5
        times.step_done()
    assert times.means_ms() == [0.0] * len(PARTS)
    clock.at = 4  # the first forward pass
    assert times.means_ms()[PARTS.index("forward")] == 1500
    clock.at = clock.now
    found = dict(zip(PARTS, times.means_ms(), strict=True))
    assert (found["forward"], found["backward"]) == (3000, 6000)
    assert times.means_ms() == list(found.values())  # nothing counted twice


def test_a_busy_and_an_idle_processor() -> None:
    device, num_threads = torch.device("cpu"), torch.get_num_threads()
    busy, idle = Utilization(device), Utilization(device)
    assert idle.mean() is None
    time.sleep(0.05)
    idle.add(0.05)
    busy.restart()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    while time.process_time() < begin_cpu_s + 0.05:
        pass
    busy.add(time.perf_counter() - begin_s)
    assert idle.mean() == pytest.approx(0, abs=0.1)
    wanted = 0.05 / (time.perf_counter() - begin_s) / num_threads
    assert busy.mean() == pytest.approx(wanted, rel=0.2)


def test_a_device_without_utilization() -> None:
    if torch.cuda.is_available():
        pytest.skip("it may well tell")
    silent = Utilization(torch.device("cuda", 0))
    silent.add(1.0)
    assert silent.mean() is None


@pytest.mark.parametrize("steps", [2, 500], ids=["some", "more than there are"])
def test_a_profile_is_a_trace_and_a_table_in_the_runs_folder(tmp_path: Path, steps: int) -> None:
    manifest = tmp_path / "profiled.yaml"
    manifest.write_text(MANIFEST.replace("STEPS", str(steps)), encoding="utf-8")
    result = ptpipe.run(manifest, artifacts=tmp_path / "artifacts")
    assert result.exit_code == 0
    folder = result.folder / "files" / "train"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "aten::addmm" in (folder / "operators.txt").read_text()
    metrics = result.stages["train"].metrics
    (worker,) = metrics["workers"]
    parts = {"data_ms", "forward_ms", "backward_ms", "optimizer_ms"}
    assert worker.keys() == {"worker", "samples_per_s", "device_utilization"} | parts
    assert 0 < worker["device_utilization"] <= 1
    assert worker["samples_per_s"] == pytest.approx(metrics["samples_per_s"], rel=0.01)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    assert [event["path"].rpartition("/")[2] for event in events if event["type"] == "attachment"] == [
        "trace.json",
        "operators.txt",
    ]
