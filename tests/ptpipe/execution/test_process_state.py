"""`ptpipe.run()` leaves the calling process as it was."""

from __future__ import annotations

import gc
import locale
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

import ptpipe
from ptpipe.execution import process_state
from ptpipe.execution.process_state import process_state_restored, settings_restored

MANIFESTS = Path(__file__).parents[3] / "manifests"


def snapshot():
    """What a run must not change."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    collector = gc.isenabled(), gc.get_threshold(), gc.get_debug()
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
    project.run()
    plugin = project.plugin.read_text()
    project.plugin.write_text(plugin.replace("import errno", INTRUSIVE + "import errno"))
    assert INTRUSIVE in project.plugin.read_text()
    project.write(stages)
    was_collecting = gc.isenabled()
    try:
        (gc.enable if is_collecting else gc.disable)()
        before, frozen = snapshot(), gc.get_freeze_count()
        for _ in range(2):
            try:
                project.run()
            except ptpipe.ManifestError:
                assert "toy.no" in stages
            assert snapshot() == before
            assert gc.get_freeze_count() <= frozen  # objects that the setup of the tests has frozen may die
    finally:
        (gc.enable if was_collecting else gc.disable)()


def test_a_stage_that_leaves_the_process_fails(project, monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    project.edit("sys.exit(0)", "os._exit(0)")
    project.write("bad: {uses: toy.fail, with: {how: exit}}")
    result = project.run()
    assert (result.exit_code, result.stages["bad"].message, left) == (ptpipe.ExitCode.FAILED, "SystemExit: 0", [])
    assert result.stages["bad"].frames[-1].endswith("in fail: os._exit(0)")
    assert os._exit == left.append


def test_other_threads_and_forks_can_leave(monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)

    def leave():
        with pytest.raises(SystemExit):  # as the stand-in returns
            os._exit(3)

    with process_state_restored():
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        with monkeypatch.context() as fork, pytest.raises(SystemExit):
            fork.setattr(os, "getpid", lambda: 1)
            os._exit(4)
    assert left == [3, 4]


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


LEAVES = """
    import decimal, locale, os, signal, sys, warnings
    if config.note == "leave":
        os.environ["OMP_NUM_THREADS"] = "7"
        os.chdir("/")
        locale.setlocale(locale.LC_ALL, "C")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.setrecursionlimit(sys.getrecursionlimit() + 100)
        warnings.simplefilter("error")
        decimal.setcontext(decimal.Context(prec=3))
        raise StageError("left") if config.value else SystemExit(1)
    seen = os.environ.get("OMP_NUM_THREADS"), os.getcwd(), locale.setlocale(locale.LC_ALL), sys.getrecursionlimit()
    states = signal.getsignal(signal.SIGTERM), warnings.filters[:], decimal.getcontext().prec
    ctx.notice(repr(seen + states))
    return Number(config.value)
"""


REMOVES = """
    import os, sys
    os.environ["FROM_A_STAGE"] = "1"
    sys.setrecursionlimit(sys.getrecursionlimit() + 100)
    if config.note == "first":
        os.rmdir(os.getcwd())
    return Number(config.value)
