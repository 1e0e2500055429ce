"""`ptpipe.run()` leaves the calling process as it was."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ptpipe
from ptpipe.execution.process_state import process_state_restored

MANIFESTS = Path(__file__).parents[3] / "manifests"


def snapshot():
    """What a run must not change."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    collector = gc.isenabled(), gc.get_freeze_count(), gc.get_threshold(), gc.get_debug()
    return list(sys.path), dict(os.environ), os.getcwd(), handlers, collector  # noqa: PTH109  # as it is spelled


INTRUSIVE = """
import gc, os, signal, sys
sys.path.insert(0, "/from/the/plugin")
os.environ["FROM_THE_PLUGIN"] = "1"
os.environ.pop("PATH")
os.chdir("/")
signal.signal(signal.SIGUSR1, lambda *_: None)
gc.disable()
"""


@pytest.mark.parametrize("is_collecting", [True, False])
@pytest.mark.parametrize("stages", ["one: {uses: toy.make}", "bad: {uses: toy.fail}", "no: {uses: toy.no}"])
def test_a_run_changes_nothing_of_the_process(project, stages, is_collecting):
    project.write("first: {uses: toy.make}")
    project.run()  # a process's first run frees cached objects that the setup of the tests has frozen
    plugin = project.plugin.read_text()
    project.plugin.write_text(plugin.replace("import errno", INTRUSIVE + "import errno"))
    assert INTRUSIVE in project.plugin.read_text()
    project.write(stages)
    was_collecting = gc.isenabled()
    try:
        (gc.enable if is_collecting else gc.disable)()
        before = snapshot()
        for _ in range(2):
            try:
                project.run()
            except ptpipe.ManifestError:
                assert "toy.no" in stages
            assert snapshot() == before
    finally:
        (gc.enable if was_collecting else gc.disable)()


def test_a_plan_that_was_loaded_changes_nothing_of_the_process(project):
    project.plugin.write_text(project.plugin.read_text().replace("import errno", INTRUSIVE + "import errno"))
    project.write("one: {uses: toy.make}")
    before = snapshot()
    plan = ptpipe.load_plan(project.manifest)
    assert snapshot() == before
    assert ptpipe.load_plan(plan, {"one.value": 4})["one"].options["value"] == 4
    assert snapshot() == before


def test_a_loaded_plan_runs_with_the_files_beside_its_plugin(project):
    (project.folder / "beside_toy.py").write_text("FACTOR = 10\n")
    project.edit("return Number(config.value)", "import beside_toy; return Number(config.value * beside_toy.FACTOR)")
    project.write("one: {uses: toy.make, with: {value: 3}}")
    before = list(sys.path)
    result = ptpipe.run(ptpipe.load_plan(project.manifest), artifacts=project.folder / "artifacts")
    assert result.artifact("one").value == 30 and sys.path == before
    del sys.modules["beside_toy"]


def test_files_beside_a_plugin_can_be_imported_in_a_run_and_by_its_artifacts(project):
    (project.folder / "beside_toy.py").write_text("FACTOR = 10\n")
    (project.folder / "beside_late.py").write_text("FACTOR = 7\n")
    project.edit("return Number(config.value)", "import beside_toy; return Number(config.value * beside_toy.FACTOR)")
    load = 'return cls(json.loads((folder / "number.json").read_text()))'
    project.edit(load, "import beside_late; " + load.replace("cls(", "cls(beside_late.FACTOR * "))
    project.write("one: {uses: toy.make, with: {value: 3}}")
    before = list(sys.path)
    result = project.run()
    assert sys.path == before
    assert result.artifact("one").value == 210
    assert sys.path == before
    for name in ("beside_toy", "beside_late"):
        del sys.modules[name]


def test_other_threads_set_no_signal_handlers(monkeypatch):
    errors = []

    def work():
        try:
            with process_state_restored():
                monkeypatch.setattr(signal, "getsignal", lambda number: object())
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


REAL = """
import sys
sys.path.insert(0, {folder!r})
from test_process_state import snapshot
import ptpipe

before = snapshot()
small = {{"data.num_train": 256, "compare.batch_sizes": [], "accuracy.max_drop": 1.0}}
result = ptpipe.run({manifest!r}, small, artifacts="artifacts")
after = snapshot()
assert "torch" in sys.modules
for old, new in zip(before, after):
    assert new == old, (old, new)
print(int(result.exit_code))
"""


@pytest.mark.plugins
@pytest.mark.slow
def test_a_real_run_changes_nothing_of_the_process(tmp_path):
    code = REAL.format(folder=str(Path(__file__).parent), manifest=str(MANIFESTS / "smoke.yaml"))
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr
