"""One walk over a plan: what is done, what is taken, what is told, and every ending in this process."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ptpipe import ExitCode, IntegrityError, ManifestError, PtpipeError, Reporter
from ptpipe.events import Metric, Notice, Progress
from ptpipe.execution.engine import RunOptions, source_digests
from ptpipe.store.store import Store

SUM = """
one: {uses: toy.make, with: {value: 3, note: look here}}
two: {uses: toy.make, with: {value: 2}}
sum: {uses: toy.add, needs: {a: one, b: two}}
"""


class Ear(Reporter):
    """Remembers what it hears."""

    def __init__(self):
        self.started, self.events, self.finished, self.ends, self.order = [], [], [], [], []

    def run_started(self, event):
        self.begin = event
        self.order.append("run_started")

    def stage_started(self, event):
        self.started.append(event)
        self.order.append(f"started {event.stage_id}")

    def event(self, event):
        self.events.append(event)

    def stage_finished(self, event):
        self.finished.append(event)
        self.order.append(f"finished {event.stage_id}")

    def run_finished(self, event):
        self.ends.append(event)
        self.order.append("run_finished")

    @property
    def notices(self):
        return [event.text for event in self.events if isinstance(event, Notice)]


def record_of(result):
    return json.loads((result.folder / "record.json").read_text(), parse_constant=pytest.fail)


def log_of(result):
    return (result.folder / "log.txt").read_text()


# Taking from the store


def test_the_second_run_is_all_cached(project):
    project.write(SUM)
    first, ear = project.run(), Ear()
    assert project.outcomes(first) == {"one": "done", "two": "done", "sum": "done"}
    assert first.exit_code == ExitCode.DONE
    assert first.artifact("sum").value == 5
    second = project.run(reporters=[ear])
    assert project.outcomes(second) == {"one": "cached", "two": "cached", "sum": "cached"}
    assert second.exit_code == ExitCode.DONE
    assert second.artifact("sum").value == 5
    assert {event.key for event in second.stages.values()} == {event.key for event in first.stages.values()}
    assert not ear.events, "nothing works"


def test_metrics_and_notices_are_said_again_from_the_store(project):
    project.write(SUM)
    done, cached = project.run().stages["one"], project.run().stages["one"]
    assert done.metrics == cached.metrics == {"value": 3.0, "seed": 0}
    assert done.notices == cached.notices == ("look here",)
    assert done.made_at == cached.made_at != ""
    assert done.outputs == cached.outputs
    assert cached.outputs["output"]["summary"] == {"value": 3.0}


def test_only_what_changed_is_done(project):
    project.write(SUM)
    project.run()
    assert project.outcomes(project.run({"two.value": 7})) == {"one": "cached", "two": "done", "sum": "done"}
    assert project.outcomes(project.run()) == dict.fromkeys(["one", "two", "sum"], "cached"), "the old ones are kept"


@pytest.mark.plugins
def test_built_in_plugins_count_by_their_bytes_and_others_by_their_code(project, monkeypatch):
    monkeypatch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ("ptpipe_prune",))
    project.write("one: {uses: toy.make}")
    sources = source_digests(project.plan(), Store(project.artifacts))
    built_in, own = sources.code("ptpipe_prune")["ptpipe_prune"], sources.code("ptpipe_file_toy")["ptpipe_file_toy"]
    assert built_in.digest == built_in.sha256 and own.digest != own.sha256


def test_results_belong_to_no_manifest(project):
    project.write(SUM)
    project.run()
    project.write("deux: {uses: toy.make, with: {value: 2}}", head="name: another\nplugins: [./toy.py]")
    assert project.outcomes(project.run()) == {"deux": "cached"}


def test_fresh_work_is_noticed_below(project):
    project.write(
        "dice: {uses: toy.dice}\nsum: {uses: toy.add}\ngate: {uses: toy.gate, needs: {a: sum}, with: {least: 0}}"
    )
    first = project.run()
    again = project.run(options=RunOptions(fresh=("dice",)))
    assert project.outcomes(again) == {"dice": "done", "sum": "done", "gate": "done"}, "by objects, not by keys"
    assert again.artifact("sum").value == 2 * again.artifact("dice").value != first.artifact("sum").value
    assert again.stages["sum"].key == first.stages["sum"].key
    assert project.outcomes(project.run()) == dict.fromkeys(["dice", "sum", "gate"], "cached")


def test_fresh_work_that_gives_the_same_disturbs_nobody(project):
    project.write(SUM)
    project.run()
    assert project.outcomes(project.run(options=RunOptions(fresh=("one",)))) == {
        "one": "done",
        "two": "cached",
        "sum": "cached",
    }


def test_measured_values_name_their_machine(project):
    project.write("one: {uses: toy.make}\ntime: {uses: toy.clock}")
    first, second = project.run(), project.run()
    assert first.stages["time"].machine == second.stages["time"].machine != ""
    assert first.stages["one"].machine == ""
    assert project.outcomes(second)["time"] == "cached"


# Failures


FAILING = """
one: {uses: toy.make}
bad: {uses: toy.fail, needs: {a: one}, with: {how: error}}
below: {uses: toy.split, needs: {a: bad}}
aside: {uses: toy.split, needs: {a: one}}
"""


def test_after_a_failure_the_rest_is_skipped(project):
    project.write(FAILING)
    ear = Ear()
    result = project.run(reporters=[ear])
    assert result.exit_code == ExitCode.FAILED
    assert project.outcomes(result) == {"one": "done", "bad": "failed", "below": "skipped", "aside": "skipped"}
    assert result.stages["bad"].message == "told to fail"
    assert result.stages["bad"].frames == (), "the user's mistake needs no traceback"
    assert result.stages["bad"].metrics == {"before": 1}
    assert result.stages["below"].message == "needs bad"
    assert result.stages["aside"].message == "a stage above failed; --keep-going would run this one"
    assert [event.stage_id for event in ear.started] == ["one", "bad"]


def test_keep_going_does_what_can_be_done(project):
    project.write(FAILING)
    result = project.run(options=RunOptions(keep_going=True))
    assert result.exit_code == ExitCode.FAILED
    assert project.outcomes(result) == {"one": "done", "bad": "failed", "below": "skipped", "aside": "done"}


def test_failures_are_never_cached(project):
    project.write(FAILING)
    project.run()
    assert project.outcomes(project.run())["bad"] == "failed"
    assert project.outcomes(project.run({"bad.how": "not at all"})) == {
        "one": "cached", "bad": "done", "below": "done", "aside": "done",
    }  # fmt: skip


def test_a_bug_shows_the_plugins_frames_and_hides_the_rest_in_the_log(project):
    project.write("bad: {uses: toy.fail, with: {how: bug}}")
    result = project.run()
    event = result.stages["bad"]
    assert result.exit_code == ExitCode.FAILED
    assert event.message == "ZeroDivisionError: division by zero"
    assert len(event.frames) == 2
    assert event.frames[0].endswith("in fail: _bug(0)")
    assert event.frames[1].endswith("in _bug: return 1 / amount")
    assert all(frame.startswith("toy.py:") for frame in event.frames)
    assert "Traceback (most recent call last)" in log_of(result)
    assert "engine.py" in log_of(result)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("toy.fail, with: {how: exit}", "SystemExit: 0"),
        ("toy.fail, with: {how: mute}", "MuteError: <its __str__ raised ValueError>"),
        ("toy.odd, with: {how: link}", "ValueError: an artifact is plain files and folders, and link is neither"),
        ("toy.odd, with: {how: full disk}", "the disk is full: [Errno 28] No space left on device: '{new}'"),
        ("toy.odd, with: {how: wrong type}", "TypeError: toy.odd promised output: Number, returned Text"),
        (
            "toy.odd, with: {how: metric}",
            "TypeError: metric path: Object of type PosixPath is not JSON serializable; "
            "say float(...), int(...) or str(...)",
        ),
    ],
)
def test_every_way_to_fail_ends_in_good_order(project, stage, message):
    project.write(f"one: {{uses: toy.make}}\nbad: {{uses: {stage}}}")
    ear = Ear()
    result = project.run(reporters=[ear])
    assert result.exit_code == ExitCode.FAILED
    new = re.escape(f"{project.artifacts}/objects/.new-") + "[0-9a-f]{16}"
    assert re.fullmatch(re.escape(message).replace(re.escape("{new}"), new), result.stages["bad"].message)
    assert project.outcomes(project.run())["bad"] == "failed"
    assert ear.order[-2:] == ["finished bad", "run_finished"]
    assert not list(project.artifacts.glob("objects/.*"))


def test_what_a_stage_prints_goes_to_stderr(project, capsys):
    project.write("odd: {uses: toy.odd, with: {how: print}}")
    project.run()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "on stdout" in printed.err


def test_results_that_json_has_not(project):
    project.edit("ctx.metric(before=1)", "ctx.metric(before=float('nan'))")
    project.write("odd: {uses: toy.odd, with: {how: nan}}\nbad: {uses: toy.fail, with: {how: no}}")
    assert project.run().exit_code == ExitCode.DONE
    cached = project.run()
    assert project.outcomes(cached) == {"odd": "cached", "bad": "cached"}
    assert repr(cached.stages["bad"].metrics) == "{'before': nan}"
    assert record_of(cached)["stages"][1]["metrics"] == {"before": "NaN"}


# Gates


GATE = "one: {uses: toy.make, with: {value: 3}}\ngate: {uses: toy.gate, with: {least: 5}}\nlast: {uses: toy.split}"


def test_a_gate_that_refuses_ends_the_run_after_the_others(project):
    project.write(GATE)
    for outcome in ("done", "cached"):
        result = project.run()
        assert result.exit_code == ExitCode.REFUSED
        assert project.outcomes(result) == {"one": outcome, "gate": "refused", "last": outcome}
        assert result.stages["gate"].message == "3.0 against 5.0"
    assert project.run({"gate.least": 3}).exit_code == ExitCode.DONE


GUARD = """class Guarded(NamedTuple):
    number: Number
    verdict: Verdict


