"""No process of a run outlives it, whichever of them is killed and when; the next run on the same folder is not spoilt.

`PTPIPE_THOROUGH=1` kills 30 runs while their workers start, else 1.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

NUM_KILLS = 1 if os.environ.get("PTPIPE_THOROUGH", "0") == "0" else 30
PLUGIN = '''
"""Workers that load batches in processes of their own, and notice when others write to their folder."""
import os
import time
from pathlib import Path

import numpy as np

from ptpipe import Context, StageConfig, StageError, hookimpl, stage
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    ImageInfo,
    LoaderOptions,
    Ranges,
    Split,
    init_worker_group,
)

HERE = Path(__file__).parent


def data() -> Data:
    images, labels = ArrayColumn(np.zeros((2, 4, 4, 1), np.uint8)), ArrayColumn(np.zeros(2, dtype=np.int64))
    split = Split(np.array(["a", "b"]), {"images": images}, {"labels": labels})
    loader = LoaderOptions(batch_size=1, num_workers=1, persistent_workers=True)
    columns = {"images": ImageInfo(shape_CHW=(1, 4, 4), mean=(0.5,), std=(0.5,))}
    return Data(DatasetInfo("x", columns, Classification(class_names=("a",))), {"train": split}, loader)


@stage("workers.write", workers=lambda config: 2)
def write(config: StageConfig, ctx: Context) -> Ranges:
    """Write."""
    images = data()
    list(images.batches("train"))
    own, file = str(os.getpid()), ctx.scratch / f"owner-{ctx.rank}"
    file.write_text(own)
    (HERE / f"ready-{ctx.rank}").touch()
    with init_worker_group(ctx, on_cuda=False) as workers:
        while workers.all_reduce([float(not (HERE / "go").exists())])[0]:
            if file.read_text() != own:
                raise StageError("two teams write to the same folder")
            time.sleep(0.01)
    return Ranges({}, 0)


@hookimpl
def ptpipe_stages():
    return [write]
'''
MANIFEST = """
version: 1
name: orphans
plugins: [./write.py]
stages:
  write: {uses: workers.write}
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc").is_dir(), reason="Linux ends workers at once")]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "write.py").write_text(PLUGIN, encoding="utf-8")
    (tmp_path / "m.yaml").write_text(MANIFEST, encoding="utf-8")
    yield tmp_path
    assert ended(workers_in(tmp_path), within_s=5)


def workers_in(folder: Path) -> list[psutil.Process]:
    """The workers of runs whose artifacts are there, and the processes that they started."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or ()
        if "ptpipe_elastic.bootstrap" in command and any(str(folder) in word for word in command):
            found.append(process)
    return found


def ended(processes: list[psutil.Process], within_s: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_run_killed_while_its_workers_start_leaves_none_and_the_next_is_not_disturbed(run_cli, folder: Path) -> None:
    rng, left = random.Random(7), []
    for _ in range(NUM_KILLS):
        run = run_cli.start("run", "m.yaml", stdout=subprocess.DEVNULL)
        while not (set(workers := workers_in(folder)) - set(left)):
            assert run.poll() is None, run.communicate()[1].decode()
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        left += workers_in(folder) or workers
        run.kill()  # and start the next at once, without waiting for what this one leaves
        run.communicate()
    run = run_cli.start("run", "m.yaml", stdout=subprocess.DEVNULL)
    assert ended(left, within_s=5)
    (folder / "go").touch()
    error = run.communicate(timeout=60)[1].decode()
    assert run.returncode == 0, error


@pytest.mark.parametrize(
    "victim", ["run", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("worker", "loader"))]
)
def test_whichever_process_is_killed_the_others_end(run_cli, folder: Path, victim: str) -> None:
    run = run_cli.start("run", "m.yaml", stdout=subprocess.DEVNULL)
    while not all((folder / f"ready-{rank}").exists() for rank in (0, 1)):
        assert run.poll() is None, run.communicate()[1].decode()
        time.sleep(0.01)
    parent = psutil.Process(run.pid)
    workers = parent.children()
    loaders = [child for worker in workers for child in worker.children()]
    assert len(loaders) >= 2
    begin_s = time.monotonic()
    {"run": parent, "worker": workers[0], "loader": loaders[0]}[victim].kill()
    if victim == "loader":  # it was idle: nothing is lost
        time.sleep(0.5)
        run.kill()
    run.communicate(timeout=20)
    assert ended([*workers, *loaders], within_s=5 - min(4, time.monotonic() - begin_s))


@pytest.mark.parametrize("module", ["ptpipe_elastic.bootstrap", "ptpipe_torch.data.dataloader"])
def test_a_process_whose_run_died_before_it_could_look_ends_at_once(tmp_path: Path, module: str) -> None:
    arguments = [
        str(os.getppid()),
        "file:///nowhere",
        str(tmp_path),
        "timeit",
        "-n1",
        "-r1",
        "import time; time.sleep(9)",
    ]
    command = [sys.executable, "-m", module, *arguments]
    if module != "ptpipe_elastic.bootstrap":
        code = f"import time; from {module} import _init_worker; _init_worker({os.getppid()}, 0); time.sleep(9)"
        command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | {"RANK": "0"}, timeout=8, check=False)
    assert done.returncode == 1
    assert not list(tmp_path.iterdir())
