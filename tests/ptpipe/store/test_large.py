"""One store for many: runs at once with gc beside them, and a store that has grown large.

Thin by default. PTPIPE_THOROUGH=1 starts all runs, and times a store of 100,000 objects and 10,000 runs.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time

import pytest

from ptpipe.store.runs import list_runs
from ptpipe.store.store import Store

from ...conftest import command, environment
from ..synthetic import check_index, check_run, fill

THOROUGH = os.environ.get("PTPIPE_THOROUGH", "0") != "0"
STAGES = """
one: {{uses: toy.make, with: {{value: {value}}}}}
slow: {{uses: toy.slow, with: {{steps: 3, pause_s: 0.02}}}}
sum: {{uses: toy.add, needs: {{a: one, b: one}}}}
"""
MANIFEST = "version: 1\nname: toy-{value}\nplugins: [./toy.py]\nstages:" + STAGES.replace("\n", "\n  ")


# Together


@pytest.fixture
def gc_in_a_loop(project, run_cli):
    """Collects garbage, over and over, until it is called; then returns how each `ptpipe gc` ended."""
    ended, is_over = [], threading.Event()

    def collect():
        while not is_over.is_set():
            ended.append(run_cli("gc", "--keep-runs", "2", alone=True))
            time.sleep(0 if THOROUGH else 0.2)

    thread = threading.Thread(target=collect)

    def end():
        is_over.set()
        thread.join()
        return ended

    project.artifacts.mkdir()
    thread.start()
    yield end
    end()


def start_all(run_cli, names):
    return [run_cli.start("run", name, "--json", alone=True) for name in names]


def records_of(processes):
    """Wait for all, and return the records that they printed."""
    results = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), results
    return [json.loads(out) for out, _ in results]


def check_all(project, garbage):
    """Assert that no gc failed for any reason but a run or a store not yet there, and that all that counts is whole."""
    refused = [one for one in garbage if one.code]
    assert all(re.search("a run is using|there is no artifacts folder", one.err) for one in refused), refused
    store = Store(project.artifacts)
    for run in list_runs(store):
        assert check_run(store, run.folder)["finished"]
    check_index(store)
    assert not list(store.root.glob("*/.*"))


def test_runs_of_one_manifest_share_the_work_while_gc_goes_on(project, run_cli, gc_in_a_loop):
    project.write(STAGES.format(value=3))
    for _ in range(10 if THOROUGH else 1):
        records = records_of(start_all(run_cli, ["m.yaml"] * (8 if THOROUGH else 3)))
        assert len({record["run_id"][-5:] for record in records}) == len(records)
    check_all(project, gc_in_a_loop())


def test_many_manifests_share_a_store_while_gc_goes_on(project, run_cli, gc_in_a_loop):
    values = range(50 if THOROUGH else 4)
    for value in values:
        (project.folder / f"m-{value}.yaml").write_text(MANIFEST.format(value=value % 40))  # some share a name
    at_once = 8 if THOROUGH else 4
    for _ in range(3 if THOROUGH else 1):
        for start in range(0, len(values), at_once):
            records_of(start_all(run_cli, [f"m-{value}.yaml" for value in values[start : start + at_once]]))
    check_all(project, gc_in_a_loop())


# Large

HABITS = {
    "plan": ["plan", "m.yaml"],
    "plan of what is new": ["plan", "m.yaml", "-s", "one.value=7"],
    "runs": ["runs"],
    "runs of a name": ["runs", "--name", "other-7"],
    "show last": ["show", "last"],
    "a cached run": ["run", "m.yaml"],
    "its JSON": ["run", "m.yaml", "--json"],
}
OPENED = """
import sys
opened = 0
def hear(event, arguments):
    global opened
    opened += event == "open" and "artifacts" in str(arguments[0])
sys.addaudithook(hear)
import atexit
atexit.register(lambda: print(opened, file=sys.stderr))
import ptpipe.plan.vocabulary as vocabulary
vocabulary.BUILT_IN = ()
from ptpipe.cli import main
main()
"""


@pytest.fixture
def stores(project, run_cli, tmp_path):
    """Two folders with one manifest that was run: the store of the second is large."""
    folders = tmp_path / "empty", tmp_path / "large"
    for folder in folders:
        folder.mkdir()
        shutil.copy(project.plugin, folder)
        (folder / "m.yaml").write_text(MANIFEST.format(value=3))
    fill(Store(folders[1] / "artifacts"), *((100_000, 10_000) if THOROUGH else (1200, 300)))
    for folder in folders:
        subprocess.run(command("run", "m.yaml", alone=True), cwd=folder, env=environment(), check=True)
    return folders


def test_a_large_store_has_no_more_files_opened(stores):
    numbers = {}
    for name, arguments in HABITS.items():
        both = []
        for folder in stores:
            ended = subprocess.run(
                [sys.executable, "-c", OPENED, *arguments],
                cwd=folder, env=environment(), capture_output=True, text=True, check=False,
            )  # fmt: skip
            is_unknown = "--name" in arguments and folder == stores[0]
            assert ended.returncode == (2 if is_unknown else 0), ended.stderr
            both.append(int(ended.stderr.splitlines()[-1]))
        numbers[name] = both
    listed, most = numbers.pop("runs"), 50
    assert most <= listed[1] <= most + 5, "a record for each line"
    named = numbers.pop("runs of a name")
    assert named[1] <= most + 5
    assert {name: both for name, both in numbers.items() if both[1] > both[0] + 20} == {}, "20: earlier records"
    assert {name for name, both in numbers.items() if both[0] == 0} == set(), "the hook hears"


def cpu_seconds(folder, arguments):
    """Processor time of a command: what else the machine does doesn't count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    called = command(*arguments, alone=True)
    subprocess.run(called, cwd=folder, env=environment(), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.thorough
def test_a_large_store_takes_no_more_than_twice_the_time(stores):
    both = {}
    for name, arguments in HABITS.items():
        if "--name" in arguments:  # an error where there is no such run
            continue
        pairs = [[cpu_seconds(folder, arguments) for folder in stores] for _ in range(7)]
        both[name] = [min(times) for times in zip(*pairs, strict=True)]
    print("", *(f"{name:20} {empty:.3f} s  {large:.3f} s" for name, (empty, large) in both.items()), sep="\n")
    # gc reads every record and entry: what can't be read must be known before anything is deleted.
    taken = cpu_seconds(stores[1], ["gc", "--keep-runs", "10000"])
    print(f"gc                            {taken:.3f} s")
    assert {name: times for name, times in both.items() if times[1] > 2 * times[0]} == {}
    assert taken < 30
