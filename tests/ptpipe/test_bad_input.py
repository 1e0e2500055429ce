"""Every row of bad input, through the real command line: one line a mistake, all of them, and nothing written."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from itertools import pairwise

import pytest

USAGE, PLUGIN = 2, 6
HEAD = "version: 1\nplugins: [./toy.py]\nstages:\n"
ONE = "  one: {uses: toy.make}\n"
GOOD = HEAD + ONE


@dataclass(frozen=True)
class Row:
    """A manifest, and what is said of it."""

    manifest: str | bytes
    lines: tuple[str, ...]
    """Without the manifest's name in front; `...` stands for the rest."""
    code: int = USAGE
    arguments: tuple[str, ...] = ()
    plugins: tuple[tuple[str, str], ...] = ()
    """Files beside the manifest."""


def bad_plugin(source, reason, name="bad.py"):
    """A manifest that names a plugin which can't be loaded."""
    manifest = f"version: 1\nplugins:\n- ./toy.py\n- ./{name}\nstages:\n  one: {{uses: bad.kind_of_that_plugin}}\n"
    files = ((name, source),) if source else ()
    return Row(manifest, (f"4:3: plugin ./{name} failed to load: {reason}",), PLUGIN, plugins=files)


def bomb():
    lines = ["version: 1", "a: &a [x, x, x, x, x, x, x, x, x, x]"]
    names = "abcdefghijklmn"
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in pairwise(names)]
    return "\n".join(lines)


COPY_OF_MAKE = """
from __future__ import annotations
from ptpipe import Context, StageConfig, Verdict, hookimpl, stage

@stage("toy.make")
def make(config: StageConfig, ctx: Context) -> Verdict:
    raise NotImplementedError

@hookimpl
def ptpipe_stages():
    return [make]
"""