@stage("toy.guard")
def guard(config: GateConfig, ctx: Context, a: Number) -> Guarded:
    return Guarded(a, Verdict(**vars(gate(config, ctx, a))))


@stage("toy.read")
def read(config: StageConfig, ctx: Context, verdict: Verdict) -> Number:
    return Number(5)


@stage("toy.dice")"""


def test_what_a_gate_guards_is_given_to_no_stage_where_it_refuses(project):
    project.edit('@stage("toy.dice")', GUARD)
    project.edit("return [make,", "return [guard, read, make,")
    project.write("""
        one: {uses: toy.make, with: {value: 3}}
        guard: {uses: toy.guard, needs: {a: one}, with: {least: 5}}
        sum: {uses: toy.add, needs: {a: guard, b: one}}
        sum2: {uses: toy.add, needs: {a: sum, b: one}}
        read: {uses: toy.read, needs: {verdict: guard}}
        other: {uses: toy.make}
    """)
    for done in ("done", "cached"):
        result = project.run()
        assert project.outcomes(result) == {
            "one": done, "guard": "refused", "sum": "skipped", "sum2": "skipped", "read": done, "other": done,
        }  # fmt: skip
        assert result.exit_code == ExitCode.REFUSED
        assert result.stages["sum"].message == "needs guard, which did not pass"
    assert set(project.outcomes(project.run({"guard.least": 2})).values()) == {"done", "cached"}


@pytest.mark.parametrize(("told", "code", "outcome"), [(True, 4, "undecided"), (False, 0, "done")])
def test_a_gate_that_cannot_decide(project, told, code, outcome):
    project.write(GATE)
    overrides = {"gate.unsure_at": 3, "gate.fail_undecided": told}
    result = project.run(overrides)
    assert (result.exit_code, project.outcomes(result)["gate"]) == (code, outcome)
    assert result.stages["gate"].message == ("3.0 against 5.0" if told else "")
    assert project.run(overrides).exit_code == code, "from the store"


def test_of_several_endings_the_gravest_counts(project):
    gates = "one: {uses: toy.make}\nunsure: {uses: toy.gate, with: {least: 9, unsure_at: 1, fail_undecided: true}}\n"
    refused = "no: {uses: toy.gate, with: {least: 9}}\n"
    project.write(gates + refused)
    assert project.run().exit_code == ExitCode.REFUSED
    project.write(refused.replace("no:", "one: {uses: toy.make}\nno:") + gates.partition("\n")[2])
    assert project.run().exit_code == ExitCode.REFUSED
    project.write(gates + refused + "bad: {uses: toy.fail, with: {how: error}}")
    assert project.run().exit_code == ExitCode.FAILED


def test_a_verdict_that_hides_its_decision_is_the_plugins_fault(project):
    project.edit('name is a verdict too."""', 'name."""\n\n    def summary(self):\n        return {}')
    project.write(GATE)
    result = project.run()
    assert project.outcomes(result)["gate"] == "failed"
    assert result.stages["gate"].message == "TypeError: Strict.summary() omits the verdict's own"


# Reporters


def test_everything_is_told_in_order(project):
    project.write(SUM)
    ear = Ear()
    result = project.run({"two.value": 4}, reporters=[ear], options=RunOptions(verbosity=1))
    assert ear.order == [
        "run_started", "started one", "finished one", "started two", "finished two", "started sum", "finished sum",
        "run_finished",
    ]  # fmt: skip
    begin = ear.begin
    assert (begin.run_id, begin.name, begin.seed, begin.verbosity) == (result.run_id, "toy", 0, 1)
    assert begin.stage_ids == ("one", "two", "sum")
    assert begin.overrides == ("two.value=4",)
    assert begin.manifest_path == str(project.manifest)
    lines = project.manifest.read_text().splitlines()
    starts = [f"  {stage_id}:" for stage_id in begin.stage_ids]
    assert [lines[place.line - 1].startswith(start) for place, start in zip(begin.locations, starts, strict=True)]
    assert {(place.path, place.column) for place in begin.locations} == {(str(project.manifest), 3)}
    assert begin.started_at == json.loads((result.folder / "record.json").read_text())["started_at"]
    assert [(event.position, event.num_stages) for event in ear.started] == [(1, 3), (2, 3), (3, 3)]
    assert Progress("one", 1, 2, "digits") in ear.events
    assert Metric("one", "value", 3.0) in ear.events
    (end,) = ear.ends
    assert end.stages == tuple(ear.finished)
    assert (end.exit_code, end.interrupted) == (0, False)
    assert "one made it" in log_of(result)


@pytest.mark.parametrize(
    "stages",
    [
        SUM,
        FAILING,
        GATE,
        "bad: {uses: toy.fail, with: {how: bug}}\none: {uses: toy.make}",
        "bad: {uses: toy.fail, with: {how: exit}}\none: {uses: toy.make}",
        "one: {uses: toy.make}\nbad: {uses: toy.fail, with: {how: interrupt}}\nlast: {uses: toy.make}",
    ],
)
def test_each_stage_ends_once_and_so_does_the_run(project, stages):
    project.write(stages)
    for _ in range(2):
        ear = Ear()
        result = project.run(reporters=[ear])
        ids = [stage.id for stage in result.plan.stages]
        assert [event.stage_id for event in ear.finished] == ids
        assert len(ear.ends) == 1
        assert [stage["stage_id"] for stage in record_of(result)["stages"]] == ids
        assert record_of(result)["finished"] is True
        assert record_of(result)["exit_code"] == result.exit_code


def test_an_interrupt_ends_the_run_in_good_order(project):
    project.write(
        "one: {uses: toy.make}\nbad: {uses: toy.fail, with: {how: interrupt}}\nlast: {uses: toy.split, needs: {a: one}}"
    )
    ear = Ear()
    result = project.run(reporters=[ear])
    assert result.exit_code == ExitCode.INTERRUPTED
    assert project.outcomes(result) == {"one": "done", "bad": "interrupted", "last": "skipped"}
    assert result.stages["bad"].message == "interrupted"
    assert result.stages["last"].message == "the run was interrupted"
    assert ear.ends[0].interrupted


def test_runs_are_numbered(project, monkeypatch):
    project.write(SUM)
    now = type("Now", (), {"now": staticmethod(lambda zone: datetime(2026, 1, 2, 3, 4, 5, tzinfo=zone))})
    monkeypatch.setattr("ptpipe.execution.record.datetime", now)
    assert [project.run().run_id for _ in range(2)] == ["20260102-030405-toy-00001", "20260102-030405-toy-00002"]
    (project.artifacts / "runs" / "20250102-030405-other-00009").write_text("")
    assert project.run().run_id == "20260102-030405-toy-00010"


def test_a_run_is_never_seen_without_its_record(project, monkeypatch):
    project.write(SUM)
    monkeypatch.setattr("ptpipe.execution.record.write_document", lambda path, text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        project.run()
    assert [path.name[:5] for path in (project.artifacts / "runs").iterdir()] == [".new-"]
    monkeypatch.undo()
    project.run()
    with monkeypatch.context() as patched:
        patched.setattr("ptpipe.execution.record.write_document", full_disk)
        with pytest.raises(PtpipeError, match=r"cannot write to .*-toy-00002: No space left on device"):
            project.run()
    assert len(list((project.artifacts / "runs").iterdir())) == 2, "and that of before"


def full_disk(path, text):
    raise OSError(errno.ENOSPC, "No space left on device")


class Raises(Ear):
    """Raises at one kind of event, or at every one."""

    def __init__(self, what, error):
        super().__init__()
        self.what, self.error = what, error

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "what"):
            raise object.__getattribute__(self, "error")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("what", ["run_started", "stage_started", "event", "stage_finished", "run_finished"])
def test_an_observer_that_raises_is_named_once_and_changes_nothing(project, what):
    project.write(SUM)
    ear = Ear()
    result = project.run(reporters=[Raises(what, ValueError("no")), ear])
    assert result.exit_code == ExitCode.DONE
    assert sum("is switched off for this run" in text for text in ear.notices) == 1
    assert len(ear.finished) == 3
    assert result.stages["one"].notices == ("look here",), "the run's troubles are not the stage's"
    assert "ValueError: no" in log_of(result)


@pytest.mark.parametrize("body", ["return 1 / 0", "return 3", "raise SystemExit(0)", "return [1 / 0 for _ in '1']"])
def test_observers_that_cannot_be_made_are_named_and_change_nothing(project, body):
    (project.folder / "mute.py").write_text(
        f"from ptpipe import hookimpl\n@hookimpl\ndef ptpipe_reporters():\n    {body}\n"
    )
    project.write(SUM, head="plugins: [./toy.py, ./mute.py]")
    ear = Ear()
    result = project.run(reporters=[ear])
    assert result.exit_code == ExitCode.DONE
    assert ear.notices[0].startswith("plugin ./mute.py offers no reporter in this run: ")
    assert "offers no reporter" in log_of(result)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_an_observer_that_is_interrupted(project, error):
    project.write(SUM)
    ear = Ear()
    result = project.run(reporters=[Raises("stage_started", error), ear])
    assert result.exit_code == (ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.DONE)
    assert len(ear.finished) == 3
    assert len(ear.ends) == 1


LAUNCHER = """
from ptpipe import hookimpl
CALLS = []

