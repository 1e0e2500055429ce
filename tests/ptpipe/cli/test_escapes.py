"""Nothing that others wrote reaches a terminal as a command of its own: manifests, plugins, file names, records."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass

import pytest

from ptpipe import ExitCode, cli
from ptpipe.store.documents import read_document, write_document

NASTY = {
    "title": "\x1b]0;PWNED\x07",
    "clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "C1 CSI": "\x9b2J",
    "bidi override": "\u202egnp.exe\u2066",
    "invisible": "\u200b\u3164\ufe0f\U000e0041",
    "private": "\ue000\U0010fffd\u0378",
    "line breaks": "a\r\nb\x85c\u2028d",
}
PLUGIN = """
from __future__ import annotations
from pydantic import Field
from ptpipe import Context, StageConfig, StageError, Verdict, hookimpl, stage, Decision

class NastyConfig(StageConfig):
    how: str = Field({nasty}, description={nasty})

def say(config: NastyConfig, ctx: Context) -> Verdict:
    ctx.notice({nasty})
    ctx.log({nasty})
    ctx.metric(**{{{nasty}: {nasty}}})
    if config.how == "fail":
        raise StageError({nasty})
    return Verdict(Decision.REFUSED, {nasty})

say.__doc__ = "Say {escaped}."
say = stage("nasty.say")(say)
"""


@pytest.fixture(params=NASTY.values(), ids=NASTY)
def nasty(request):
    """A text that a terminal, or a reader, would take for something else."""
    return request.param


@pytest.fixture
def say(project, monkeypatch):
    """The command line, in this process and with the reporters: every character that it prints must be printable."""
    monkeypatch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ("ptpipe_report",))
    monkeypatch.chdir(project.folder)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ptpipe", *map(str, arguments)])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli._exit_code()
        shown = [*out.getvalue().split("\n"), *err.getvalue().split("\n")]
        assert all(map(str.isprintable, shown)), shown
        assert not set("".join(shown)) & set("\u3164\ufe0f"), shown
        assert "Traceback" not in err.getvalue()
        return Ended(code, out.getvalue(), err.getvalue())

    return run


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    out: str
    err: str


def test_manifests_and_overrides(project, say, nasty):
    word = json.dumps(nasty)
    texts = [
        f"{word}: {{uses: toy.make}}",
        f"one: {{uses: {word}}}",
        f"one: {{uses: toy.make, with: {{{word}: 1}}}}",
        f"one: {{uses: toy.make, with: {{value: {word}, mode: {word}}}}}",
        f"one: {{uses: toy.total, needs: {{numbers: [{word}], {word}: one}}}}",
        f"one: {{{word}: 1}}",
        f"one: *{nasty.split()[0]}",
        f"one: !{nasty.split()[0]} x",
        f"one: {nasty}",
    ]
    for text in texts:
        project.write(text)
        assert say("validate", "m.yaml").code == 2, text
    project.write("one: {uses: toy.make}", head=f"plugins: [./toy.py, {word}, './{nasty.split()[0]}.py']\nname: {word}")
    ended = say("validate", "m.yaml")
    assert ended.code == (ExitCode.PLUGIN if "failed to load" in ended.err else ExitCode.USAGE)
    project.write("one: {uses: toy.make}", head=f"plugins: [./toy.py, {word}]")
    for verb in ("validate", "plan", "run"):
        assert say(verb, "m.yaml").code == 6
    project.write("one: {uses: toy.make}")
    for setting in (nasty, f"{nasty}=1", f"one.{nasty}=1", f"one.value={nasty}", f"seed={word}", f"one={word}"):
        assert say("validate", "m.yaml", "-s", setting).code == 2
    assert say("run", "m.yaml", "--fresh", nasty).code == 2


def test_file_names_and_the_command_line(project, say, nasty):
    manifest = project.folder / f"{nasty.replace('/', '')}.yaml"
    project.write("one: {uses: toy.make}").rename(manifest)
    assert say("validate", manifest.name).code == 0
    assert say("plan", manifest.name).code == 0
    assert say("run", manifest.name, "--artifacts", nasty.replace("/", "")).code == 0
    for arguments in ([nasty], ["validate", nasty], ["show", nasty], ["stages", nasty], ["run", f"--{nasty}"]):
        assert say(*arguments).code == 2
    assert say("runs", "--artifacts", f"none{nasty}").code == 0
    assert say("init", f"new{nasty.replace('/', '')}.yaml").code == 0


def test_plugins_and_records(project, say, nasty):
    source = PLUGIN.format(nasty=ascii(nasty), escaped=ascii(nasty)[1:-1])
    (project.folder / "nasty.py").write_text(source)
    project.write("one: {uses: nasty.say}\ntwo: {uses: nasty.say, with: {how: fail}}", head="plugins: [./nasty.py]")
    assert say("run", "m.yaml", "-v", "--keep-going").code in (1, 3)
    for verb in ("stages", "plugins", "schema"):
        assert say(verb, "--plugin", "./nasty.py").code == 0
    assert say("stages", "nasty.say", "--plugin", "./nasty.py").code == 0
    path = next(project.artifacts.glob("runs/*/record.json"))
    record = read_document(path)
    record |= {"manifest": nasty, "overrides": {nasty: nasty}, "machine": {**record["machine"], "processor": nasty}}
    record["stages"][0] |= {"kind": nasty, "stage_id": nasty, "deliverables": [nasty], "message": nasty}
    write_document(path, json.dumps(record))
    for arguments in (["runs"], ["show", "last"], ["plan", "m.yaml", "--why"]):
        assert say(*arguments).code == 0


def test_a_terminal_without_unicode_is_no_bug(project, run_cli):
    project.write("one: {uses: toy.make}").rename(project.folder / "中.yaml")
    ended = run_cli("validate", "中.yaml", alone=True, PYTHONIOENCODING="latin-1")
    assert (ended.code, ended.out, ended.err) == (0, "\\u4e2d.yaml: 1 stage, no problems\n", "")
