"""The command line as a user and as a program sees it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

from ptpipe import ExitCode, ManifestError, UsageError, __version__
from ptpipe.cli import _COMMANDS, _exit_code, cli
from ptpipe.cli.get import _stage_facts
from ptpipe.store.documents import read_document, write_document

from ..conftest import command, environment

STAGES = """
one: {uses: toy.make, with: {value: 3, note: look here}}
sum: {uses: toy.add, needs: {a: one, b: one}}
gate: {uses: toy.gate, needs: {a: sum}, with: {least: 5}}
"""
MANIFESTS = Path(__file__).parents[2] / "manifests"


def heading(text):
    return text.splitlines()[0].split()


@pytest.fixture
def ran(project, run_cli):
    """The command line in a project that was run once."""
    project.write(STAGES)
    assert run_cli("run", "m.yaml", alone=True).code == 0
    return run_cli


# Help


def test_help_names_every_command(run_cli):
    ended = run_cli("--help")
    assert ended.code == 0
    assert ended.err == ""
    added = ["baseline", "check", "compare", "gate", "scaling", "seeds", "shards", "sweep"]
    assert re.findall(r"^  ([a-z]+)  ", ended.out, re.MULTILINE) == [*_COMMANDS, *added]
    assert run_cli("-h").out == ended.out


@pytest.mark.parametrize("name", _COMMANDS)
def test_each_command_and_option_has_help(run_cli, name):
    module, line = _COMMANDS[name]
    command = getattr(import_module(f"ptpipe.cli.{module}"), name)
    assert (command.name, line[-1]) == (name, ".")
    assert all(option.help for option in command.params if isinstance(option, click.Option))
    ended = run_cli(name, "--help", alone=True, real=True)  # which imports what it needs itself
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"Usage: ptpipe {name} ")
    assert " ".join(command.help.split())[:60] in " ".join(ended.out.split())


def test_no_command_and_a_wrong_command(run_cli):
    assert run_cli().code == ExitCode.USAGE
    wrong = run_cli("rnu")
    assert wrong.code == ExitCode.USAGE
    assert "No such command 'rnu'. Did you mean 'run'?" in wrong.err
    assert run_cli("run", "m.yaml", "--no-such-option").code == ExitCode.USAGE
    assert run_cli("run").code == ExitCode.USAGE


# Commands of plugins

COMMAND = """
import click

from ptpipe import UsageError
from ptpipe.commands import json_option, print_json


@click.command()
@click.argument("word", default="word")
@json_option
def shout(word, as_json):
    \"\"\"Repeat a word, louder.\"\"\"
    if word == "wrong":
        raise UsageError("wrong word")
    if word == "zero":
        return 1 / 0
    if word == "number":
        return "text"
    print_json({"word": word.upper()}) if as_json else click.echo(word.upper())
    return 3


def function():
    pass
"""


@pytest.fixture
def add_distribution(run_cli):
    """Make importable what an installation of a distribution would be: a module and its metadata."""

    def add(name: str, **commands: str) -> dict[str, str]:
        site = run_cli.folder / "site"
        metadata = site / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / "shouting.py").write_text(COMMAND)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{command} = {value}" for command, value in commands.items()]
        (metadata / "entry_points.txt").write_text("\n".join(["[ptpipe.commands]", *lines]) + "\n")
        return {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}

    return add


def test_a_plugins_command_is_one_like_the_others(run_cli, add_distribution):
    installed = add_distribution("shouting", shout="shouting:shout")
    help_ = run_cli("--help", **installed)
    assert (help_.code, help_.err) == (0, "")
    assert re.search(r"^  shout +Repeat a word, louder\.$", help_.out, re.MULTILINE)
    said = run_cli("shout", "hello", **installed)
    assert (said.code, said.out, said.err) == (3, "HELLO\n", "")
    assert run_cli("shout", "--json", **installed).json == {"word": "WORD"}
    wrong = run_cli("shout", "wrong", **installed)
    assert (wrong.code, wrong.err) == (ExitCode.USAGE, "ptpipe: wrong word\n")
    assert run_cli("shuot", **installed).err.endswith("No such command 'shuot'. Did you mean 'shout'?\n")
    assert "Usage: ptpipe shout [OPTIONS] [WORD]" in run_cli("shout", "--help", **installed).out


@pytest.mark.parametrize(
    ("word", "error"),
    [("zero", "ZeroDivisionError: division by zero"), ("number", "ValueError: invalid literal for int()")],
)
def test_a_mistake_in_a_plugins_command_is_no_bug_of_ptpipe(run_cli, add_distribution, word, error):
    installed = add_distribution("shouting", shout="shouting:shout")
    failed = run_cli("shout", word, **installed)
    assert (failed.code, failed.out) == (ExitCode.PLUGIN, "")
    *frames, last = failed.err.splitlines()
    assert frames[0] == "Traceback (most recent call last):"
    assert frames[-1].startswith(error)
    assert last == "ptpipe: command 'shout' of shouting failed; please report the lines above to its authors"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("nosuch:shout", "ModuleNotFoundError: No module named 'nosuch'"),
        ("shouting:whisper", "AttributeError: module 'shouting' has no attribute 'whisper'"),
        ("shouting:function", "TypeError: shouting:function is no click.Command"),
    ],
)
def test_a_plugins_broken_command_is_one_line_and_breaks_no_other(run_cli, add_distribution, value, reason):
    installed = add_distribution("shouting", broken=value, shout="shouting:shout")
    line = f"ptpipe: command 'broken' of shouting failed to load: {reason}\n"
    help_ = run_cli("--help", **installed)
    assert (help_.code, help_.err) == (0, line)
    assert "  shout " in help_.out
    assert "  broken " not in help_.out
    called = run_cli("broken", **installed)
    assert (called.code, called.out, called.err) == (ExitCode.PLUGIN, "", line)
    assert run_cli("shout", **installed).out == "WORD\n"


def test_a_plugins_command_takes_no_name_that_is_taken(run_cli, add_distribution):
    add_distribution("first", shout="shouting:shout")
    installed = add_distribution("second", shout="shouting:function", runs="shouting:shout")
    help_ = run_cli("--help", **installed)
    assert help_.code == 0
    assert help_.err.splitlines() == [
        "ptpipe: command 'runs' of second is ignored: ptpipe itself has one",
        "ptpipe: command 'shout' of second is ignored: first has one",
    ]
    assert help_.out.count("  runs ") == help_.out.count("  shout ") == 1
    assert run_cli("shout", **installed).out == "WORD\n"
    runs = run_cli("runs", alone=True, **installed)
    assert (runs.out, runs.err) == ("no runs under artifacts\n", "")


def test_entry_points_are_read_only_for_help_and_unknown_commands(run_cli):
    traced = run_cli("runs", python=["-X", "importtime"])
    assert "ptpipe.cli" in traced.err
    assert "importlib.metadata" not in traced.err


def test_version(run_cli):
    assert run_cli("--version").out == f"ptpipe, version {__version__}\n"


INTERRUPTED_IMPORT = """
import signal, sys
from ptpipe.__main__ import main