ROWS = {
    # Words
    "unknown kind": Row(
        HEAD + "  one: {uses: toy.mkae}\n", ("4:15: one: unknown stage kind 'toy.mkae' (did you mean 'toy.make'?)",)
    ),
    "unknown kind of a built-in family": Row(
        HEAD + "  one: {uses: quant.convrt}\n",
        ("4:15: one: unknown stage kind 'quant.convrt' (did you mean 'quant.convert'?)",),
    ),
    "unknown option": Row(
        HEAD + "  one: {uses: toy.make, with: {vlaue: 3}}\n",
        ("4:32: one: unknown option 'vlaue' of toy.make (did you mean 'value'?)",),
    ),
    "missing option": Row(GOOD + "  gate: {uses: toy.gate}\n", ("5:9: gate: option 'least' of toy.gate is required",)),
    "wrong type": Row(
        HEAD + "  one: {uses: toy.make, with: {value: three}}\n", ('4:39: one: value: should be a number, not "three"',)
    ),
    "number in quotes": Row(
        HEAD + "  one:\n    uses: toy.make\n    with:\n      value: '3'\n",
        ('7:14: one: value: should be a number, not "3" (without quotes it is a number)',),
    ),
    "out of range": Row(
        HEAD + "  one: {uses: toy.make, with: {value: -3}}\n",
        ("4:39: one: value: should be greater than or equal to 0, not -3",),
    ),
    "not a number": Row(
        HEAD + "  one: {uses: toy.make, with: {value: .nan}}\n",
        ("4:39: one: value: should be a finite number, not NaN",),
    ),
    "too large a number": Row(
        HEAD + "  one: {uses: toy.make, with: {value: 1e999}}\n",
        ("4:39: one: value: should be a finite number, not Infinity",),
    ),
    "thousands of digits": Row(
        HEAD + f"  one: {{uses: toy.make, with: {{value: {'9' * 5000}}}}}\n",
        ("4:39: one: value: should be a finite number, not Infinity",),
    ),
    "not a choice": Row(
        HEAD + "  one: {uses: toy.make, with: {mode: pliain}}\n",
        ("4:38: one: mode: should be 'plain' or 'loud', not \"pliain\" (did you mean 'plain'?)",),
    ),
    "a word of YAML 1.1": Row(
        GOOD + "  gate: {uses: toy.gate, with: {least: 1, fail_undecided: no}}\n",
        ('5:59: gate: fail_undecided: should be true or false, not "no" (in YAML 1.2 write false)',),
    ),
    # Wiring
    "unknown stage": Row(
        GOOD + "  sum: {uses: toy.add, needs: {a: one, b: on}}\n",
        ("5:43: sum: there is no stage 'on' (did you mean 'one'?)",),
    ),
    "a need that points downwards": Row(
        HEAD + "  sum: {uses: toy.add, needs: {a: one, b: one}}\n" + ONE,
        (
            "4:35: sum: 'one' comes later; needs refer to stages above only",
            "4:43: sum: 'one' comes later; needs refer to stages above only",
        ),
    ),
    "a stage that needs itself": Row(
        GOOD + "  sum: {uses: toy.add, needs: {a: one, b: sum}}\n", ("5:43: sum: a stage cannot need itself",)
    ),
    "ambiguous input": Row(
        GOOD + "  two: {uses: toy.make}\n  sum: {uses: toy.add, needs: {a: one}}\n",
        ("6:8: sum: input b (Number) fits several stages above: one, two; name one, such as ...",),
    ),
    "missing input": Row(
        HEAD + "  pair: {uses: toy.split}\n", ("4:9: pair: input a: no stage above has an output of type Number",)
    ),
    "unknown input": Row(
        GOOD + "  pair: {uses: toy.split, needs: {a: one, baias: one}}\n",
        ("5:43: pair: toy.split has no input 'baias'; it has a, bias (did you mean 'bias'?)",),
    ),
    "unknown output": Row(
        GOOD + "  pair: {uses: toy.split}\n  sum: {uses: toy.add, needs: {a: pair.low, b: pair.hihg}}\n",
        ("6:48: sum: pair (toy.split) has no output 'hihg'; it has low, high (did you mean 'high'?)",),
    ),
    "wrong type of input": Row(
        GOOD + "  text: {uses: toy.total, needs: {numbers: one}}\n  sum: {uses: toy.add, needs: {a: one, b: text}}\n",
        ("6:43: sum: b takes a Number; text (toy.total) has output: Text",),
    ),
    # Shape
    "repeated key": Row(GOOD + ONE, ("5:3: 'one' is given twice; first in line 4",)),
    "repeated option": Row(
        HEAD + "  one: {uses: toy.make, with: {value: 1, value: 2}}\n",
        ("4:42: 'value' is given twice; first in line 4",),
    ),
    "unknown top key": Row("sede: 7\n" + GOOD, ("1:1: unknown key 'sede' (did you mean 'seed'?)",)),
    "unknown key of a stage": Row(
        HEAD + "  one: {uses: toy.make, wiht: {}}\n", ("4:25: unknown key 'wiht' in stage one (did you mean 'with'?)",)
    ),
    "wrong version": Row(
        GOOD.replace("version: 1", "version: 2"), ("1:10: version: this ptpipe reads version 1, not 2",)
    ),
    "no version": Row(GOOD.replace("version: 1\n", ""), ("1:1: `version: 1` is missing",)),
    "bad seed": Row("seed: -1\n" + GOOD, ("1:7: seed: must be a whole number from 0 to 4294967295",)),
    "bad stage id": Row(
        HEAD + "  One: {uses: toy.make}\n",
        ("4:3: stage id 'One': lower-case letters, digits, '_' and '-' are allowed",),
    ),
    "bad name": Row("name: a/b\n" + GOOD, ("1:7: name: letters, digits, '_', '-' and '.', at most 64, are allowed",)),
    # Files
    "empty": Row("", ("1:1: the manifest is empty; `ptpipe init` writes one to start from",)),
    "a list": Row("- one\n- two\n", ("1:1: a manifest is a mapping with `stages`, not a list",)),
    "not YAML": Row(HEAD + "\tone: {}\n", ("4:1: not YAML: a tab; YAML is indented with spaces",)),
    "wrong indentation": Row(
        GOOD + " two: {uses: toy.make}\n",
        ("5:2: not YAML: this does not fit the lines above; is the indentation right?",),
    ),
    "a bracket left open": Row(HEAD + "  one: {uses: toy.make\n", ("5:1: not YAML: expected ',' or '}', ...",)),
    "10 MB": Row(GOOD + "#" * 10_000_000, ("1:1: larger than 256 kB: this is not a manifest",)),
    "an alias bomb": Row(bomb(), ("...: more than 50000 values, aliases expanded",)),
    "an alias of itself": Row(HEAD + "  one: &x {uses: *x}\n", ("4:18: the alias *x contains itself",)),
    "deep brackets": Row("[" * 50_000, ("1:33: nested more than 32 levels deep",)),
    "a tag": Row(
        "name: !!python/object/apply:os.system [x]\n" + GOOD,
        ("1:7: tags such as tag:yaml.org,2002:python/object/apply:os.system are not allowed here",),
    ),
    "two documents": Row(GOOD + "---\n" + GOOD, ("5:1: a second YAML document; a manifest is one",)),
    "not UTF-8": Row(b"version: 1\nname: caf\xe9\n", ("2:10: not UTF-8 text: byte 0xe9",)),
    "UTF-16": Row(GOOD.encode("utf-16"), ("1:1: not UTF-8 text: byte 0xff",)),
    "binary zeros": Row(b"\0" * 1000, ("1:1: not YAML: it has the character U+0000",)),
    # The command line
    "an override without a value": Row(
        GOOD, ("-s one.value: not of the form STAGE.OPTION=VALUE",), arguments=("-s", "one.value")
    ),
    "an override of nothing": Row(
        GOOD, ("-s onee.value: there is no stage 'onee' (did you mean 'one'?)",), arguments=("-s", "onee.value=3")
    ),
    "an override of an unknown option": Row(
        GOOD,
        ("-s one.valeu: unknown option 'valeu' of toy.make (did you mean 'value'?)",),
        arguments=("-s", "one.valeu=3"),
    ),
    "an override of a wrong type": Row(
        GOOD, ('-s one.value: value: should be a number, not "x"',), arguments=("-s", "one.value=x")
    ),
    "an override that is not YAML": Row(GOOD, ("-s one.value=[1: not YAML: ...",), arguments=("-s", "one.value=[1")),
    "a bad seed on the command line": Row(
        GOOD, ("-s seed=x: a seed is a whole number from 0 to 4294967295",), arguments=("-s", "seed=x")
    ),
    "fresh what is not there": Row(
        GOOD, ("--fresh onee: there is no stage 'onee' (did you mean 'one'?)",), arguments=("--fresh", "onee")
    ),
    # Plugins
    "a plugin with a wrong line": bad_plugin("x = 1\ny = = 2\n", "SyntaxError: invalid syntax (bad.py:2)"),
    "a plugin that lacks a module": bad_plugin(
        "import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all' (bad.py:1)"
    ),
    "a plugin that exits": bad_plugin("import sys\nsys.exit(0)", "SystemExit: 0 (bad.py:2)"),
    "a plugin that is not there": bad_plugin(
        "", "FileNotFoundError: there is no file ... (did you mean './toy.py'?)", "tyo.py"
    ),
    "a plugin that prints": Row(
        GOOD.replace("make", "mkae"), ("4:15: one: unknown stage kind 'toy.mkae' (did you mean 'toy.make'?)",)
    ),
    "a plugin that offers nothing": bad_plugin("x = 1", "TypeError: it has no stage and no hook; ..."),
    "a kind that two plugins offer": Row(
        "version: 1\nplugins:\n- ./toy.py\n- ./copy_of.py\nstages:\n" + ONE,
        ("4:3: plugin ./copy_of.py and plugin ./toy.py both offer it: stage kind toy.make",),
        PLUGIN,
        plugins=(("copy_of.py", COPY_OF_MAKE),),
    ),
    # Several
    "all at once": Row(
        HEAD
        + textwrap.indent(
            textwrap.dedent("""\
            one: {uses: toy.make, with: {vlaue: 1, mode: quiet}}
            two: {uses: toy.mkae}
            sum: {uses: toy.add, needs: {a: one, b: noe}}
            gate: {uses: toy.gate, needs: {a: sum}}
            """),
            "  ",
        ),
        (
            "4:48: one: mode: should be 'plain' or 'loud', not \"quiet\"",
            "4:32: one: unknown option 'vlaue' of toy.make (did you mean 'value'?)",
            "5:15: two: unknown stage kind 'toy.mkae' (did you mean 'toy.make'?)",
            "6:43: sum: there is no stage 'noe' (did you mean 'one'?)",
            "7:9: gate: option 'least' of toy.gate is required",
        ),
    ),
}


