"""A sweep as a user runs it, with real processes; the toy plugin needs no torch."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ptpipe import ManifestError, Store, UsageError
from ptpipe.execution.gc import collect_garbage

from .conftest import STAGES

OVER = ("--over", "one.value=2,0.5")
CALL = (
    "import sys; from ptpipe.launching import SignalHandlers; SignalHandlers().install(); "
    "from ptpipe_sweep.command import sweep; sys.exit(sweep.main(sys.argv[1:], standalone_mode=False))"
)


def test_a_sweep_with_two_workers_then_again(swept, record, project):
    first = swept(*OVER, "--maximize", "sum.value", "--workers", "2")
    assert (first.code, first.error) == (0, None)
    assert "2 trials: one.value (2); 2 at a time, 1 thread each" in first.err
    lines = first.out.splitlines()
    assert lines[0].split() == ["trial", "one.value", "sum.value", "took", "verdict", "front"]
    assert lines[1].split()[:3] == ["1", "2", "3"] and lines[1].split()[-1] == "*"
    assert "refused: gate: 1.5 against 2" in lines[2]
    assert "best: trial 1, one.value=2" in first.out
    found = record()
    assert [trial["verdict"] for trial in found["trials"]] == ["passed", "refused"]
    assert (found["finished"], found["best"]) == (True, 1)
    again = next(line for line in lines if line.startswith("again: "))
    words = shlex.split(again.removeprefix("again: "))
    assert words[words.index("-s") + 1] == "one.value=2"
    made = [json.loads(path.read_text())["kind"] for path in (project.artifacts / "index").glob("*.json")]
    assert made.count("toy.make") == 3, "the stage `other`, which both trials need, ran once"

    dry = swept(*OVER, "--dry-run")
    assert "7 different stages: 7 cached, 0 to run" in dry.out
    second = swept(*OVER, "--maximize", "sum.value", "--json")
    assert second.code == 0
    assert [trial["num_cached"] for trial in second.json["trials"]] == [4, 3], "a gate that refused is judged again"
    assert len(list((project.artifacts / "sweeps").iterdir())) == 2, "a dry run leaves nothing"

    garbage = collect_garbage(Store(project.artifacts), 1)
    assert garbage.problems == ()
    (left,) = (project.artifacts / "sweeps").iterdir()
    assert left.name == second.json["sweep_id"], "whose last run is kept"


def test_a_failing_trial_is_reported_and_the_others_go_on(swept, project, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    project.write("one: {uses: toy.make}\nodd: {uses: toy.fail, needs: {a: one}}")
    ended = swept("--over", "odd.how=error,none", "--json")
    assert ended.code == 1
    failed, passed = ended.json["trials"]
    assert (failed["verdict"], failed["message"]) == ("failed", "odd: told to fail")
    assert passed["verdict"] == "passed"
    assert "trial 1: odd.how=error: failed" in ended.err and "odd: told to fail" in ended.err
    log = Path(project.artifacts, "sweeps", ended.json["sweep_id"], "trial-0001.log")
    assert "told to fail" in log.read_text(encoding="utf-8")
    assert ended.json["best"] is None
    assert not (tmp_path / "summary.md").exists(), "the job's summary is no place for each trial's report"


def test_what_measures_runs_alone_and_last(swept, project, record):
    project.write("one: {uses: toy.make}\nclock: {uses: toy.clock, needs: {a: one}}")
    ended = swept("--over", "one.value=1,2", "--workers", "2", "--maximize", "one.value")
    assert ended.code == 0
    assert ended.err.count("ready to be measured") == 2
    runs = [json.loads(path.read_text()) for path in sorted((project.artifacts / "runs").glob("*/record.json"))]
    clocks = [stage for run in runs for stage in run["stages"] if stage["kind"] == "toy.clock"]
    assert [len(run["stages"]) for run in runs] == [1, 1, 2, 2]
    assert [stage["outcome"] for stage in clocks] == ["done", "done"]
    assert [(trial["num_cached"], trial["num_stages"]) for trial in record()["trials"]] == [(0, 2), (0, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--over", "one.value=1..2"), "a range has no grid"),
        ((*OVER, "--random", "2", "--optuna", "2"), "two ways to choose"),
        ((*OVER, "--optuna", "2"), "--optuna needs --maximize"),
        ((*OVER, "--maximize", "a.b", "--minimize", "a.b"), "not both"),
        ((*OVER, "--json", "--md"), "give one"),
    ],
)
def test_a_wrong_call_writes_nothing(swept, project, arguments, message):
    ended = swept(*arguments)
    assert isinstance(ended.error, UsageError) and message in str(ended.error)
    assert not project.artifacts.exists()


def test_a_manifest_that_can_be_read_only_once_is_refused(swept, project):
    content = project.write(STAGES, head=f"name: toy\nplugins: [{project.plugin}]").read_bytes()
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    project.manifest = Path(f"/dev/fd/{reading}")
    ended = swept(*OVER)
    os.close(reading)
    assert isinstance(ended.error, UsageError) and "every trial reads it: write it to a file" in str(ended.error)
    assert not project.artifacts.exists()


def test_every_trial_is_checked_before_the_first_runs(swept, project):
    ended = swept("--over", "one.value=1,-1")
    assert isinstance(ended.error, ManifestError) and "(in the trial one.value=-1)" in str(ended.error)
    assert not project.artifacts.exists()


def test_a_changed_manifest_fails_the_trials_to_come(project, tmp_path):
    from ptpipe_sweep.processes import run_trial
    from ptpipe_sweep.worker import Request

    project.write(STAGES)
    request = Request(1, str(project.manifest), "another text", {}, str(project.artifacts), str(tmp_path))
    ended = run_trial(request, 1)
    assert ended["exit_code"] == 1 and "was changed since the sweep began" in ended["message"]


def started(project, *arguments):
    words = [sys.executable, "-c", CALL, str(project.manifest), "--artifacts", str(project.artifacts), *arguments]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def steps_done(project):
    """The steps of each slow stage that is under way."""
    return [int(path.read_text()) for path in (project.artifacts / "scratch").glob("*/step")]


def wait_until(condition, timeout_s=60):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def slow(project):
    """Two trials of 15 s or more: none ends while a busy machine starts a process."""
    project.write("slow: {uses: toy.slow, with: {steps: 60, pause_s: 0.3}}")
    return ("--over", "slow.steps=50,60", "--workers", "2")


def test_neither_a_killed_worker_nor_ctrl_c_loses_anything(swept, record, project):
    arguments = slow(project)
    with started(project, *arguments) as process:
        wait_until(lambda: len(steps_done(project)) == 2 and min(steps_done(project)) >= 3)
        (victim, *_) = psutil.Process(process.pid).children()
        victim.kill()
        wait_until(lambda: len(list(project.artifacts.glob("runs/*/record.json"))) == 3)  # its trial is run again
        reached = min(steps_done(project))
        wait_until(lambda: min(steps_done(project)) > reached)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert "interrupted with 0 of 2 trials done; the same command resumes" in err
    assert len(children) >= 2 and not any(child.is_running() for child in children)
    found = record()
    assert not found["finished"]
    assert [trial["verdict"] for trial in found["trials"]] == ["interrupted", "interrupted"]
    records = [json.loads(path.read_text()) for path in sorted(project.artifacts.glob("runs/*/record.json"))]
    assert sorted(each["exit_code"] for each in records if each["finished"]) == [130, 130], "as `ptpipe run` ends"
    begun_at = [each["stages"][0]["metrics"]["started_at"] for each in records if each["finished"]]
    assert max(begun_at) >= 3, "the killed worker's trial went on from its last step"
    ended = swept(*arguments, "-s", "slow.pause_s=0", "--json")
    assert ended.code == 0
    assert all(trial["metrics"]["slow.started_at"] >= 3 for trial in ended.json["trials"])


@pytest.mark.thorough
def test_workers_do_not_outlive_a_killed_sweep(project):
    with started(project, *slow(project)) as process:
        wait_until(lambda: len(steps_done(project)) == 2)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert len(gone) >= 2 and alive == []


def test_workers_that_just_start_do_not_outlive_a_killed_sweep(project):
    arguments = slow(project)
    with started(project, *arguments, "-s", "slow.pause_s=1") as process:
        wait_until(lambda: psutil.Process(process.pid).children())
        children = psutil.Process(process.pid).children()
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == [] and steps_done(project) == []


def test_a_trial_that_is_interrupted_while_its_process_starts_has_not_begun(project, tmp_path):
    from ptpipe_sweep.processes import NOT_BEGUN, TrialProcess
    from ptpipe_sweep.worker import Request

    project.write(STAGES)
    text = project.manifest.read_text()
    process = TrialProcess(Request(1, str(project.manifest), text, {}, str(project.artifacts), str(tmp_path)), 1)
    process.interrupt()
    assert process.wait(60) and process.result() == NOT_BEGUN


def test_a_record_that_cannot_be_written_costs_no_trial(project):
    """As where a trial fills the disk."""
    project.write("slow: {uses: toy.slow, with: {pause_s: 0.1}}")
    with started(project, "--over", "slow.steps=2,3", "--maximize", "slow.started_at") as process:
        wait_until(lambda: list(project.artifacts.glob("sweeps/*/sweep.json")))
        (path,) = project.artifacts.glob("sweeps/*/sweep.json")
        path.unlink()
        (path / "in its place").mkdir(parents=True)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err.count(f"{path} could not be written: Is a directory") == 3, err
    assert "[2/2] trial 2: slow.steps=3: passed" in err and "best: trial" in out