class Finder:
    def find_spec(self, name, *more):
        if name == "click":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
main()
"""


def test_ctrl_c_while_the_command_line_is_imported_is_quiet():
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_the_package_itself_imports_none_of_its_modules():
    """Before `main` has begun, nothing keeps Ctrl-C from showing a traceback."""
    code = "import sys, ptpipe; print([name for name in sys.modules if name.startswith('ptpipe.')])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_the_script_is_the_module(run_cli, tmp_path):
    script = Path(sys.executable).with_name("ptpipe")
    if not script.exists():
        pytest.skip("ptpipe is on the path but not installed")
    called = subprocess.run([script, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert called.stdout.split() == run_cli("--help").out.split()


# Warnings

WARNING = """
from ptpipe import hookimpl

@hookimpl
def ptpipe_check(plan):
    yield plan.problem("one", "static", "value", severity="warning")

@hookimpl
def ptpipe_check_results(plan, summaries):
    for name, outputs in summaries.items():
        yield plan.problem(name, f"stored {sorted(outputs['output'])}", severity=SEVERITY)
"""


@pytest.fixture
def warned(project, monkeypatch):
    """Commands, in this process, in a folder whose plugin has warnings; the second comes from a stored result."""
    (project.folder / "rules.py").write_text(WARNING.replace("SEVERITY", "'warning'"))
    project.write("one: {uses: toy.make, with: {value: 3}}", head="name: toy\nplugins: [./toy.py, ./rules.py]")
    monkeypatch.chdir(project.folder)
    return lambda name, *rest: CliRunner().invoke(cli, [name, "m.yaml", *rest], standalone_mode=False)


def test_warnings_are_shown_and_change_no_exit_code(warned, project):
    static = "m.yaml:5:39: warning: one: static\n"
    stored = static + "m.yaml:5:8: warning: one: stored ['value']\n"
    ended = warned("validate")
    assert (ended.return_value, ended.stderr, ended.stdout) == (0, static, "m.yaml: 1 stage, no problems, 1 warning\n")
    assert [found["severity"] for found in json.loads(warned("validate", "--json").stdout)["warnings"]] == ["warning"]
    assert warned("plan").stderr == static
    ended = warned("run", "--json")
    assert (ended.return_value, json.loads(ended.stdout)["warnings"]) == (0, static.splitlines())
    ended = warned("plan")
    assert (ended.return_value, ended.stderr) == (0, stored)
    found = json.loads(warned("plan", "--json").stdout)["warnings"]
    assert [(of["message"], of["location"]["line"]) for of in found] == [
        ("one: static", 5),
        ("one: stored ['value']", 5),
    ]
    ended = warned("run", "--json")
    assert (ended.return_value, json.loads(ended.stdout)["warnings"]) == (0, stored.splitlines())


def test_an_error_in_view_of_stored_results_stops_a_run(warned, project):
    assert warned("run").return_value == 0
    (project.folder / "rules.py").write_text(WARNING.replace("SEVERITY", "'error'"))
    for name in ("plan", "run"):
        with pytest.raises(ManifestError, match=r"^m.yaml:5:8: one: stored \['value'\]$"):
            raise warned(name).exception


# Listings


def test_every_listing_is_strict_json(ran):
    assert [stage["cached"] for stage in ran("plan", "m.yaml", "--json", alone=True).json["stages"]] == [True] * 3
    assert ran("validate", "m.yaml", "--json", alone=True).json == {"problems": [], "warnings": [], "notes": []}
    (run,) = ran("runs", "--json", alone=True).json
    assert (run["name"], run["exit_code"], run["finished"]) == ("toy", 0, True)
    assert "stages" not in run
    record = ran("show", "last", "--json", alone=True).json
    assert [stage["outcome"] for stage in record["stages"]] == ["done"] * 3
    kinds = ran("stages", "--plugin", "./toy.py", "--json", alone=True).json
    assert "toy.make" in {kind["kind"] for kind in kinds}
    kind = ran("stages", "toy.make", "--plugin", "./toy.py", "--json", alone=True).json
    assert [option["name"] for option in kind["options"]] == ["value", "note", "mode"]
    assert kind["outputs"] == [{"name": "output", "type": "Number", "optional": False, "several": False}]
    (plugin,) = ran("plugins", "--plugin", "./toy.py", "--json", alone=True).json
    assert "toy.make" in plugin["kinds"]
    assert ran("schema", alone=True).json["title"] == "ptpipe manifest"
    garbage = ran("gc", "--dry-run", "--json", alone=True).json
    assert {name: value for name, value in garbage.items() if name != "paths"} == {
        "num_runs": 0, "num_objects": 0, "size_bytes": 0, "quarantine": {}, "problems": [], "dry_run": True,
    }  # fmt: skip
    assert [path for path in garbage["paths"] if not path.startswith("locks/")] == []
    again = ran("run", "m.yaml", "--json", alone=True)
    assert [stage["outcome"] for stage in again.json["stages"]] == ["cached"] * 3


def test_json_of_results_that_json_has_not(project, run_cli):
    project.edit("ctx.metric(before=1)", "ctx.metric(before=float('nan'))")
    project.write("odd: {uses: toy.odd, with: {how: nan}}\nbad: {uses: toy.fail, with: {how: no}}")
    ended = run_cli("run", "m.yaml", "--json", alone=True)
    assert ended.json["stages"][1]["metrics"] == {"before": "NaN"}
    assert run_cli("show", "last", "--json", alone=True).json["stages"][1]["metrics"] == {"before": "NaN"}
    assert "before=NaN" in run_cli("show", "last", alone=True).out


def test_a_stage_that_prints_does_not_spoil_json(project, run_cli):
    project.write("odd: {uses: toy.odd, with: {how: print}}")
    ended = run_cli("run", "m.yaml", "--json", alone=True)
    assert ended.json["exit_code"] == 0
    assert "on stdout" in ended.err


def test_plan_says_why(ran):
    ended = ran("plan", "m.yaml", alone=True)
    assert heading(ended.out) == ["stage", "kind", "inputs", "key", "action"]
    assert ended.out.count("  cached\n") == 3
    assert ended.out.endswith("3 of 3 stages are cached\n")
    changed = ran("plan", "m.yaml", "-s", "one.value=4", "-s", "one.mode=loud", alone=True).out
    assert "run: config.mode: plain -> loud (and 1 more: --why)" in changed
    assert "run: upstream changed: one" in changed
    why = ran("plan", "m.yaml", "-s", "one.value=4", "-s", "one.mode=loud", "--why", alone=True).out
    assert "run: config.mode: plain -> loud; config.value: 3.0 -> 4.0" in why
    assert "run: requested with --fresh" in ran("plan", "m.yaml", "--fresh", "sum", alone=True).out
    assert ran("plan", "m.yaml", "--fresh", "summ", alone=True).code == ExitCode.USAGE


def test_runs_and_show(ran):
    assert ran("run", "m.yaml", "-s", "gate.least=9", alone=True).code == ExitCode.REFUSED
    listed = ran("runs", alone=True).out
    assert heading(listed) == ["run", "took", "ended", "gate", "verdict", "gate.least", "stages", "started", "(UTC)"]
    assert "2 cached, 1 refused" in listed.splitlines()[1] and " refused  refused " in listed.splitlines()[1]
    assert "3 done" in listed.splitlines()[2] and " done     passed " in listed.splitlines()[2]
    shown = ran("show", "last", alone=True).out
    assert "-s gate.least=9" in shown
    assert "! one: look here" in shown
    assert "refused gate: 6.0 against 9.0" in shown
    assert "value=3" in shown
    other = ran("runs", "--name", "other", alone=True)
    assert (other.code, other.err) == (ExitCode.USAGE, "ptpipe: no run under artifacts has the name 'other'\n")
    lost = ran("show", "zebra", alone=True)
    assert lost.code == ExitCode.USAGE
    assert lost.err.startswith("ptpipe: there is no run 'zebra' under ")


DELIVERS = """
    @classmethod
    def deliverables(cls, folder):
        return ("number.json",)

    def summary(self) -> dict[str, object]:"""


@pytest.fixture
def delivered(project, run_cli):
    """The command line in a project whose numbers are deliverables, run once."""
    source = project.plugin.read_text()
    project.plugin.write_text(source.replace("\n    def summary(self) -> dict[str, object]:", DELIVERS))
    project.write(STAGES + "two: {uses: toy.split, needs: {a: one}}\ntext: {uses: toy.total, needs: {numbers: one}}")
    assert run_cli("run", "m.yaml", alone=True).code == 0
    return run_cli


def test_get_copies_deliverables(delivered, tmp_path):
    (folder,) = tmp_path.glob("artifacts/runs/*")
    shown = delivered("show", "last", alone=True).out
    assert shown.endswith(
        f"\n{folder}\n  one/number.json\n  sum/number.json\n  two/low/number.json\n  two/high/number.json\n"
    )
    got = delivered("get", "last", "sum", alone=True)
    assert (got.code, got.out) == (0, "wrote number.json\nwrote number.json.intoto.json\n")
    assert (tmp_path / "number.json").read_text() == "6.0"
    assert os.access(tmp_path / "number.json", os.W_OK)
    assert (tmp_path / "number.json").stat().st_nlink == 1
    again = delivered("get", "last", "one", alone=True)
    names = "number.json and number.json.intoto.json"
    assert (again.code, again.err) == (2, f"ptpipe: {names} exist (--force replaces them)\n")
    assert delivered("get", folder.name, "one", "--force", alone=True).code == 0
    assert (tmp_path / "number.json").read_text() == "3.0"
    assert delivered("get", "last", "two", "new/place", "--json", alone=True).json == [
        "new/place/low/number.json", "new/place/high/number.json",
    ]  # fmt: skip
    assert (tmp_path / "new/place/high/number.json").read_text() == "1.5"


def test_get_names_what_is_not_there(delivered, tmp_path):
    wrong = delivered("get", "last", "smu", alone=True)
    assert wrong.code == ExitCode.USAGE
    assert wrong.err.endswith(" has no stage 'smu' (did you mean 'sum'?)\n")
    none = delivered("get", "last", "text", alone=True)
    assert none.code == ExitCode.USAGE
    assert none.err.endswith(" has no deliverables; stages with deliverables: one, sum, two\n")
    assert delivered("get", "zebra", "sum", alone=True).code == ExitCode.USAGE
    (tmp_path / "file").write_text("")
    blocked = delivered("get", "last", "sum", "file/x", alone=True)
    assert (blocked.code, blocked.err.startswith("ptpipe: cannot write file/x/number.json: ")) == (2, True)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("failed", ", which failed, has no"),
        ("skipped", ", which was skipped, has no"),
        ("interrupted", ", which was interrupted, has no"),
        ("done", " has no"),
    ],
)
def test_get_says_how_a_stage_ended_that_delivered_nothing(outcome, words):
    record = {"run_id": "r", "stages": [{"stage_id": "one", "outcome": outcome, "deliverables": []}]}
    with pytest.raises(UsageError, match=f"^stage one of run r{words} deliverables; no stage of that run has any$"):
        _stage_facts(record, "one")


def test_get_refuses_altered_bytes(delivered, tmp_path):
    (file,) = tmp_path.glob("artifacts/runs/*/sum/number.json")
    file.chmod(0o644)
    file.write_text("7.0")
    altered = delivered("get", "last", "sum", alone=True)
    assert (altered.code, altered.err) == (5, f"ptpipe: {file} was altered; `ptpipe run --fresh sum` rebuilds it\n")
    assert delivered("run", "m.yaml", "--fresh", "sum", alone=True).code == 0
    assert delivered("get", "last", "sum", "new", alone=True).code == 0
    assert (tmp_path / "new" / "number.json").read_text() == "6.0"
    file.unlink()
    os.mkfifo(file)
    piped = delivered("get", file.parents[1].name, "sum", alone=True, timeout_s=20)
    assert piped.err == f"ptpipe: {file} is missing or no file; `ptpipe run --fresh sum` rebuilds it\n"
    file.unlink()
    assert delivered("get", file.parents[1].name, "sum", alone=True).code == ExitCode.INTEGRITY
    assert not (tmp_path / "number.json").exists()


@pytest.mark.parametrize("name", ["sum/../../../../m.yaml", "/etc/hostname", "one/number.json"])
def test_get_stays_inside_the_stages_folder(delivered, tmp_path, name):
    (record,) = tmp_path.glob("artifacts/runs/*/record.json")
    write_document(record, json.dumps(read_document(record)).replace("sum/number.json", name))
    got = delivered("get", "last", "sum", "new", alone=True)
    assert (got.code, list(tmp_path.glob("new/*"))) == (5, [])


def test_stages_and_plugins(project, run_cli):
    described = run_cli("stages", "toy.split", "--plugin", "./toy.py", alone=True).out
    assert described.startswith("toy.split  (plugin ./toy.py, version 1)\n\nHalve a number twice.\n")
    assert "inputs:   a: Number, bias: Number (optional)\noutputs:  low: Number, high: Number\n" in described
    assert "options:  none" in described
    table = run_cli("stages", "toy.make", "--plugin", "./toy.py", alone=True).out
    assert heading(table[table.index("option ") :]) == ["option", "type", "default", "help"]
    assert re.search(r"value +number >= 0 +1\.0 +the number", table)
    assert "several Number" in run_cli("stages", "toy.total", "--plugin", "./toy.py", alone=True).out
    family = run_cli("stages", "toy", "--plugin", "./toy.py", "--json", alone=True).json
    assert {"toy.make", "toy.split"} <= {kind["kind"] for kind in family}
    assert {kind["kind"].partition(".")[0] for kind in family} == {"toy"}
    wrong = run_cli("stages", "toy.splat", "--plugin", "./toy.py", alone=True)
    assert (wrong.code, wrong.err) == (2, "ptpipe: there is no stage kind 'toy.splat' (did you mean 'toy.split'?)\n")
    alone = run_cli("stages", "my.confusion", alone=True)
    assert alone.err == (
        "ptpipe: there is no stage kind 'my.confusion'; name the plugin that has it: --plugin ./my_plugin.py\n"
    )
    assert "toy.dice" in run_cli("plugins", "--plugin", "./toy.py", alone=True).out
    broken = run_cli("plugins", "--plugin", "./absent.py", alone=True)
    assert broken.code == ExitCode.PLUGIN
    assert "plugin ./absent.py failed to load: FileNotFoundError" in broken.err


def test_built_in_plugins_are_whole(run_cli):
    listed = run_cli("plugins", "--json").json
    assert [plugin["problem"] for plugin in listed if plugin["problem"]] == []
    kinds = {kind for plugin in listed for kind in plugin["kinds"]}
    assert {
        "data.mnist",
        "model.small_cnn",
        "train.supervised",
        "quant.convert",
        "export.onnx",
        "gate.accuracy",
    } <= kinds


def test_gc(ran):
    for value in range(4, 8):
        ran("run", "m.yaml", "-s", f"one.value={value}", alone=True)
    would = ran("gc", "--keep-runs", "2", "--dry-run", alone=True).out
    assert re.fullmatch(r"would delete 3 runs and \d+ stored objects, [\d.]+ MB in all\n", would)
    assert ran("gc", "--keep-runs", "2", alone=True).out == would.replace("would delete", "deleted")
    assert len(ran("runs", "--json", alone=True).json) == 2
    nowhere = ran("gc", "--artifacts", "elsewhere", alone=True)
    assert (nowhere.code, nowhere.err.startswith("ptpipe: there is no artifacts folder at ")) == (1, True)


def test_gc_names_what_it_keeps(ran, tmp_path):
    assert ran("run", "m.yaml", "-s", "one.value=4", alone=True).code == 0
    older, newer = sorted(tmp_path.glob("artifacts/runs/*"), key=lambda path: path.name[-5:])
    (tmp_path / "artifacts/runs/la\x1btest").symlink_to(newer.name)
    (tmp_path / "artifacts/quarantine/0123-4").mkdir(parents=True)
    (tmp_path / "artifacts/quarantine/0123-4/bytes").write_bytes(bytes(1_200_000))
    linked = ran("gc", "--keep-runs", "1", "--dry-run", alone=True)
    assert linked.code == ExitCode.FAILED
    assert linked.out.splitlines()[1:] == [
        "kept what failed verification (--empty-quarantine deletes it):",
        "  quarantine/0123-4  1.2 MB",
    ]
    assert linked.err == f"ptpipe: {tmp_path}/artifacts/runs/la\\x1btest is kept: it is not the folder of a run\n"
    (older / "record.json").write_text("x")
    for number in range(12):
        (tmp_path / f"artifacts/index/{number}.json").write_text("")
    altered = ran("gc", "--keep-runs", "0", alone=True)
    assert altered.code == ExitCode.FAILED
    assert altered.out.startswith("deleted 1 run and 0 stored objects, ")
    lines = altered.err.splitlines()
    assert lines[0].startswith("ptpipe: every stored result is kept, because ")
    assert lines[1] == f"ptpipe: the record of run {older.name} was altered: {older / 'record.json'}"
    assert lines[10] == "and 5 more: --json lists all"
    assert len(lines) == 11


def test_an_altered_record_is_named_and_stops_nothing(ran, tmp_path):
    (record,) = tmp_path.glob("artifacts/runs/*/record.json")
    record.write_text(record.read_text().replace('"stage_id"', '"stagf_id"', 1))
    run_id = record.parent.name
    assert ran("run", "m.yaml", alone=True).code == 0
    assert ran("plan", "m.yaml", "-s", "one.value=9", alone=True).code == 0
    reason = f"the record of run {run_id} was altered: {record}"
    listed = ran("runs", alone=True)
    assert listed.code == 0
    assert re.search(rf"\n{run_id} +unreadable +{re.escape(reason)} *\n$", listed.out)
    assert ran("runs", "--json", alone=True).json[1] == {"run_id": run_id, "name": "toy", "error": reason}
    for arguments in (["show", run_id], ["get", run_id, "one"], ["show", "00001"]):
        ended = ran(*arguments, alone=True)
        assert (ended.code, ended.err) == (ExitCode.INTEGRITY, f"ptpipe: {reason}\n")
    assert ran("show", "last", alone=True).code == 0
    record.unlink()
    assert "is missing" in ran("show", run_id, alone=True).err


def test_runs_lists_the_newest(ran):
    for _ in range(2):
        assert ran("run", "m.yaml", "-q", alone=True).code == 0
    limited = ran("runs", "--limit", "2", alone=True).out.splitlines()
    assert len(limited) == 5
    assert limited[-2:] == ["and 1 older run: --limit 0 lists all", "the same in all: gate verdict passed"]
    assert "-toy-00003 " in limited[1]
    assert len(ran("runs", "--limit", "0", "--json", alone=True).json) == 3


def test_json_of_a_run_does_not_depend_on_what_gc_left(project, tmp_path):
    project.write(STAGES)
    code = """
