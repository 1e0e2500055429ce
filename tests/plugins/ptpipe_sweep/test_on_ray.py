"""Trials on a real Ray of this machine: two workers, one of which is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import psutil
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed (extra `ray`)", allow_module_level=True)

from ptpipe import UsageError

from .test_command import CALL, slow, steps_done, wait_until

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


def started(project, *arguments):
    words = [sys.executable, "-c", CALL, str(project.manifest), "--artifacts", str(project.artifacts), *arguments]
    return subprocess.Popen(
        words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "2"}
    )


def ray_worker_of(process):
    """The Ray worker above one of the trials' processes."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if "ptpipe_sweep.worker" in child.cmdline():
            return child.parent()
    return None


def test_a_killed_ray_worker_loses_nothing(project, record):
    arguments = slow(project)
    with started(project, *arguments, "--ray", "local") as process:
        wait_until(lambda: len(steps_done(project)) == 2 and min(steps_done(project)) >= 3, 120)
        victim = ray_worker_of(process)
        assert victim is not None
        victim.kill()
        _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    found = record()
    assert [trial["verdict"] for trial in found["trials"]] == ["passed", "passed"]
    assert sorted(trial["metrics"]["slow.started_at"] >= 3 for trial in found["trials"]) == [False, True]
    runs = [json.loads(path.read_text()) for path in project.artifacts.glob("runs/*/record.json")]
    assert len(runs) == 3, "the killed worker's trial was run again, the other one was not"


def test_ctrl_c_ends_the_trials_and_ray(project, record):
    with started(project, *slow(project), "--ray", "local") as process:
        wait_until(lambda: len(steps_done(project)) == 2, 120)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(2)
        _, err = process.communicate(timeout=120)
    assert "the same command resumes" in err
    psutil.wait_procs(children, timeout=20)
    trials = [child for child in children if child.is_running() and "ptpipe_sweep.worker" in child.cmdline()]
    assert trials == []
    assert [trial["verdict"] for trial in record()["trials"]] == ["interrupted", "interrupted"]
    runs = [json.loads(path.read_text()) for path in project.artifacts.glob("runs/*/record.json")]
    assert [(each["finished"], each["exit_code"]) for each in runs] == [(True, 130)] * 2, "not killed"


def test_no_cluster_is_a_usage_error(swept, project):
    ended = swept("--over", "one.value=1,2", "--ray", "auto")
    assert isinstance(ended.error, UsageError) and str(ended.error).startswith("--ray auto: ")
    assert not project.artifacts.joinpath("sweeps").exists()
