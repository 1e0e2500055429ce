"""Workers that die, hang, or are killed with the whole run, through the command line.

`PTPIPE_KILLS` says how often each training is killed before it may come to its end (20 by hand, fewer by default).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeAlias

import psutil
import pytest
import torch

from ptpipe.store.store import Store
from ptpipe_torch import Model

from ...forks import Fork, end, run_ptpipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]
thorough = pytest.mark.thorough

NUM_KILLS = int(os.environ.get("PTPIPE_KILLS", "2"))
EPOCHS = max(6, 3 * NUM_KILLS)
PLUGIN = Path(__file__).parent / "parallel_nets.py"
MANIFEST = """
version: 1
name: killed
seed: 7
plugins: [{plugin}]
stages:
  data: {{uses: data.synthetic, with: {{num_train: 500, val_size: 20, num_test: 16, image_size: 12}}}}
  net: {{uses: model.plain, with: {{norm: true}}}}
  train:
    uses: train.supervised
    with:
      epochs: {epochs}
      batch_size: 32
      accumulate: 2
      precision: bf16
      early_stopping: {{patience: {epochs}}}
      ema: {{decay: 0.95}}
      lr_factors: {{"fc*": 0.5}}
      pruning: {{amount: 0.7, every: 2}}
      checkpoint_every_s: 0.01
      num_threads: 1
      parallel: {parallel}
"""
MODES = {
    "ddp": {"mode": "ddp", "workers": 2},
    "fsdp": {"mode": "fsdp", "workers": 2},
    "pp": {"mode": "pp", "microbatches": 4},
    "ddp+pp": {"mode": "ddp+pp", "workers": 4, "microbatches": 2},
}


def started(arguments: list[str], environment: dict[str, str], forked: bool) -> subprocess.Popen[str] | Fork:
    if forked:
        return Fork(run_ptpipe, *arguments, environment=environment)
    command, streams = [sys.executable, "-m", "ptpipe"], {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *arguments], env=os.environ | environment, **streams, text=True)


class Running:
    """A run of the command line in a process of its own; `forked`: from one that has imported torch.

    Its workers never are.
    """

    def __init__(
        self,
        folder: Path,
        parallel: dict[str, Any],
        artifacts: str = "artifacts",
        *options: str,
        environment: dict[str, str] | None = None,
        plugin: Path | None = None,
        forked: bool = False,
    ) -> None:
        self.manifest, self.artifacts = folder / "killed.yaml", folder / artifacts
        plugins = f"{PLUGIN}, {plugin}" if plugin else PLUGIN
        text = MANIFEST.format(plugin=plugins, epochs=EPOCHS, parallel=json.dumps(parallel))
        self.manifest.write_text(text, encoding="utf-8")
        arguments = ["run", str(self.manifest), "--artifacts", str(self.artifacts), *options]
        self.process = started(arguments, environment or {}, forked)
        self.parent = psutil.Process(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)

    def workers(self) -> list[psutil.Process]:
        """Return the running workers, by rank."""
        try:
            children = self.parent.children(recursive=True)
            found = {
                int(child.environ()["RANK"]): child
                for child in children
                if "ptpipe_elastic.bootstrap" in child.cmdline()
            }
        except (psutil.Error, KeyError):  # one is just beginning or ending
            return []
        return [found[rank] for rank in sorted(found)]

    def newest_step(self) -> int:
        """Of rank 0's checkpoints."""
        try:
            files = [*self.artifacts.glob("scratch/*/checkpoints/rank-0/step-*.json")]
        except FileNotFoundError:  # the training has ended: its folder is being deleted
            return -1
        return max((int(file.stem.removeprefix("step-")) for file in files), default=-1)

    def until(self, step: int) -> bool:
        """Wait for a checkpoint of that step or a later one; False where the run ended before."""
        while self.newest_step() < step:
            if self.process.poll() is not None:
                return False
            time.sleep(0.002)
        return True

    def end(self) -> str:
        """Wait for its end and return its output."""
        _, output = self.process.communicate(timeout=120)
        return output

    def trained(self) -> dict[str, torch.Tensor]:
        records = sorted(self.artifacts.glob("runs/*/record.json"))
        stages = {stage["stage_id"]: stage for stage in json.loads(records[-1].read_text())["stages"]}
        return dict(Store(self.artifacts).get(stages["train"]["outputs"]["output"]["digest"], Model).tensors)