import ptpipe.api as api, ptpipe.plan.vocabulary as vocabulary
from ptpipe.cli import main
from ptpipe.execution.gc import collect_garbage
vocabulary.BUILT_IN = ()
run = api.run
def run_and_collect(*arguments, **keywords):
    result = run(*arguments, **keywords)
    assert collect_garbage(result.store, 0).num_runs == 1
    return result
api.run = run_and_collect
main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, "run", "m.yaml", "--json"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    record = json.loads(ended.stdout)
    assert (record["finished"], len(record["stages"])) == (True, 3)


def test_the_artifacts_folder_may_come_from_the_environment(project, run_cli, tmp_path):
    project.write(STAGES)
    assert run_cli("run", "m.yaml", alone=True, PTPIPE_ARTIFACTS=str(tmp_path / "there")).code == 0
    assert (tmp_path / "there" / "objects").is_dir()
    assert not project.artifacts.exists()


@pytest.mark.parametrize("name", ["runs", "show", "get", "verify", "plan", "validate", "stages", "plugins", "schema"])
def test_looking_writes_nothing(project, run_cli, name):
    project.write(STAGES)
    before = sorted(project.folder.rglob("*"))
    arguments = {"show": ["last"], "get": ["last", "one"], "plan": ["m.yaml"], "validate": ["m.yaml"]}
    run_cli(name, *arguments.get(name, []), alone=True, real=True)
    assert sorted(project.folder.rglob("*")) == before