def fits(line, pattern):
    """Whether the line is the pattern, in which `...` stands for anything."""
    position = 0
    parts = pattern.split("...")
    if not (line.startswith(parts[0]) and line.endswith(parts[-1])):
        return False
    for part in parts:
        position = line.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_bad_input(project, run_cli, row):
    content = row.manifest if isinstance(row.manifest, bytes) else row.manifest.encode()
    project.manifest.write_bytes(content)
    for name, source in row.plugins:
        (project.folder / name).write_text(source)
    before = sorted(project.folder.rglob("*"))
    built_in = row is ROWS["unknown kind of a built-in family"]
    ended = run_cli("run", "m.yaml", *row.arguments, alone=not built_in)
    assert ended.out == ""
    assert "Traceback" not in ended.err
    lines = [line.removeprefix("m.yaml:") for line in ended.err.splitlines()]
    assert len(lines) == len(row.lines), ended.err
    for line, pattern in zip(lines, row.lines, strict=True):
        assert fits(line, pattern), (line, pattern)
    assert ended.code == row.code
    assert [path for path in sorted(project.folder.rglob("*")) if "__pycache__" not in path.parts] == before


@pytest.mark.parametrize(
    ("path", "message"),
    [("absent.yaml", "cannot read absent.yaml: No such file or directory"), (".", "cannot read .: Is a directory")],
)
def test_a_manifest_that_cannot_be_read(run_cli, tmp_path, path, message):
    ended = run_cli("run", path)
    assert (ended.code, ended.out, ended.err) == (USAGE, "", message + "\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbf" + GOOD.encode(), GOOD.replace("\n", "\r\n").encode()], ids=["BOM", "CRLF"]
)
def test_what_is_fine(project, run_cli, content):
    project.manifest.write_bytes(content)
    ended = run_cli("validate", "m.yaml")
    assert (ended.code, ended.out) == (0, "m.yaml: 1 stage, no problems\n")


def test_validate_says_the_same_as_json(project, run_cli):
    project.write("one: {uses: toy.mkae}\ntwo: {uses: toy.make, with: {valeu: 1}}")
    ended = run_cli("validate", "m.yaml", "--json")
    assert ended.code == USAGE
    assert ended.json == {
        "problems": [
            {
                "message": "one: unknown stage kind 'toy.mkae'",
                "location": {"path": "m.yaml", "line": 5, "column": 15},
                "suggestion": "toy.make",
                "code": 2,
                "severity": "error",
            },
            {
                "message": "two: unknown option 'valeu' of toy.make",
                "location": {"path": "m.yaml", "line": 6, "column": 32},
                "suggestion": "value",
                "code": 2,
                "severity": "error",
            },
        ],
        "warnings": [],
        "notes": [],
    }


@pytest.mark.parametrize("verb", ["plan", "validate"])
def test_other_verbs_say_the_same(project, run_cli, verb):
    project.write("one: {uses: toy.mkae}")
    ended = run_cli(verb, "m.yaml")
    assert ended.code == USAGE
    assert ended.err == "m.yaml:5:15: one: unknown stage kind 'toy.mkae' (did you mean 'toy.make'?)\n"