@hookimpl
def ptpipe_launch(call, tell):
    CALLS.append(call)
    {body}
"""


def with_launcher(project, body):
    (project.folder / "launcher.py").write_text(LAUNCHER.format(body=body))
    return {"head": "plugins: [./toy.py, ./launcher.py]"}


def test_a_plugins_launcher_goes_first(project):
    body = "import ptpipe_file_toy as toy; return {'output': toy.Number(42)} if call.stage_id == 'two' else None"
    project.write(SUM, **with_launcher(project, body))
    result = project.run()
    assert project.outcomes(result) == dict.fromkeys(["one", "two", "sum"], "done")
    assert result.artifact("sum").value == 45
    (plugin,) = [plugin for plugin in result.plan.vocabulary.plugins if plugin.name == "./launcher.py"]
    one, _, total = plugin.module.CALLS
    assert (one.stage_id, one.kind, one.options["value"], one.workers) == ("one", "toy.make", 3.0, 1)
    assert total.inputs["b"][0].digest == result.stages["two"].outputs["output"]["digest"]
    assert type(total).from_json(total.to_json()) == total


def test_what_a_plugins_launcher_tells_belongs_to_the_stage(project):
    body = "from ptpipe.events import Metric; tell(Metric(call.stage_id, 'by', 'launcher'))"
    project.write(SUM, **with_launcher(project, body))
    assert project.run().stages["one"].metrics["by"] == "launcher"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {}", "TypeError: toy.make has the outputs output; ptpipe_launch returned {}"),
        ("return 3", "TypeError: toy.make has the outputs output; ptpipe_launch returned 3"),
        (
            "import ptpipe_file_toy as toy; return {'output': toy.Text('3')}",
            "TypeError: toy.make has output: Number; ptpipe_launch returned <ptpipe_file_toy.Text object at ",
        ),
        ("return {'output': '3'}", "TypeError: toy.make has output: Number; ptpipe_launch returned '3'"),
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_launcher_that_breaks_fails_the_stage(project, body, message):
    project.write(SUM, **with_launcher(project, body))
    result = project.run()
    assert result.exit_code == ExitCode.FAILED
    assert re.sub("(?<= at )0x.*", "", result.stages["one"].message) == message


SAVED = """
    import json, os, shutil
    from pathlib import Path
    folder = Path(call.artifacts) / "scratch" / call.key / "saved"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = folder / "number.json"
    {write}
    return {{"output": folder}}"""


def test_a_folder_from_another_process_is_adopted(project):
    write = "file.write_text('42'); (Path(call.folder) / 'inode').write_text(str(file.stat().st_ino))"
    project.write("one: {uses: toy.make}", **with_launcher(project, SAVED.format(write=write)))
    result = project.run()
    assert result.artifact("one").value == 42
    digest = result.stages["one"].outputs["output"]["digest"]
    stored = result.store.files(digest) / "number.json"
    assert stored.stat().st_ino == int((project.folder / "inode").read_text()), "written once"
    assert result.stages["one"].outputs["output"]["summary"] == {"value": 42}
    assert not list(project.artifacts.glob("scratch/*"))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        ("file.write_text('{')", "JSONDecodeError: Expecting property name"),
        ("(folder / 'text.txt').write_text('no number')", "FileNotFoundError: "),
        ("folder.rmdir()", "ValueError: "),
    ],
)
def test_a_folder_that_holds_no_such_artifact_fails_the_stage(project, write, message):
    project.write("one: {uses: toy.make}", **with_launcher(project, SAVED.format(write=write)))
    result = project.run()
    assert result.exit_code == ExitCode.FAILED
    assert result.stages["one"].message.startswith(message)
    assert not list(project.artifacts.glob("objects/??/*"))


def test_an_adopted_verdict_decides(project):
    write = """content = '{"decision": "refused", "reason": "small", "facts": {}, "fail_undecided": false}'
    (folder / "verdict.json").write_text(content)"""
    body = SAVED.format(write=write).replace(
        "\n    import", "\n    if call.kind != 'toy.gate': return None\n    import", 1
    )
    project.write(GATE, **with_launcher(project, body))
    result = project.run()
    assert (result.exit_code, result.stages["gate"].message) == (ExitCode.REFUSED, "small")


def test_the_engine_fails_loudly_and_tells_the_end(project, monkeypatch):
    def broken(self, *_):
        raise AssertionError("a bug of ours")

    monkeypatch.setattr("ptpipe.execution.engine._Execution._place_deliverables", broken)
    project.write(SUM)
    ear = Ear()
    with pytest.raises(AssertionError, match="a bug of ours"):
        project.run(reporters=[ear])
    assert len(ear.finished) == 3
    assert (len(ear.ends), ear.ends[0].exit_code) == (1, ExitCode.BUG)


# Altered and damaged results


def damage(project, digest, content=b"[]"):
    path = project.artifacts / "objects" / digest[:2] / digest / "files" / "number.json"
    path.chmod(0o644)
    path.write_bytes(content)


def digest_of(result, stage_id, output="output"):
    return result.stages[stage_id].outputs[output]["digest"]


def test_an_altered_object_is_quarantined_said_aloud_and_made_again(project):
    project.write(SUM)
    first = project.run()
    damage(project, digest_of(first, "one"))
    ear = Ear()
    second = project.run({"two.value": 4}, reporters=[ear])
    assert second.exit_code == ExitCode.DONE
    assert second.artifact("sum").value == 7
    (text,) = [text for text in ear.notices if "altered" in text]
    assert text.startswith(f"object {digest_of(first, 'one')[:12]} was altered: number.json; moved to ")
    assert text.endswith(", and one is rerun")
    assert second.stages["sum"].notices == (text,), "in the record too"
    assert text in log_of(second)
    (quarantined,) = project.artifacts.glob("quarantine/*")
    assert (quarantined / "files" / "number.json").read_bytes() == b"[]"
    third = project.run({"two.value": 4})
    assert project.outcomes(third) == dict.fromkeys(["one", "two", "sum"], "cached")
    assert third.stages["sum"].notices == (), "what befell a run is no part of the result"


def test_altered_objects_far_above_are_made_again(project):
    project.write(
        "one: {uses: toy.make, with: {value: 3}}\n"
        "mid: {uses: toy.add, needs: {a: one, b: one}}\n"
        "end: {uses: toy.add, needs: {a: mid, b: mid}}"
    )
    first = project.run()
    damage(project, digest_of(first, "one"))
    damage(project, digest_of(first, "mid"))
    (project.artifacts / "index" / f"{first.stages['end'].key}.json").unlink()
    second = project.run()
    assert second.artifact("end").value == 12
    assert len(list(project.artifacts.glob("quarantine/*"))) == 2


def test_an_altered_object_that_cannot_be_made_again(project):
    check = "if (Path(__file__).parent / 'gone').exists():\n        raise StageError('the data are gone')\n    "
    project.edit("return Number(config.value)", check + "return Number(config.value)")
    project.write(SUM)
    first = project.run()
    damage(project, digest_of(first, "one"))
    (project.folder / "gone").touch()
    second = project.run({"two.value": 2.5})
    assert second.exit_code == ExitCode.FAILED
    (project.folder / "gone").unlink()
    third = project.run({"two.value": 2.5})
    assert third.artifact("sum").value == 5.5


def test_an_altered_object_is_no_artifact_for_python(project):
    project.write(SUM)
    result = project.run()
    damage(project, digest_of(result, "one"))
    again = project.run()
    with pytest.raises(IntegrityError, match=f"object {digest_of(result, 'one')[:12]} was altered: number.json"):
        again.artifact("one")


def entry_path(project, result, stage_id):
    return project.artifacts / "index" / f"{result.stages[stage_id].key}.json"


def folder_in_place(path):
    path.unlink()
    path.mkdir()


def link_in_place(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "damage_entry",
    [
        lambda path: path.write_text(path.read_text()[:100]),
        lambda path: path.write_text(path.read_text().replace("3.0", "4.0")),
        folder_in_place,
        link_in_place,
    ],
    ids=["cut short", "another figure", "folder", "link"],
)
def test_a_damaged_index_entry_is_reported_and_made_again(project, damage_entry):
    project.write(SUM)
    first = project.run()
    damage_entry(entry_path(project, first, "one"))
    second = project.run()
    assert project.outcomes(second) == {"one": "done", "two": "cached", "sum": "cached"}
    assert second.stages["one"].metrics == first.stages["one"].metrics
    _, notice = second.stages["one"].notices
    (place,) = project.artifacts.glob("quarantine/*")
    assert notice.startswith(f"{entry_path(project, first, 'one')} was altered")
    assert notice.endswith(f"; moved to {place}, and one is rerun")
    assert set(project.outcomes(project.run()).values()) == {"cached"}


def test_an_index_entry_that_became_a_folder_does_not_stop_fresh_work(project):
    project.write(SUM)
    folder_in_place(entry_path(project, project.run(), "one"))
    assert project.outcomes(project.run(options=RunOptions(fresh=("one",))))["one"] == "done"
    assert set(project.outcomes(project.run()).values()) == {"cached"}


def test_two_swapped_entries_are_two_damaged_ones(project):
    project.write(SUM)
    first = project.run()
    one, two = entry_path(project, first, "one"), entry_path(project, first, "two")
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    second = project.run()
    assert project.outcomes(second) == {"one": "done", "two": "done", "sum": "cached"}
    assert {event.stage_id: event.metrics for event in second.stages.values()} == {
        event.stage_id: event.metrics for event in first.stages.values()
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: {"outputs": {"outpus": entry.outputs["output"]}},
        lambda entry: {"outputs": {}},
        lambda entry: {"inputs": {"a": entry.inputs["a"]}},
        lambda entry: {"inputs": {**entry.inputs, "b": ()}},
    ],
    ids=["another output", "no output", "an input less", "an unconnected input"],
)
def test_an_entry_that_fits_no_port_is_damage(project, change):
    project.write(SUM + "end: {uses: toy.split, needs: {a: sum}}")
    first = project.run()
    entry = first.store.read_entry(first.stages["sum"].key)
    first.store.put_entry(replace(entry, **change(entry)))
    second = project.run()
    assert project.outcomes(second) == {"one": "cached", "two": "cached", "sum": "done", "end": "cached"}
    assert "is no result of toy.add; moved to " in second.stages["sum"].notices[0]


@pytest.mark.parametrize("stage_id", ["sum", "end"])
@pytest.mark.parametrize("stored", ["kept", "gone"])
def test_what_no_stage_reads_is_verified_too(project, stage_id, stored):
    project.write(SUM + "end: {uses: toy.split, needs: {a: one}}")
    first = project.run()
    digest = digest_of(first, stage_id, "output" if stage_id == "sum" else "high")
    damage(project, digest)
    if stored == "gone":
        shutil.rmtree(project.artifacts / "objects" / digest[:2] / digest)
    second = project.run()
    assert project.outcomes(second) == {**dict.fromkeys(["one", "two", "sum", "end"], "cached"), stage_id: "done"}
    (notice,) = second.stages[stage_id].notices
    what = "is missing, or its record" if stored == "gone" else "was altered: number.json; moved to "
    assert notice.startswith(f"object {digest[:12]} {what}")
    assert notice.endswith(f"{stage_id} is rerun")
    second.store.verify(digest)
    assert second.stages[stage_id].outputs == first.stages[stage_id].outputs
    assert set(project.outcomes(project.run()).values()) == {"cached"}


def test_several_altered_objects_of_one_stage_are_all_reported(project):
    project.write("one: {uses: toy.make}\nend: {uses: toy.split}")
    first = project.run()
    for output in ("low", "high"):
        damage(project, digest_of(first, "end", output))
    assert len(project.run().stages["end"].notices) == 2
    assert len(list(project.artifacts.glob("quarantine/*"))) == 2


def test_an_altered_verdict_is_judged_again(project):
    project.write(GATE)
    first = project.run()
    digest = digest_of(first, "gate")
    path = first.store.files(digest) / "verdict.json"
    path.chmod(0o644)
    path.write_text(path.read_text().replace("refused", "passed"))
    second = project.run()
    assert second.exit_code == ExitCode.REFUSED
    assert f"object {digest[:12]} was altered: verdict.json" in second.stages["gate"].notices[0]


def test_a_flipped_bit_never_opens_a_gate(project):
    project.write(GATE)
    first = project.run()
    path = entry_path(project, first, "gate")
    content = path.read_bytes()
    start = content.index(b'"decision"')
    for position in range(start, start + len(b'"decision": "refused"')):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        result = project.run()
        assert (result.exit_code, project.outcomes(result)["gate"]) == (ExitCode.REFUSED, "refused")
        assert result.stages["gate"].notices[0].startswith(f"{path} was altered; moved to ")


@pytest.mark.parametrize(
    "change",
    [
        {"decision": "sefused"},
        {"decision": "REFUSED"},
        {"decision": None},
        {"decision": "undecided", "fail_undecided": 0},
        {"decision": "undecided", "fail_undecided": "yes"},
    ],
)
def test_a_decision_that_is_none_ends_with_its_own_exit_code(project, change):
    project.write(GATE)
    first = project.run()
    entry = first.store.read_entry(first.stages["gate"].key)
    output = entry.outputs["output"]
    first.store.put_entry(replace(entry, outputs={"output": replace(output, summary={**output.summary, **change})}))
    result = project.run()
    assert (result.exit_code, project.outcomes(result)["gate"]) == (ExitCode.INTEGRITY, "failed")
    assert "is no decision; `ptpipe run --fresh gate` judges again" in result.stages["gate"].message
    assert project.run(options=RunOptions(fresh=("gate",))).exit_code == ExitCode.REFUSED


# What can't be read


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("function", "stage_id"),
    [
        ("ptpipe.store.object_files.hashlib.file_digest", "sum"),
        ("ptpipe.store.object_files.os", "sum"),
        ("ptpipe.store.store.read_document", "one"),
    ],
    ids=["object", "folder", "entry"],
)
def test_a_passing_error_fails_the_stage_and_touches_nothing(project, monkeypatch, function, stage_id):
    project.write(SUM)
    first = project.run()
    # Not `os.scandir` itself: other modules call it too, which ones depends on the version of Python.
    replacement = SimpleNamespace(**{**vars(os), "scandir": fail}) if function.endswith(".os") else fail
    with monkeypatch.context() as patch:
        patch.setattr(function, replacement)
        second = project.run()
    assert second.exit_code == ExitCode.FAILED
    assert project.outcomes(second)[stage_id] == "failed"
    assert second.stages[stage_id].message.startswith("OSError: [Errno 5] Input/output error")
    assert not (project.artifacts / "quarantine").exists()
    third = project.run()
    assert set(project.outcomes(third).values()) == {"cached"}
    assert third.artifact("sum").value == first.artifact("sum").value


def test_an_input_that_cannot_be_read_stays_where_it_is(project, monkeypatch):
    project.write(SUM)
    project.run()
    with monkeypatch.context() as patch:
        patch.setattr("ptpipe.store.object_files.hashlib.file_digest", fail)
        second = project.run(options=RunOptions(fresh=("sum",)))
    assert (second.exit_code, project.outcomes(second)) == (1, {"one": "cached", "two": "cached", "sum": "failed"})
    assert not (project.artifacts / "quarantine").exists()


def test_a_result_that_may_be_undone_says_so(project, monkeypatch):
    project.write("one: {uses: toy.make}")
    project.run()
    (project.artifacts / "index").rename(project.artifacts / "gone")
    (project.artifacts / "index").mkdir()
    sync = os.fsync

    def fails_for_the_index(descriptor):
        if os.path.samestat(os.fstat(descriptor), (project.artifacts / "index").stat()):
            fail()
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_for_the_index)
        failed = project.run()
    assert "written, but a power cut may still undo it" in failed.stages["one"].message
    assert project.outcomes(project.run()) == {"one": "cached"}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_named(project, monkeypatch, number):
    project.write(SUM)
    monkeypatch.setattr("ptpipe.store.locks.fcntl.flock", Mock(side_effect=OSError(number, "No locks")))
    with pytest.raises(PtpipeError, match=r"cannot lock .*/locks/in-use: No locks") as raised:
        project.run()
    assert raised.value.exit_code == ExitCode.FAILED


def test_waiting_for_gc_is_reported(project, run_cli):
    project.write(SUM)
    project.run()
    with Store(project.artifacts).exclusive():
        process = run_cli.start("run", "m.yaml", alone=True)
        assert process.stderr.readline() == b"`ptpipe gc` is using the artifacts folder; waiting for it\n"
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_results_of_a_former_version_are_named(project):
    project.write(SUM)
    project.run()
    (project.artifacts / "format").unlink()
    ear = Ear()
    result = project.run(reporters=[ear])
    assert [text for text in ear.notices if "of a former version" in text]
    assert "of a former version" in log_of(result)


def test_a_lost_object_that_comes_back_otherwise_is_noticed(project):
    project.write("dice: {uses: toy.dice}\nsum: {uses: toy.add}")
    first = project.run()
    shutil.rmtree(project.artifacts / "objects" / digest_of(first, "dice")[:2])
    second = project.run()
    assert project.outcomes(second) == {"dice": "done", "sum": "done"}
    assert second.artifact("sum").value == 2 * second.artifact("dice").value


# Before any work


def test_a_mistake_is_found_before_anything_is_written(project):
    project.write(SUM.replace("value: 2", "value: -2"))
    with pytest.raises(ManifestError):
        project.run()
    project.write(SUM)
    with pytest.raises(ManifestError, match="--fresh onee"):
        project.run(options=RunOptions(fresh=("onee",)))
    assert not project.artifacts.exists()


PREFLIGHT = """
ASKED = []