# Endings


@pytest.mark.parametrize(
    ("stages", "code"),
    [
        ("bad: {uses: toy.fail, with: {how: error}}", 1),
        ("bad: {uses: toy.fail, with: {how: bug}}", 1),
        ("bad: {uses: toy.fail, with: {how: exit}}", 1),
        ("one: {uses: toy.make}\ngate: {uses: toy.gate, with: {least: 3}}", 3),
        ("one: {uses: toy.make}\ngate: {uses: toy.gate, with: {least: 3, unsure_at: 1, fail_undecided: true}}", 4),
        ("bad: {uses: toy.fail, with: {how: interrupt}}", 130),
        ("bad: {uses: toy.fail, with: {how: terminate}}", 143),
    ],
)
def test_exit_codes_of_runs(project, run_cli, stages, code):
    project.write(stages)
    ended = run_cli("run", "m.yaml")
    assert ended.code == code
    assert "Traceback" not in ended.out + ended.err
    (folder,) = project.artifacts.glob("runs/*")
    assert json.loads((folder / "record.json").read_text())["exit_code"] == code
    assert json.loads((folder / "verdict.json").read_text())["exit_code"] == code
    assert json.loads((folder / "report.sarif").read_text())["runs"][0]["results"]
    assert ElementTree.parse(folder / "junit.xml").find("testsuite/testcase/*") is not None


