from __future__ import annotations

import json
import sys

import pytest

from ptpipe import cli
from ptpipe.cli.common import echo, print_json, print_table, stdout_for_results

PLUGIN = """
from __future__ import annotations
from pathlib import Path
from typing import Self
from pydantic import field_validator
from ptpipe import Artifact, Check, Context, Reporter, StageConfig, hookimpl, stage

print("printed: import")

class Config(StageConfig):
    x: int = 1
    @field_validator("x")
    @classmethod
    def check(cls, x):
        print("printed: validator")
        return x
    def resolved_options(self):
        print("printed: resolved_options")
        return {}

class Out(Artifact):
    def save(self, folder: Path) -> None:
        print("printed: save")
        (folder / "x").write_text("x")
    @classmethod
    def load(cls, folder: Path) -> Self:
        print("printed: load")
        return cls()
    def summary(self):
        print("printed: summary")
        return {}
    @classmethod
    def deliverables(cls, folder):
        print("printed: deliverables")
        return []

def fingerprint(config):
    print("printed: fingerprint")
    return 1

def preflight(config):
    print("printed: preflight")
    return []

def workers(config):
    print("printed: workers")
    return 1

@stage("loud.make", fingerprint=fingerprint, preflight=preflight, workers=workers)
def make(config: Config, ctx: Context) -> Out:
    '''Make.'''
    print("printed: stage")
    return Out()

@stage("loud.take")
def take(config: StageConfig, ctx: Context, out: Out) -> Out:
    '''Take.'''
    return out

class Loud(Reporter):
    def run_finished(self, event):
        print("printed: reporter")

@hookimpl
def ptpipe_reporters():
    print("printed: ptpipe_reporters")
    return [Loud()]

@hookimpl
def ptpipe_check(plan):
    print("printed: ptpipe_check")
    return []

@hookimpl
def ptpipe_doctor(workers):
    print("printed: ptpipe_doctor")
    return [Check.ok("loud", "fine")]
"""
COMMANDS = (
    ("validate", "m.yaml"),
    ("plan", "m.yaml"),
    ("run", "m.yaml"),
    ("run", "m.yaml", "-s", "one.x=2", "--fresh", "one"),
    ("show", "last"),
    ("runs",),
    ("verify", "last"),
    ("stages", "--plugin", "./loud.py"),
    ("stages", "loud.make", "--plugin", "./loud.py"),
    ("plugins", "--plugin", "./loud.py"),
)


@pytest.fixture
def say(project, monkeypatch, capfd):
    """The command line, in this process: what it wrote to stdout and to stderr."""
    monkeypatch.chdir(project.folder)
    (project.folder / "loud.py").write_text(PLUGIN)
    project.write("one: {uses: loud.make}\ntwo: {uses: loud.take}", head="name: loud\nplugins: [./loud.py]")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ptpipe", *arguments])
        assert cli._exit_code() == 0
        return capfd.readouterr()

    return run


def test_what_plugins_print_is_no_result(say):
    printed = ""
    for command in COMMANDS:
        out, err = say(*command, "--json")
        json.loads(out)
        printed += err
        text = say(*command)
        assert "printed:" not in text.out, command
    for what in ("import", "validator", "resolved_options", "save", "load", "summary", "deliverables", "fingerprint"):
        assert f"printed: {what}" in printed
    for what in ("preflight", "workers", "stage", "reporter", "ptpipe_reporters", "ptpipe_check"):
        assert f"printed: {what}" in printed
    assert say("plan", "--help").out.startswith("Usage: ")


def test_results_have_stdout_of_their_own(capsys):
    with stdout_for_results():
        print("a plugin's")
        echo("a result")
        echo("a note", err=True)
        print_json({"a": 1})
        print_table(("name",), [("value",)])
    print("after")
    out, err = capsys.readouterr()
    assert out.split() == ["a", "result", "{", '"a":', "1", "}", "name", "value", "after"]
    assert err == "a plugin's\na note\n"