@pytest.fixture(autouse=True)
def no_worker_stays(tmp_path: Path) -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while (left := workers_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


Start: TypeAlias = Callable[..., Running]


@pytest.fixture
def start(no_worker_stays: None) -> Iterator[Start]:
    """`Running`, which ends with the test."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(Running(*arguments, **options))


def workers_of(folder: Path) -> list[int]:
    """Those of any run whose artifacts are in there."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or ()
        if "ptpipe_elastic.bootstrap" in command and any(str(folder) in word for word in command):
            found.append(process.pid)
    return found


NO_PICKLES = '''
"""Refuses what torch's collectives of objects would unpickle: whoever sends it runs code."""
import torch.distributed.distributed_c10d as c10d

from ptpipe import hookimpl


def refuse(*arguments):
    raise AssertionError("a pickle was received")


c10d._tensor_to_object = refuse


@hookimpl
def ptpipe_stages():
    return []
'''


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Running]:
    """The training of a mode that nothing disturbs, and in which nothing is unpickled."""

    @cache
    def train(name: str) -> Running:
        folder = tmp_path_factory.mktemp("undisturbed")
        plugin = folder / "no_pickles.py"
        plugin.write_text(NO_PICKLES, encoding="utf-8")
        with Running(folder, MODES[name], plugin=plugin, forked=True) as running:
            running.end()
            return running

    return train


@pytest.mark.parametrize("name", ["ddp", *(pytest.param(name, marks=thorough) for name in ("pp", "fsdp", "ddp+pp"))])
@pytest.mark.timeout(900)
def test_killed_at_random_moments_it_ends_with_the_same_bits(
    start: Start, tmp_path: Path, undisturbed: Callable[[str], Running], name: str
) -> None:
    rng, moments = random.Random(f"{name} {NUM_KILLS}"), []
    while len(moments) < NUM_KILLS:
        running = start(tmp_path, MODES[name], forked=NUM_KILLS < 20)
        assert running.until(running.newest_step() + rng.randrange(3)), "over before it could be killed"
        time.sleep(rng.uniform(0, 0.05))
        # Now a worker, now the whole run, at once: its workers must not outlive it.
        workers = running.workers()
        rank = rng.randrange(len(workers)) if workers and len(moments) % 2 else None
        (running.parent if rank is None else workers[rank]).kill()
        output = running.end()
        moments.append((running.newest_step(), rank))
        if rank is not None and running.process.returncode == 1:
            assert f"worker {rank} was killed by SIGKILL" in output
    last = start(tmp_path, MODES[name], forked=True)
    assert "failed" not in last.end()
    assert last.process.returncode == 0
    assert same_bits(undisturbed(name), last), moments


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_checkpoints_of_a_network_that_was_made_anew_are_ignored(start: Start, tmp_path: Path) -> None:
    first = start(tmp_path, MODES["ddp"], environment={"NET_SEED": "1"})
    assert first.until(10), "over before it could be killed"
    first.parent.kill()
    first.end()
    environment = {"NET_SEED": "2"}
    again = start(tmp_path, MODES["ddp"], "artifacts", "--fresh", "net", environment=environment)
    output = again.end()
    assert again.process.returncode == 0
    assert "was ignored: it is of another model" in output
    undisturbed = start(tmp_path, MODES["ddp"], "undisturbed", environment=environment)
    undisturbed.end()
    assert same_bits(undisturbed, again)


