"""`ptpipe validate --no-plugins`: what a stranger's manifest names is not executed, and all else is judged."""

from __future__ import annotations

import sys

import pytest

from ptpipe import ExitCode

EVIL = """
from pathlib import Path
Path(__file__).with_name("executed").touch()
import beside
"""
STAGES = """
version: 1
plugins: [./evil.py, beside]
stages:
  data: {uses: data.synthetic}
  net: {uses: mine.net, needs: {data: data}, with: {anything: 1}}
  train: {uses: train.supervised, with: {epochs: 1}}
"""


@pytest.fixture
def stranger(tmp_path):
    """A folder with a manifest and the plugins that it names."""
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "beside.py").write_text("from pathlib import Path\nPath('executed-too').touch()\n")
    (tmp_path / "m.yaml").write_text(STAGES)
    return tmp_path


def test_nothing_of_a_stranger_is_executed(stranger, run_cli):
    before = sorted(stranger.rglob("*"))
    ended = run_cli("validate", "m.yaml", "--no-plugins", python=["-P"])
    note = "m.yaml:6:15: net: stage kind 'mine.net' is not checked: it is neither built in nor installed"
    assert ended.out.splitlines() == [note, "m.yaml: 3 stages, no problems, 1 note"]
    assert (ended.code, ended.err) == (0, "")
    assert sorted(stranger.rglob("*")) == before
    found = run_cli("validate", "m.yaml", "--no-plugins", "--json").json
    assert found["problems"] == []
    assert [note["location"]["line"] for note in found["notes"]] == [6]


def test_all_else_is_judged(stranger, run_cli):
    text = STAGES.replace("epochs", "epoch").replace("data: data}", "data: dta}") + "  last: {uses: 3}\n"
    (stranger / "m.yaml").write_text(text)
    assert run_cli("validate", "m.yaml", "--no-plugins").err.splitlines() == [
        "m.yaml:6:39: net: there is no stage 'dta' (did you mean 'data'?)",
        "m.yaml:7:42: train: unknown option 'epoch' of train.supervised (did you mean 'epochs'?)",
        "m.yaml:8:16: last: `uses: family.thing` is missing",
    ]
    (stranger / "m.yaml").write_text(text.replace("uses: 3", "uses: data.synthetc, needs: {data: train}"))
    ended = run_cli("validate", "m.yaml", "--no-plugins", "-s", "train.lr=fast")
    assert ended.err.splitlines() == [
        "m.yaml:6:39: net: there is no stage 'dta' (did you mean 'data'?)",
        '-s train.lr: lr: should be a number, not "fast"',
        "m.yaml:7:42: train: unknown option 'epoch' of train.supervised (did you mean 'epochs'?)",
    ]
    assert ended.code == ExitCode.USAGE


def test_an_unknown_kind_is_a_problem_where_no_plugin_is_named(stranger, run_cli):
    (stranger / "m.yaml").write_text(STAGES.replace("plugins: [./evil.py, beside]\n", ""))
    ended = run_cli("validate", "m.yaml", "--no-plugins")
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert ended.err == "m.yaml:5:15: net: unknown stage kind 'mine.net'\n"


@pytest.mark.parametrize("verb", ["validate", "plan"])
def test_the_help_says_that_plugins_are_executed(run_cli, verb):
    help_ = " ".join(run_cli(verb, "--help").out.split())
    assert "plugin" in help_ and "execute" in help_ and "--no-plugins" in help_


def test_loading_a_plugin_writes_no_bytecode_beside_it(project, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    project.edit("import errno", "import errno\nimport helper_of_toy")
    (project.folder / "helper_of_toy.py").write_text("")
    project.write("one: {uses: toy.make}")
    project.plan()
    assert not list(project.folder.rglob("__pycache__"))
    assert sys.dont_write_bytecode is False
