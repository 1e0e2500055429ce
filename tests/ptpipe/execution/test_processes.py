"""Runs as processes of their own: signals, kills, two at a time, and a disk that fills up."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time

import pytest

from ptpipe.store.runs import run_records
from ptpipe.store.store import Store

SLOW = """
one: {uses: toy.make}
slow: {uses: toy.slow, with: {steps: 8, pause_s: 0.1}}
last: {uses: toy.make, with: {value: 2}}
"""


def wait_for(condition, timeout_s=30.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def step_reached(project):
    """How far the slow stage is; its scratch folder says so."""
    steps = [int(path.read_text()) for path in project.artifacts.glob("scratch/*/step")]
    return max(steps, default=0)


def last_record(project):
    return next(run_records(Store(project.artifacts)))


def outcomes(record):
    return {stage["stage_id"]: stage["outcome"] for stage in record["stages"]}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_run_in_good_order_and_running_again_resumes(project, run_cli, number, code):
    project.write(SLOW)
    with run_cli.start("run", "m.yaml", alone=True) as process:
        wait_for(lambda: step_reached(project) >= 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert b"Traceback" not in out + err
    record = last_record(project)
    assert (record["finished"], record["exit_code"]) == (True, code)
    assert outcomes(record) == {"one": "done", "slow": "interrupted", "last": "skipped"}
    reached = step_reached(project)
    assert reached >= 2
    again = run_cli("run", "m.yaml", "--json", alone=True)
    assert again.code == 0
    assert outcomes(again.json) == {"one": "cached", "slow": "done", "last": "done"}
    assert again.json["stages"][1]["metrics"] == {"started_at": reached}
    assert not list(project.artifacts.glob("scratch/*"))


def test_a_killed_run_loses_nothing_that_was_done(project, run_cli):
    project.write(SLOW)
    with run_cli.start("run", "m.yaml", alone=True) as process:
        wait_for(lambda: step_reached(project) >= 3)
        process.kill()
        process.communicate()
    record = last_record(project)
    assert (record["finished"], outcomes(record)) == (False, {"one": "done"})
    assert set(record["keys"]) == {"one", "slow", "last"}
    assert run_cli("gc", alone=True).code == 0
    again = run_cli("run", "m.yaml", "--json", alone=True)
    assert outcomes(again.json) == {"one": "cached", "slow": "done", "last": "done"}
    assert again.json["stages"][1]["metrics"]["started_at"] >= 3, "gc left the checkpoint alone"


def test_kills_at_random_moments_leave_a_sound_store(project, run_cli):
    project.write("\n".join(f"n{i}: {{uses: toy.slow, with: {{steps: {i + 1}, pause_s: 0}}}}" for i in range(12)))
    index = project.artifacts / "index"
    chance = random.Random(3)
    for seed in range(8):
        with run_cli.start("run", "m.yaml", "-s", f"seed={seed}", alone=True) as process:
            enough = len(list(index.glob("*.json"))) + chance.randrange(1, 10)
            wait_for(lambda enough=enough: len(list(index.glob("*.json"))) >= enough)
            time.sleep(chance.uniform(0, 0.02))
            process.kill()
            process.communicate()
        store = Store(project.artifacts)
        for path in project.artifacts.glob("objects/[0-9a-f][0-9a-f]/*"):
            store.verify(path.name)
        for path in index.glob("*.json"):
            assert store.entry(path.stem) is not None
    assert sum(not record["finished"] for record in run_records(store)) >= 4, "the runs were too quick to be killed"
    ended = run_cli("run", "m.yaml", "--json", alone=True)
    assert ended.code == 0
    assert set(outcomes(ended.json).values()) == {"cached", "done"}
    assert run_cli("gc", alone=True).code == 0
    assert not list(project.artifacts.glob("objects/.*")) + list(project.artifacts.glob("index/.*"))
    assert set(outcomes(run_cli("run", "m.yaml", "--json", alone=True).json).values()) == {"cached"}


def test_two_runs_at_once_share_the_work(project, run_cli):
    project.write(SLOW.replace("pause_s: 0.1", "pause_s: 0.4"))  # the second run must have begun by then
    with run_cli.start("run", "m.yaml", "--json", alone=True) as first:
        wait_for(lambda: step_reached(project) >= 1)
        with run_cli.start("run", "m.yaml", "--json", alone=True) as second:
            outs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    records = [json.loads(out) for out in outs]
    assert [outcomes(record)["slow"] for record in records] == ["done", "cached"]
    assert {outcomes(record)["last"] for record in records} == {"done", "cached"}
    assert records[1]["stages"][1]["notices"] == ["another run is running this stage; waiting for it"]
    assert records[0]["stages"][1]["outputs"] == records[1]["stages"][1]["outputs"]


def test_a_run_that_waits_for_another_can_be_interrupted(project, run_cli):
    project.write(SLOW)
    key = project.plan() and json.loads(run_cli("plan", "m.yaml", "--json", alone=True).out)["stages"][1]["key"]
    store = Store(project.artifacts)
    store.open_for_writing()
    with store.lock(key), run_cli.start("run", "m.yaml", alone=True) as process:
        wait_for(
            lambda: "waiting for it" in "".join(path.read_text() for path in project.artifacts.glob("runs/*/log.txt"))
        )
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


def test_gc_waits_for_nobody(project, run_cli):
    project.write(SLOW)
    with run_cli.start("run", "m.yaml", alone=True) as process:
        wait_for(lambda: step_reached(project) >= 1)
        refused = run_cli("gc", alone=True)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert refused.code == 1
    assert refused.err == f"ptpipe: a run is using {project.artifacts}; try again when it has ended\n"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 800 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_a_clear_end(project, run_cli, small_disk):
    stages = [f"n{i}: {{uses: toy.slow, with: {{steps: {i + 1}, pause_s: 0}}}}" for i in range(3)]
    project.write("\n".join([*stages, "big: {uses: toy.slow, with: {steps: 9, pause_s: 0}}"]))
    (small_disk / "ballast").write_bytes(b"x" * 500_000)
    ended = run_cli("run", "m.yaml", "--artifacts", small_disk / "artifacts", alone=True)
    assert ended.code == 1
    assert "Traceback" not in ended.err
    store = Store(small_disk / "artifacts")
    for path in store.root.glob("objects/[0-9a-f][0-9a-f]/*"):
        store.verify(path.name)
    (small_disk / "ballast").unlink()
    again = run_cli("run", "m.yaml", "--json", "--artifacts", small_disk / "artifacts", alone=True)
    assert again.code == 0


def test_a_disk_that_is_full_before_the_run(project, run_cli, small_disk):
    project.write(SLOW)
    with (small_disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 1000)
    ended = run_cli("run", "m.yaml", "--artifacts", small_disk / "artifacts", alone=True)
    assert ended.code == 1
    assert ended.err.startswith("ptpipe: cannot write to ")
    assert ended.err.rstrip().endswith("No space left on device")
    assert ended.err.count("\n") == 1


@pytest.fixture
def read_only(tmp_path):
    """A folder that not even root can write to."""
    folder = tmp_path / "locked"
    folder.mkdir()
    bound = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True, check=False)
    if bound.returncode:
        pytest.skip(f"nothing can be mounted here: {bound.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_a_folder_that_cannot_be_written(project, run_cli, read_only, verb):
    project.write(SLOW)
    ended = run_cli(verb, "m.yaml", "--artifacts", read_only / "artifacts", alone=True)
    assert ended.code == (1 if verb == "run" else 0), "looking needs no writing"
    assert "Traceback" not in ended.err
    if verb == "run":
        assert (
            ended.err
            == f"ptpipe: cannot write to the artifacts folder {read_only / 'artifacts'}: Read-only file system\n"
        )


def test_a_file_in_place_of_the_folder(project, run_cli):
    project.write(SLOW)
    (project.folder / "artifacts").write_text("")
    ended = run_cli("run", "m.yaml", alone=True)
    assert ended.code == 2
    assert "Directory 'artifacts' is a file" in ended.err