def _preflight(config):
    ASKED.append(config)
    {body}

@stage("toy.add", preflight=_preflight)"""


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        ("return ['no such engine here', 'and no disk']", "sum: no such engine here\n{m}:7:8: sum: and no disk", 2),
        ("raise StageError('give me a GPU')", "sum: give me a GPU", 2),
        ("raise FileNotFoundError(2, 'No such file', 'x')", "sum: [Errno 2] No such file: 'x'", 2),
        ("sys.exit(0)", "sum: preflight() of toy.add (plugin ./toy.py) failed: SystemExit: 0 (toy.py:{line})", 6),
        ("return {}['a']", "sum: preflight() of toy.add (plugin ./toy.py) failed: KeyError: 'a' (toy.py:{line})", 6),
        (
            "pass",
            "sum: preflight() of toy.add (plugin ./toy.py) failed: TypeError: 'NoneType' object is not iterable",
            6,
        ),
    ],
)
def test_a_preflight_can_stop_the_run_before_any_work(project, body, message, code):
    project.edit('@stage("toy.add")', PREFLIGHT.format(body=body))
    project.write(SUM)
    line = 1 + project.plugin.read_text().partition(f"    {body}\n\n@stage")[0].count("\n")
    with pytest.raises(ManifestError) as raised:
        project.run()
    assert str(raised.value) == f"{project.manifest}:7:8: " + message.format(m=project.manifest, line=line)
    assert raised.value.exit_code == code
    assert not project.artifacts.exists()


def test_a_preflight_is_asked_only_where_there_is_work(project):
    project.edit('@stage("toy.add")', PREFLIGHT.format(body="return []"))
    project.write(SUM)

    def asked(result):
        return len(result.plan.vocabulary.plugins[0].module.ASKED)

    assert asked(project.run()) == 1
    assert asked(project.run()) == 0


def test_what_a_preflight_fetches_enters_the_key(project):
    data = project.folder / "data"
    source = f"""
