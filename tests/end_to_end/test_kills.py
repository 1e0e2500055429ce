"""Kills: whatever signal reaches whichever process at any moment, nothing is lost and the outcome is the same.

With PTPIPE_THOROUGH=1, 200 signals; without, a few to one process (test_parallel_killed.py kills workers), which is
forked from one that has imported torch: so the signals meet its work.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from ..forks import Fork, end, run_ptpipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]

THOROUGH = os.environ.get("PTPIPE_THOROUGH", "0") != "0"
NUM_SIGNALS = 100 if THOROUGH else 2
MANIFEST = """\
version: 1
name: kills
seed: 7
stages:
  data:
    uses: data.synthetic
    with: {{num_train: 256, val_size: 32, num_test: 32, image_size: 12, num_workers: 1}}
  net: {{uses: model.small_cnn, with: {{width: 4}}}}
  train:
    uses: train.supervised
    with: {{epochs: 6, batch_size: 32, checkpoint_every_s: 0.01, num_threads: 1, parallel: {parallel}}}
  dynamic: {{uses: quant.dynamic, needs: {{model: train}}, with: {{backend: fbgemm}}}}
  onnx: {{uses: export.onnx, needs: {{model: dynamic}}}}
"""
MODES = {"one process": "{mode: single}", "ddp": "{mode: ddp, workers: 2}"}


def start(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ptpipe", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **streams, text=True, start_new_session=True)


class Running:
    """`ptpipe run` in a process of its own."""

    def __init__(self, manifest: Path, artifacts: Path, *, forked: bool = not THOROUGH) -> None:
        self.artifacts = artifacts
        arguments = ["run", str(manifest), "--artifacts", str(artifacts), "--json"]
        self.process = Fork(run_ptpipe, *arguments) if forked else start(arguments)
        self.main = psutil.Process(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)

    def others(self, is_worker: bool) -> list[psutil.Process]:
        """The workers of the training, or the processes that load data."""
        try:
            children = self.main.children(recursive=True)
            return [each for each in children if ("ptpipe_elastic.bootstrap" in each.cmdline()) == is_worker]
        except psutil.Error:
            return []

    def num_commits(self) -> int:
        """How many results and checkpoints there are."""
        folders = (self.artifacts / name for name in ("index", "scratch"))
        # Not Path.glob: it fails where a finished stage's scratch folder is being deleted.
        names = (name for folder in folders for _, _, names in os.walk(folder) for name in names)
        return sum(name.endswith(".json") and not name.startswith(".") for name in names)

    def outputs(self) -> dict[str, Any]:
        stdout, stderr = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, stderr
        return {stage["stage_id"]: stage["outputs"] for stage in json.loads(stdout)["stages"]}

    def is_over(self) -> bool:
        return self.process.poll() is not None


def kill_run(running: Running) -> None:
    running.main.kill()


def terminate_run(running: Running) -> None:
    running.main.terminate()


def interrupt_run(running: Running) -> None:
    running.main.send_signal(signal.SIGINT)


def interrupt_twice(running: Running) -> None:
    running.main.send_signal(signal.SIGINT)
    time.sleep(0.05)
    running.main.send_signal(signal.SIGINT)


def stop_and_continue(running: Running) -> None:
    running.main.suspend()
    time.sleep(0.2)
    running.main.resume()


def kill_worker(running: Running) -> None:
    for process in running.others(is_worker=True)[:1]:
        process.kill()


def kill_loader(running: Running) -> None:
    for process in running.others(is_worker=False)[:1]:
        process.kill()


STARTING = (-signal.SIGINT, -signal.SIGTERM)  # Python was starting: a shell shows 130 and 143
ACTIONS: dict[Callable[[Running], None], tuple[int, ...]] = {
    kill_run: (-signal.SIGKILL,),
    terminate_run: (143, -signal.SIGTERM),
    interrupt_run: (130, -signal.SIGINT),
    interrupt_twice: (130, -signal.SIGINT),
    stop_and_continue: (0,),
    kill_worker: (0, 1),
    kill_loader: (0, 1),
}


def processes_of(running: Running) -> list[list[str]]:
    """Those of its session, and its workers, which have sessions of their own."""
    folder, found = str(running.artifacts.parent), []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        with suppress(ProcessLookupError):
            is_its = os.getsid(process.pid) == running.process.pid or any(folder in word for word in line)
            if is_its and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(line)
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["one process", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_whatever_is_killed_the_outcome_is_the_same(tmp_path: Path, mode: str) -> None:
    manifest = tmp_path / "kills.yaml"
    manifest.write_text(MANIFEST.format(parallel=MODES[mode]), encoding="utf-8")
    with Running(manifest, tmp_path / "undisturbed", forked=False) as run:  # all forks have the same hashes of strings
        if not THOROUGH:  # forks have imported everything
            wait_for(lambda: run.num_commits() > 0, 60)
        begin = time.perf_counter()
        undisturbed = run.outputs()
        whole_s = time.perf_counter() - begin
    chance, tried = random.Random(f"{mode} {NUM_SIGNALS}"), []
    actions = [action for action in ACTIONS if mode == "ddp" or action is not kill_worker]
    while len(tried) < NUM_SIGNALS:
        action = actions[len(tried) % len(actions)]
        with Running(manifest, tmp_path / "artifacts") as running:
            if signalled(running, action, chance, whole_s):
                tried.append(action.__name__)
        if running.process.returncode == 0:
            assert outputs_of(manifest, tmp_path / "artifacts") == undisturbed, tried
            shutil.rmtree(tmp_path / "artifacts")
    assert outputs_of(manifest, tmp_path / "artifacts") == undisturbed, tried


def signalled(running: Running, action: Callable[[Running], None], chance: random.Random, whole_s: float) -> bool:
    """Do something to a run at a random moment and check how it ends; return whether it wasn't over before."""
    if chance.random() < 0.5:  # at a commit, or at any moment
        wanted = running.num_commits() + chance.randrange(1, 5)
        wait_for(lambda: running.num_commits() >= wanted or running.is_over(), 60)
    else:
        wait_for(running.is_over, chance.uniform(0.05, 0.9) * whole_s)
    if is_running := not running.is_over():
        action(running)
    stderr = running.process.communicate(timeout=60)[1]
    if is_running:
        code = running.process.returncode
        assert code in (*ACTIONS[action], 0), (action.__name__, stderr)
        assert "Traceback" not in stderr or code in STARTING, (action.__name__, stderr)
        assert wait_for(lambda: not processes_of(running), 5), (action.__name__, processes_of(running))
    return is_running


def outputs_of(manifest: Path, artifacts: Path) -> dict[str, Any]:
    with Running(manifest, artifacts) as running:
        return running.outputs()
