"""Workers of a stranger's stage that end in every way, on one node and on two, through the command line."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from ...forks import Fork, run_ptpipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]

PLUGIN = '''
"""A stage whose worker 1 ends in a way to be chosen; worker 0 says nothing to it."""
import os
import signal
import time
from pathlib import Path

from ptpipe import Context, StageConfig, StageError, hookimpl, stage
from ptpipe_torch import Ranges

if os.environ.get("BROKEN") and "RANK" in os.environ:
    raise ImportError("no libfoo in workers")


class Config(StageConfig):
    """Options."""

    way: str = "well"


@stage("workers.ends", workers=lambda config: 2)
def ends(config: Config, ctx: Context) -> Ranges:
    """End."""
    if ctx.rank == 1:
        match config.way:
            case "exit":
                os._exit(7)
            case "terminated":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(9)
            case "undecodable":
                raise StageError("bad \\udce9 text")
    elif config.way not in ("well", "silent"):
        time.sleep(2)
    if config.way == "silent":
        os._exit(0)
    return Ranges({}, 0)


@hookimpl
def ptpipe_stages():
    return [ends]
'''
MANIFEST = """
version: 1
name: ends
seed: 7
plugins: [./ends.py]
stages:
  t: {uses: workers.ends}
"""


def start(folder: Path, way: str, *options: str, more: str = "", **environment: str) -> Fork:
    """Start a run, forked; its workers are real ones."""
    (folder / "ends.py").write_text(PLUGIN, encoding="utf-8")
    (folder / "m.yaml").write_text(MANIFEST + more, encoding="utf-8")
    arguments = ["run", str(folder / "m.yaml"), "--artifacts", str(folder / "artifacts"), "-s", f"t.way={way}"]
    return Fork(run_ptpipe, *arguments, *options, environment=environment)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("exit", "worker 1 ended with exit code 7"),
        ("terminated", "the workers were ended by SIGTERM; none had failed on this node"),
        ("undecodable", "bad "),
        ("silent", "the workers ended without an error, but worker 0 left no outputs"),
    ],
)
def test_an_end_is_told_in_a_line(tmp_path: Path, way: str, words: str) -> None:
    with start(tmp_path, way) as running:
        said = running.communicate(timeout=60)[1]
    assert running.returncode == 1, said
    assert words in said
    assert "Traceback" not in said
    assert f"--artifacts {tmp_path / 'artifacts'}" in said  # what goes on with it finds what there is


def test_a_plugin_that_is_broken_in_workers_alone(tmp_path: Path) -> None:
    with start(tmp_path, "well", BROKEN="1") as running:
        said = running.communicate(timeout=60)[1]
    assert running.returncode == 1
    assert "no plugin offers workers.ends in worker" in said
    assert "no libfoo in workers" in said


@pytest.mark.thorough
def test_a_node_does_not_end_well_where_anothers_worker_failed(tmp_path: Path, free_port: int) -> None:
    """Node 0's own worker does its part without missing the other."""
    begin_s = time.monotonic()
    options = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port}"]
    with ExitStack() as stack:
        nodes = [stack.enter_context(start(tmp_path, "exit", *options, "--node-rank", rank)) for rank in ("0", "1")]
        said = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], said
    assert "worker 1 ended with exit code 7" in said[0]
    assert time.monotonic() - begin_s < 60


@pytest.mark.thorough
def test_node_0_listens_again_for_the_stage_after_one_that_failed(tmp_path: Path, free_port: int) -> None:
    options = ["--keep-going", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port}"]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                start(tmp_path, "exit", *options, "--node-rank", rank, more="  u: {uses: workers.ends}\n")
            )
            for rank in ("0", "1")
        ]
        said = [node.communicate(timeout=120)[1] for node in nodes]
    assert "worker 1 ended with exit code 7" in said[0]
    assert "1 done, 1 failed" in said[0], said
    assert "node 1 takes part in u" in said[1]