def test_in_github_actions_stdout_is_for_results_and_a_summary_that_cannot_be_written_breaks_nothing(project, run_cli):
    project.write("one: {uses: toy.make}\ngate: {uses: toy.gate, with: {least: 3, unsure_at: 1, fail_undecided: true}}")
    ended = run_cli("run", "m.yaml", "--json", GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY="no/such/folder.md")
    assert (ended.code, ended.json["exit_code"]) == (4, 4)
    assert "::error file=m.yaml,line=6,col=3,title=gate undecided::1.0 against 3.0\n" in ended.err
    assert "1 done, 1 undecided" in ended.err
    assert ended.err.count("GitHubSummary raised FileNotFoundError") == 1
    listed, shown = run_cli("runs", alone=True).out, run_cli("show", "last", alone=True).out
    assert "undecided  undecided     1 done, 1 undecided" in listed
    assert "undecided gate: 1.0 against 3.0" in shown


def test_a_bug_shows_frames_on_the_screen_and_the_traceback_in_the_log(project, run_cli):
    project.write("bad: {uses: toy.fail, with: {how: bug}}")
    ended = run_cli("run", "m.yaml")
    assert "ZeroDivisionError: division by zero" in ended.err
    assert "in _bug: return 1 / amount" in ended.err
    assert "engine.py" not in ended.err
    (log,) = project.artifacts.glob("runs/*/log.txt")
    assert "Traceback (most recent call last)" in log.read_text()