"""


@pytest.mark.parametrize("value", [0, 1])
def test_no_stage_gets_what_another_has_set_for_the_process(project, value):
    project.edit("    return Number(config.value)\n", LEAVES)
    project.write(f"""
        one: {{uses: toy.make}}
        bad: {{uses: toy.make, with: {{note: leave, value: {value}}}}}
        two: {{uses: toy.make, with: {{value: 2}}}}
    """)
    result = project.run(options=ptpipe.RunOptions(keep_going=True))
    assert project.outcomes(result) == {"one": "done", "bad": "failed", "two": "done"}
    assert result.stages["one"].notices == result.stages["two"].notices != ()


def test_a_stage_whose_working_directory_is_removed_keeps_its_result(project, tmp_path, monkeypatch):
    project.edit("    return Number(config.value)\n", REMOVES)
    project.write("""
        one: {uses: toy.make, with: {note: first, value: 3}}
        two: {uses: toy.make, with: {value: 4}}
    """)
    (tmp_path / "gone").mkdir()
    before, depth = os.environ.copy(), sys.getrecursionlimit()
    monkeypatch.chdir(tmp_path / "gone")
    result = project.run()
    assert project.outcomes(result) == {"one": "done", "two": "done"}
    assert (os.environ.copy(), sys.getrecursionlimit()) == (before, depth)


def test_a_state_that_cannot_be_restored_keeps_no_other_from_it(monkeypatch):
    depth = sys.getrecursionlimit()
    monkeypatch.setenv("SET_BEFORE", "1")
    with pytest.raises(ZeroDivisionError), settings_restored():
        monkeypatch.setattr(locale, "setlocale", lambda *_: 1 / 0)
        sys.setrecursionlimit(depth + 100)
        os.environ["SET_BEFORE"] = "2"
    assert (sys.getrecursionlimit(), os.environ["SET_BEFORE"]) == (depth, "1")


def test_the_callers_filters_of_warnings_stay_before_those_that_a_stage_leaves():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with settings_restored():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("ignore", "known to a module", UserWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module="noisy")
        warnings.warn("known to a module", UserWarning, stacklevel=1)
        warnings.warn_explicit("of another", UserWarning, "noisy.py", 1)
        with pytest.raises(UserWarning, match="another stage's"):
            warnings.warn("another stage's", UserWarning, stacklevel=1)


def test_the_handler_of_ended_children_is_that_of_the_whole_run():
    before = signal.getsignal(signal.SIGCHLD)

    def handle(*_):
        pass

    with process_state_restored():
        with settings_restored():
            signal.signal(signal.SIGCHLD, handle)
        assert signal.getsignal(signal.SIGCHLD) is handle
    assert signal.getsignal(signal.SIGCHLD) is before


@pytest.mark.plugins
def test_torch_sets_its_handler_of_ended_workers_again_after_a_run():
    from torch.utils.data._utils import signal_handling

    with process_state_restored():
        signal_handling._SIGCHLD_handler_set = False
        signal_handling._set_SIGCHLD_handler()
    assert not signal_handling._SIGCHLD_handler_set


@pytest.mark.parametrize("number", range(3))
def test_an_interrupt_while_a_run_begins_refuses_no_later_one(number):
    begin, tracer, lines = process_state_restored.__wrapped__.__code__, sys.gettrace(), []

    def interrupt(frame, event, argument):
        if frame.f_code is begin and event == "line":
            lines.append(frame.f_lineno)
            if len(lines) > number:
                raise KeyboardInterrupt
        return interrupt

    try:
        sys.settrace(interrupt)
        with pytest.raises(KeyboardInterrupt):
            process_state_restored().__enter__()
    finally:
        sys.settrace(tracer)
        left = list(process_state._entered)
        process_state._entered.clear()
    assert left == []


def test_an_alarm_ends_with_its_handler():
    before = signal.getitimer(signal.ITIMER_REAL)  # of the time limit of this test
    try:
        with settings_restored():
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.alarm(100)
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_a_second_thread_runs_nothing_meanwhile(project):
    project.write("one: {uses: toy.make}")
    refused = []

    def work():
        for call in (project.run, project.plan, lambda: ptpipe.cache_status(plan, artifacts=project.artifacts)):
            try:
                call()
            except ptpipe.UsageError as error:
                refused.append(str(error))

    plan = project.plan()
    before = list(sys.path), sys.stdout
    with process_state_restored():
        assert project.run().exit_code == 0  # one inside the other, in one thread
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(refused) == 3
    assert "running in another thread" in refused[0] and "a process of its own" in refused[0]
    assert (list(sys.path), sys.stdout) == before
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(refused) == 3  # the others have ended


FORK = """
import os, threading
from ptpipe.execution.process_state import process_state_restored

def fork():
    child = os.fork()
    if child == 0:
        with process_state_restored():
            entered = 7
        os._exit(entered)  # inside it would be refused
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

with process_state_restored():
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
"""


def test_a_process_that_was_forked_during_a_run_has_its_own():
    # In a process of its own: one with other threads, such as torch's, may block for good once it is forked.
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "7\n"


LEAVE = """
import os, threading
from ptpipe.execution.process_state import process_state_restored

with process_state_restored():
    kept = os._exit
    if {in_thread}:
        threading.Thread(target=kept, args=({status},)).start()
        threading.Event().wait(60)
kept({status})
"""


@pytest.mark.parametrize(("in_thread", "status", "code"), [(True, 0, 1), (True, 5, 5), (False, 0, 0), (False, 6, 6)])
def test_another_thread_and_what_comes_later_may_leave(in_thread, status, code):
    """But no thread with 0, as a run that has ended well."""
    script = LEAVE.format(in_thread=in_thread, status=status)
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == code