def _fetch(config):
    Path({str(data)!r}).write_text("fetched")
    return []

def _reads(config):
    path = Path({str(data)!r})
    return path.read_text() if path.exists() else None

@stage("toy.add", preflight=_fetch, fingerprint=_reads)"""
    project.edit('@stage("toy.add")', source)
    project.write(SUM)
    first = project.run()
    assert record_of(first)["stages"][2]["parts"]["fingerprint"] == "fetched"
    assert project.outcomes(project.run())["sum"] == "cached"


@pytest.mark.parametrize("blocked", ["", "objects", "runs"])
def test_an_artifacts_folder_that_cannot_be_used(project, blocked):
    project.write(SUM)
    path = project.artifacts / blocked
    path.parent.mkdir(exist_ok=True)
    path.write_text("a file in its place")
    with pytest.raises(PtpipeError, match="cannot write to"):
        project.run()


def test_a_record_that_cannot_be_written_ends_no_run(project, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    project.write(SUM)
    ear = Ear()
    ear.stage_started = lambda event: monkeypatch.setattr("ptpipe.execution.record.write_document", full)
    result = project.run(reporters=[ear])
    assert result.exit_code == ExitCode.DONE
    assert len(ear.ends) == 1
    assert "the record could not be written" in log_of(result)


# Scratch


def test_scratch_that_a_killed_run_left_is_dropped(project):
    project.write("one: {uses: toy.make}")
    first = project.run()
    (first.store.scratch(first.stages["one"].key) / "checkpoint").write_text("1")
    assert project.outcomes(project.run()) == {"one": "cached"}
    assert not list(project.artifacts.glob("scratch/*"))


def test_scratch_is_handed_to_the_next_try_and_dropped_after_success(project):
    project.write("slow: {uses: toy.slow, with: {steps: 4, pause_s: 0}}")
    said = 'ctx.progress(step + 1, config.steps, "steps")'
    stop = 'if (Path(__file__).parent / "stop").exists() and step == 1:\n            raise StageError("stopped")'
    project.edit(said, f"{said}\n        {stop}")
    (project.folder / "stop").touch()
    assert project.run().exit_code == ExitCode.FAILED
    (project.folder / "stop").unlink()
    result = project.run()
    assert result.exit_code == ExitCode.DONE
    assert result.stages["slow"].metrics == {"started_at": 2}
    assert not list((project.artifacts / "scratch").iterdir())


def test_the_store_is_left_tidy(project):
    project.write(SUM)
    project.run()
    assert not list(Store(project.artifacts).root.glob("*/.*"))