def test_a_bug_of_ours_says_so(project, run_cli):
    code = "import ptpipe.manifest.manifest as m; m.load = lambda path: 1 / 0; from ptpipe.cli import main; main()"
    project.write(STAGES)
    ended = subprocess.run(
        [sys.executable, "-c", code, "validate", "m.yaml"],
        cwd=project.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == ExitCode.BUG
    assert "Traceback" in ended.stderr
    assert "this is a bug in ptpipe; please report the lines above" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["run", "--help"], 0), (["schema"], 0), (["run", "m.yaml", "--json"], 3)],
)
def test_a_reader_that_leaves_is_no_mistake(project, run_cli, arguments, code):
    project.write(STAGES.replace("least: 5", "least: 50"))
    read_end, write_end = os.pipe()
    os.close(read_end)
    with run_cli.start(*arguments, alone=True, stdout=write_end) as process:
        os.close(write_end)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, b"")


def test_nothing_is_coloured_in_a_pipe(ran):
    for arguments in (["plan", "m.yaml"], ["runs"], ["show", "last"]):
        assert "\x1b" not in ran(*arguments, alone=True, NO_COLOR="").out


# Starting


def test_init_writes_a_manifest_that_is_valid(run_cli, tmp_path):
    ended = run_cli("init")
    assert (ended.code, ended.out) == (0, "wrote ptpipe.yaml; next: ptpipe run ptpipe.yaml\n")
    assert run_cli("validate", "ptpipe.yaml").out == "ptpipe.yaml: 9 stages, no problems\n"
    again = run_cli("init")
    assert (again.code, again.err) == (2, "ptpipe: ptpipe.yaml exists (--force replaces it)\n")
    assert run_cli("init", "--force").code == 0