DIES_AT_THE_END = '''
"""Kills worker 0 once, when the training is over and its result is not delivered yet."""
import os
import signal
from pathlib import Path

from ptpipe import hookimpl
from ptpipe_train import supervised

report = supervised.Training.report


def die_once(training):
    mark = Path(__file__).with_name("died")
    if training.loop.strategy.workers.rank == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    report(training)


supervised.Training.report = die_once


@hookimpl
def ptpipe_stages():
    return []
'''


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fsdp", "pp"])
def test_killed_at_the_very_end_it_delivers_what_was_trained(start: Start, tmp_path: Path, name: str) -> None:
    options = ["-s", "train.early_stopping=null", "-s", "train.epochs=2"]
    undisturbed = start(tmp_path, MODES[name], "undisturbed", *options)
    undisturbed.end()
    plugin = tmp_path / "dies.py"
    plugin.write_text(DIES_AT_THE_END, encoding="utf-8")
    killed = start(tmp_path, MODES[name], "artifacts", *options, "--max-restarts", "1", plugin=plugin)
    assert "3 done" in killed.end()
    assert (tmp_path / "died").exists()
    assert same_bits(undisturbed, killed)


def test_a_dead_worker_ends_the_others_soon_and_is_named(start: Start, tmp_path: Path) -> None:
    running = start(tmp_path, MODES["ddp"], forked=True)
    assert running.until(1)
    running.workers()[1].kill()
    begin_s = time.monotonic()
    output = running.end()
    assert time.monotonic() - begin_s < 10
    assert running.process.returncode == 1
    assert "worker 1 was killed by SIGKILL" in output


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "rank"), [("ddp", 0), *(pytest.param(name, 1, marks=thorough) for name in ("ddp", "pp"))]
)
def test_a_worker_that_hangs_is_named(start: Start, tmp_path: Path, name: str, rank: int) -> None:
    running = start(tmp_path, MODES[name] | {"timeout_s": 3})
    assert running.until(1)
    hanging = running.workers()[rank]
    hanging.suspend()
    # 3 s until the timeout, 5 to find out which worker, 3 to end; a stopped process receives SIGTERM once it continues.
    time.sleep(12)
    hanging.resume()
    output = running.end()
    assert running.process.returncode == 1
    assert f"worker {rank} did not answer for 3 s" in output


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_run_ends_its_workers(start: Start, tmp_path: Path, number: int, code: int) -> None:
    running = start(tmp_path, MODES["ddp"], forked=True)
    assert running.until(1)
    running.parent.send_signal(number)
    output = running.end()
    assert running.process.returncode == code
    assert "Traceback" not in output


@pytest.mark.thorough
def test_two_runs_at_once_do_not_collide(start: Start, tmp_path: Path) -> None:
    runs = [start(tmp_path, MODES["ddp"], name) for name in ("one", "two")]
    for running in runs:
        running.end()
    assert [running.process.returncode for running in runs] == [0, 0]
    one, two = (running.trained() for running in runs)
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())


@pytest.mark.thorough
def test_a_training_with_data_loaders_is_cached(start: Start, tmp_path: Path) -> None:
    options = ["-s", "data.num_workers=1", "-s", "train.epochs=1", "-s", "train.early_stopping=null"]
    assert "3 done" in start(tmp_path, MODES["ddp"], "artifacts", *options).end()
    assert "3 cached" in start(tmp_path, MODES["ddp"], "artifacts", *options).end()


def same_bits(one: Running, other: Running) -> bool:
    expected, found = one.trained(), other.trained()
    return expected.keys() == found.keys() and all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.thorough
def test_with_restarts_a_dead_worker_changes_nothing(
    start: Start, tmp_path: Path, undisturbed: Callable[[str], Running]
) -> None:
    running = start(tmp_path, MODES["ddp"], "artifacts", "--max-restarts", "2")
    assert running.until(2)
    running.workers()[1].kill()
    output = running.end()
    assert "3 done" in output
    assert "all workers restarted from the last checkpoint (restart 1)" in output
    assert running.process.returncode == 0
    assert same_bits(undisturbed("ddp"), running)