@pytest.mark.parametrize(
    "name", ["deep/folder/my net.yaml", "7.yaml", "1e3.yaml", "null.yaml", "Größe.yaml", "a" * 90 + ".yaml"]
)
def test_init_makes_a_name_of_any_file_name(run_cli, tmp_path, name):
    assert run_cli("init", name).code == 0
    ended = run_cli("validate", name)
    assert (ended.code, ended.err) == (0, "")


def test_init_where_nothing_can_be_written(run_cli, tmp_path):
    (tmp_path / "file").write_text("")
    ended = run_cli("init", "file/m.yaml")
    assert ended.code == ExitCode.USAGE
    assert ended.err.startswith("ptpipe: cannot write file/m.yaml: ")


def test_init_writes_a_plugin(run_cli, tmp_path):
    ended = run_cli("init", "--plugin", "My-Net.py")
    assert ended.code == 0
    assert ended.out.splitlines()[0] == "wrote my_net.py and test_my_net.py; next:"
    (tmp_path / "m.yaml").write_text(
        "version: 1\nplugins: [./my_net.py]\nstages:\n  data: {uses: data.synthetic}\n  net: {uses: model.my_net}\n"
    )
    assert run_cli("validate", "m.yaml").code == 0
    assert "channels of the convolution" in run_cli("stages", "model.my_net", "--plugin", "./my_net.py").out


def test_init_refuses_to_hide_what_is_installed(run_cli, tmp_path):
    ended = run_cli("init", "--plugin", "Click")
    assert ended.code == ExitCode.USAGE
    assert "click is installed here, and click.py would be imported in its place: choose another name" in ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "3d", "class", "json", "_net", "-"])
def test_init_refuses_what_cannot_name_a_module(run_cli, tmp_path, name):
    ended = run_cli("init", "--plugin", name)
    assert ended.code == ExitCode.USAGE
    assert "can't name a Python module of your own" in ended.err
    assert not list(tmp_path.iterdir())


# How the process ends


THREADS = """
import threading, time
from concurrent.futures import ThreadPoolExecutor

from ptpipe.cli import main

pool = ThreadPoolExecutor(1)  # as OpenVINO's: never shut down
pool.submit(print, "pool", flush=True)
threading.Thread(target=lambda: (time.sleep(1), print("thread", flush=True))).start()
main()
"""


def test_threads_of_plugins_are_ended_or_waited_for():
    arguments = [sys.executable, "-c", THREADS, "--version"]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert {"pool", "thread"} <= set(ended.stdout.splitlines())


# What is imported


WATCH = """
import atexit, sys


@atexit.register
def tell():
    heavy = ("torch", "numpy", "torchvision", "onnx", "onnxruntime", "sklearn")
    print("heavy:", [name for name in heavy if name in sys.modules], file=sys.stderr)
    print("pydantic" in sys.modules, file=sys.stderr)


from ptpipe.cli import main

main()
"""


def watched(folder, *arguments):
    ended = subprocess.run(
        [sys.executable, "-c", WATCH, *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False
    )
    *_, heavy, pydantic = ended.stderr.splitlines()
    return ended.returncode, heavy, pydantic


@pytest.mark.plugins
def test_looking_imports_no_torch(tmp_path):
    assert watched(tmp_path, "--help") == (0, "heavy: []", "False")
    assert watched(tmp_path, "run", "--help") == (0, "heavy: []", "False")
    manifest = MANIFESTS / "mnist_qat.yaml"
    for arguments in (["validate", manifest], ["plan", manifest], ["stages", "quant.convert"], ["schema"]):
        assert watched(tmp_path, *arguments)[:2] == (0, "heavy: []")


def test_a_cached_run_imports_no_torch(project):
    project.write(STAGES)
    for _ in range(2):
        assert watched(project.folder, "run", "m.yaml")[:2] == (0, "heavy: []")


def test_an_error_of_the_system_is_no_bug(monkeypatch, capsys):
    def fails(**_):
        raise OSError(5, "Input/output error", "artifacts/runs")

    monkeypatch.setattr("ptpipe.cli.cli.main", fails)
    assert _exit_code() == ExitCode.FAILED
    assert capsys.readouterr().err == "ptpipe: [Errno 5] Input/output error: 'artifacts/runs'\n"


@pytest.mark.parametrize("arguments", ["run m.yaml", "plan m.yaml", "runs", "show last", "get last one", "gc"])
def test_a_newer_store_is_refused_by_every_command(ran, project, arguments):
    (project.artifacts / "format").write_text("1000\n")
    ended = ran(*arguments.split(), alone=True)
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert ended.err.startswith(f"ptpipe: {project.artifacts} was written by a newer ptpipe: its format is 1000, and")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(("arguments", "code"), [(["validate", "missing.yaml"], 2), (["--help"], 0), (["plan"], 2)])
def test_the_exit_code_stays_where_nobody_reads(arguments, code, tmp_path) -> None:
    with subprocess.Popen(
        command(*arguments, alone=True), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        process.stderr.close()
        assert process.wait(timeout=60) == code


def test_a_fault_that_nobody_reads_is_a_fault(project) -> None:
    """`ptpipe verify | head -1` under `set -o pipefail`: the reader leaves before the code is decided."""
    project.write("one: {uses: toy.make}")
    project.run()
    for record in project.artifacts.glob("objects/*/*/record.json"):
        record.chmod(0o644)
        record.write_text("{}")
    with subprocess.Popen(
        command("verify", alone=True), cwd=project.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.wait(timeout=60) == ExitCode.INTEGRITY
        assert process.stderr.read() == ""


@pytest.mark.parametrize(("arguments", "code"), [(["runs"], 1), (["runs", "--json"], 1), (["validate", "no.yaml"], 2)])
def test_results_that_a_disk_has_no_room_for_are_a_failure(project, arguments, code) -> None:
    project.write("one: {uses: toy.make}")
    project.run()
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command(*arguments, alone=True), cwd=project.folder, stdout=full, stderr=subprocess.PIPE, text=True
        )
        assert ended.returncode == code
        assert ended.stderr.startswith("ptpipe: [Errno 28] No space left on device" if code == 1 else "cannot read no")
        assert ended.stderr.count("\n") == 1
        mute = subprocess.run(command(*arguments, alone=True), cwd=project.folder, stdout=full, stderr=full)
        assert mute.returncode == code


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_unbuffered_streams_stay_unbuffered(name) -> None:
    """With `PYTHONUNBUFFERED=1`, as in containers, a log has all up to the moment in which a process is killed."""
    script = f"import os, sys; from ptpipe import cli; cli._outlive_readers(); sys.{name}.write('shown'); os._exit(9)"
    ended = subprocess.run([sys.executable, "-u", "-c", script], capture_output=True, text=True)
    assert (ended.returncode, getattr(ended, name)) == (9, "shown")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_as_if_nobody_read(project, closed) -> None:
    """As under some schedulers: the code stays that of the run, and no file gets the number of such a stream."""
    project.write("one: {uses: toy.make}\ngate: {uses: toy.gate, with: {least: 3}}")
    words = shlex.join(command("run", "m.yaml", alone=True))
    ended = subprocess.run(["/bin/sh", "-c", f"{words} {closed}"], cwd=project.folder, capture_output=True, text=True)
    assert ended.returncode == ExitCode.REFUSED, ended.stderr
    assert "Traceback" not in ended.stderr
    listed = shlex.join(command("runs", alone=True))
    assert subprocess.run(["/bin/sh", "-c", f"{listed} {closed}"], cwd=project.folder).returncode == 0


def test_a_folder_without_a_name_is_refused(project, run_cli) -> None:
    """It would be the working directory."""
    project.write(STAGES)
    before = sorted(project.folder.iterdir())
    ended = run_cli("run", "m.yaml", "--artifacts", "", alone=True)
    assert (ended.code, sorted(project.folder.iterdir())) == (2, before)
    assert "Invalid value for '--artifacts' (env var: 'PTPIPE_ARTIFACTS'): the name of the folder is empty" in ended.err


GARBAGE = '''
import gc
import weakref

kept, garbage = [], []


class Cycle:
    def __init__(self):
        self.itself = self


def observe(ctx, note):
    """In the stage `one`, import something large and drop a network; in `two`, see what collections traverse."""
    if note == "one":
        kept.append([])
        garbage.append(weakref.ref(Cycle()))
    else:
        assert garbage[0]() is None, "what was garbage stayed"
        assert not any(thing is kept[0] for thing in gc.get_objects()), "collections traverse it"
'''


def test_what_earlier_stages_left_is_not_traversed_by_collections(project, run_cli):
    project.edit('@stage("toy.make")', GARBAGE + '\n\n@stage("toy.make")')
    project.edit(
        '    ctx.progress(1, 2, "digits")\n', '    observe(ctx, config.note)\n    ctx.progress(1, 2, "digits")\n'
    )
    project.write("one: {uses: toy.make, with: {note: one}}\ntwo: {uses: toy.make, with: {note: two}}")
    ended = run_cli("run", "m.yaml", alone=True)
    assert ended.code == 0, ended.err