@pytest.mark.thorough
def test_two_nodes_are_one_machine_with_as_many_workers(
    start: Start, tmp_path: Path, undisturbed: Callable[[str], Running], free_port: int
) -> None:
    """Two agents on loopback; the second is killed with its worker, and started again."""
    options = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port}", "--max-restarts", "1"]
    first = start(tmp_path, MODES["ddp"], "artifacts", *options, "--node-rank", "0")
    second = start(tmp_path, MODES["ddp"], "artifacts", *options, "--node-rank", "1")
    assert first.until(2)
    second.parent.kill()
    second.end()
    again = start(tmp_path, MODES["ddp"], "artifacts", *options, "--node-rank", "1")
    assert re.search(r"\(restart 1\)(?s:.*)3 done", first.end())
    output = again.end()
    assert "node 1 takes part in train" in output
    assert "node 0 ended with exit code 0" in output
    assert (first.process.returncode, again.process.returncode) == (0, 0)
    assert same_bits(undisturbed("ddp"), first)


@pytest.mark.thorough
def test_node_0_tells_how_a_worker_of_another_node_ended(start: Start, tmp_path: Path, free_port: int) -> None:
    options = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port}"]
    first = start(tmp_path, MODES["ddp"], "artifacts", *options, "--node-rank", "0")
    second = start(tmp_path, MODES["ddp"], "artifacts", *options, "--node-rank", "1")
    assert first.until(1)
    (victim,) = second.workers()
    victim.kill()
    begin_s = time.monotonic()
    assert "worker 1 was killed by SIGKILL" in first.end()
    assert time.monotonic() - begin_s < 10
    assert first.process.returncode == 1
    assert "worker 1 was killed by SIGKILL" in second.end()
    assert second.process.returncode == 1


@pytest.mark.thorough
def test_a_follower_without_a_leader_hears_of_its_end(start: Start, tmp_path: Path, free_port: int) -> None:
    options = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port}"]
    first = start(tmp_path, MODES["ddp"], "artifacts", *options, "--node-rank", "0")
    second = start(tmp_path, MODES["ddp"], "artifacts", *options, "--node-rank", "1")
    assert first.until(1)
    first.parent.kill()
    first.end()
    assert "node 0 disappeared" in second.end()
    assert second.process.returncode == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cluster", ["torchrun", "slurm"])
def test_ranks_of_the_environment_are_taken_as_they_are(
    start: Start, tmp_path: Path, undisturbed: Callable[[str], Running], cluster: str, free_port: int
) -> None:
    runs = []
    for rank in ("0", "1"):
        ranks = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        ranks |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
        if cluster == "slurm":
            ranks = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            ranks |= {"SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port)}
        runs.append(start(tmp_path, MODES["ddp"], environment=ranks, forked=True))
    assert "3 done" in runs[0].end()
    assert "node 0 ended with exit code 0" in runs[1].end()
    assert same_bits(undisturbed("ddp"), runs[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint host:port, a free port of node 0, not ''"),
        (["--nnodes", "2", "--rdzv-endpoint", "localhost"], "needs --rdzv-endpoint host:port"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank 2: the ranks of --nnodes 2 machines are 0 to 1"),
        (["--node-rank", "1"], "--node-rank 1 needs --nnodes, the number of machines"),
        (["--rdzv-endpoint", "localhost:29400"], "--rdzv-endpoint needs --nnodes"),
    ],
)
def test_options_of_nodes_that_do_not_fit_are_named(
    start: Start, tmp_path: Path, options: list[str], message: str
) -> None:
    running = start(tmp_path, MODES["ddp"], "artifacts", *options, forked=True)
    assert message in running.end()
    assert running.process.returncode == 2


def test_workers_that_cannot_be_spread_evenly_are_refused(start: Start, tmp_path: Path, free_port: int) -> None:
    options = ["--nnodes", "3", "--rdzv-endpoint", f"localhost:{free_port}"]
    running = start(tmp_path, MODES["ddp"], "artifacts", *options, forked=True)
    assert "2 workers can't be divided evenly among 3 nodes" in running.end()
    assert running.process.returncode == 1
