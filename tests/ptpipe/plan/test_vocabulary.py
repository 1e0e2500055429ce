"""Check plugins, and every way for one to be broken."""

from __future__ import annotations

import gc
import sys
import textwrap

import pytest

from ptpipe import ExitCode, Location
from ptpipe.plan.vocabulary import call_each, gc_paused, load_vocabulary

GOOD = """
from ptpipe import Context, StageConfig, Verdict, hookimpl, stage

@stage("{kind}")
def some(config: StageConfig, ctx: Context) -> Verdict:
    raise NotImplementedError

@hookimpl
def ptpipe_stages():
    return [some]
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ())
    monkeypatch.setattr("ptpipe.plan.vocabulary._entry_points", list)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def write(folder, name, text, **words):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).format(**words) if words else textwrap.dedent(text), encoding="utf-8")
    return path


def the_problem(vocabulary):
    (problem,) = vocabulary.problems
    assert problem.code == ExitCode.PLUGIN
    return str(problem)


def test_a_file_is_a_plugin(tmp_path):
    path = write(tmp_path, "rooms/my-net.py", GOOD, kind="a.b")
    vocabulary = load_vocabulary(["rooms/my-net.py"], tmp_path)
    assert not vocabulary.problems
    assert list(vocabulary.stages) == ["a.b"]
    (plugin,) = vocabulary.plugins
    assert (plugin.name, plugin.source, plugin.module.__name__) == ("rooms/my-net.py", "manifest", "ptpipe_file_my_net")
    assert vocabulary.owners["a.b"] is plugin
    assert load_vocabulary([str(path)], tmp_path / "elsewhere").stages.keys() == {"a.b"}, "an absolute path"


def test_without_the_hook_a_module_offers_the_stages_that_it_defines(tmp_path):
    bare = GOOD.partition("@hookimpl")[0]
    write(tmp_path, "one.py", bare, kind="a.one")
    write(tmp_path, "two.py", bare + "again = some\nfrom one import some as other\n", kind="a.two")
    vocabulary = load_vocabulary(["./two.py"], tmp_path)
    assert not vocabulary.problems
    assert list(vocabulary.stages) == ["a.two"], "not the one that it imports, and none twice"
    package = bare + "\nfrom pack.inner import some as inner\n"
    write(tmp_path, "pack/__init__.py", package, kind="a.outer")
    write(tmp_path, "pack/inner.py", bare, kind="a.inner")
    assert list(load_vocabulary(["pack"]).stages) == ["a.outer", "a.inner"]


def test_with_the_hook_a_module_offers_what_it_returns(tmp_path):
    more = GOOD.replace("[some]", "[]")
    write(tmp_path, "none.py", more, kind="a.b")
    vocabulary = load_vocabulary(["./none.py"], tmp_path)
    assert (vocabulary.problems, vocabulary.stages) == ((), {})


def test_a_file_is_loaded_anew_each_time(tmp_path):
    write(tmp_path, "net.py", GOOD, kind="a.b")
    assert list(load_vocabulary(["./net.py"], tmp_path).stages) == ["a.b"]
    write(tmp_path, "net.py", GOOD, kind="a.cc")
    assert list(load_vocabulary(["./net.py"], tmp_path).stages) == ["a.cc"]


def test_a_file_may_import_the_files_beside_it(tmp_path):
    write(tmp_path, "beside_the_plugin.py", "WORD = 3")
    write(tmp_path, "net.py", "from beside_the_plugin import WORD\n" + GOOD.format(kind="a.b"))
    assert not load_vocabulary(["./net.py"], tmp_path).problems


def test_an_installed_module_is_a_plugin(tmp_path):
    write(tmp_path, "acme_rooms/__init__.py", GOOD, kind="acme.b")
    sys.path.append(str(tmp_path))
    vocabulary = load_vocabulary(["acme_rooms"])
    assert vocabulary.owners["acme.b"].name == "acme_rooms"


class EntryPoint:
    def __init__(self, name, value):
        self.name, self.value = name, value


def test_entry_points_are_loaded_and_may_be_named_as_well(tmp_path, monkeypatch):
    write(tmp_path, "acme_entry.py", GOOD, kind="acme.b")
    sys.path.append(str(tmp_path))
    monkeypatch.setattr("ptpipe.plan.vocabulary._entry_points", lambda: [EntryPoint("acme", "acme_entry")])
    vocabulary = load_vocabulary(["acme_entry"])
    assert [(plugin.name, plugin.source) for plugin in vocabulary.plugins] == [("acme", "entry point")]
    assert not vocabulary.problems


def test_a_broken_plugin_that_nobody_named_is_remembered_only(monkeypatch):
    monkeypatch.setattr("ptpipe.plan.vocabulary._entry_points", lambda: [EntryPoint("acme", "acme_that_is_not_there")])
    vocabulary = load_vocabulary()
    assert not vocabulary.problems
    assert vocabulary.broken == {"acme": "ModuleNotFoundError: No module named 'acme_that_is_not_there'"}


OPTIONS = "from ptpipe import Artifact, Context, StageConfig, stage\nclass Options(StageConfig):"
STAGE = "@stage('a.b')\ndef b(config: Options, ctx: Context) -> Artifact: ..."


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = = 1", "SyntaxError: invalid syntax (bad.py:1)"),
        ("import os\nimport not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all' (bad.py:2)"),
        ("\n\nraise SystemExit(3)", "SystemExit: 3 (bad.py:3)"),
        ("def f():\n  return {}['a']\nf()", "KeyError: 'a' (bad.py:2)"),
        ("raise RuntimeError", "RuntimeError (bad.py:1)"),
        ("raise RuntimeError('one\\ntwo')", "RuntimeError: one (bad.py:1)"),
        ("import json\njson.loads('{')", "JSONDecodeError: Expecting property name enclosed in double quotes"),
        (
            "from ptpipe import stage\n@stage('no dot')\ndef f(): ...",
            "TypeError: stage kind 'no dot' is not of the form family.thing (lower case) (bad.py:2)",
        ),
        (
            "x = 1",
            "TypeError: it has no stage and no hook; is `@stage` or `@hookimpl` missing above a function?",
        ),
        (
            "from ptpipe import hookimpl\n@hookimpl\ndef ptpipe_stagse(): ...",
            "PluginValidationError: unknown hook 'ptpipe_stagse' in plugin",
        ),
        (
            "from ptpipe import hookimpl\n@hookimpl\ndef ptpipe_check(plan, extra): ...",
            "hookimpl definition: ptpipe_check(plan, extra); Argument(s) {'extra'} are declared in the hookimpl but",
        ),
        (
            "from ptpipe import hookimpl\n@hookimpl\ndef ptpipe_stages():\n  return [len]",
            "TypeError: ptpipe_stages() offered <built-in function len>, which is not made by @stage",
        ),
        ("from ptpipe import hookimpl\n@hookimpl\ndef ptpipe_stages():\n  1 / 0", "division by zero (bad.py:4)"),
        (
            f"{OPTIONS}\n  x: object() = 1\n{STAGE}",
            "TypeError: options Options: Unable to generate pydantic-core schema for <object object",
        ),
        (f"{OPTIONS}\n  x: 'Decimal' = 1\n{STAGE}", "TypeError: options Options: name 'Decimal' is not defined"),
        (
            f"from collections.abc import Callable\n{OPTIONS}\n  x: Callable[[], int] | None = None\n{STAGE}",
            "TypeError: options Options: Cannot generate a JsonSchema for core_schema.CallableSchema",
        ),
        (
            f"from pydantic import BaseModel\nclass Size(BaseModel):\n  width: int = 1\n{OPTIONS}\n"
            f"  sizes: dict[str, tuple[Size, ...]] = {{}}\n{STAGE}",
            "TypeError: options Options: the group Size ignores unknown options; make it a StageConfig",
        ),
        (
            f"{OPTIONS}\n  model_config = {{'extra': 'ignore'}}\n  width: int = 1\n{STAGE}",
            "TypeError: options Options: the group Options ignores unknown options; make it a StageConfig",
        ),
    ],
)
def test_a_plugin_that_fails_to_load_says_why_and_where(tmp_path, source, reason):
    write(tmp_path, "bad.py", source)
    problem = the_problem(load_vocabulary(["./bad.py"], tmp_path))
    assert problem.startswith("plugin ./bad.py failed to load: ")
    assert reason in problem
    assert "\n" not in problem


def test_names_that_lead_nowhere(tmp_path):
    write(tmp_path, "prune.py", GOOD, kind="a.b")
    missing = the_problem(load_vocabulary(["./prun.py"], tmp_path))
    assert missing.endswith(f"there is no file {tmp_path / 'prun.py'} (did you mean './prune.py'?)")
    module = the_problem(load_vocabulary(["prune"], tmp_path))
    assert module.endswith("No module named 'prune' (did you mean './prune.py'?)")
    (tmp_path / "text.txt").write_text("")
    assert "a plugin's name ends in .py" in the_problem(load_vocabulary(["./text.txt"], tmp_path))
    assert "there is no file" in the_problem(load_vocabulary(["./"], tmp_path))
    assert the_problem(load_vocabulary(["./" + "x" * 5000 + ".py"], tmp_path)).startswith("plugin ./xxx")


def test_after_a_hundred_broken_plugins_no_further_one_is_executed(tmp_path):
    names = [f"./absent{number}.py" for number in range(100)]
    (tmp_path / "executed.py").write_text("from pathlib import Path\nPath(__file__).with_suffix('.seen').touch()")
    vocabulary = load_vocabulary([*names, "./executed.py"], tmp_path, [Location("m", line, 1) for line in range(101)])
    assert not (tmp_path / "executed.seen").exists()
    assert str(vocabulary.problems[7]).startswith("m:7:1: plugin ./absent7.py failed to load: ")
    assert str(vocabulary.problems[-1]) == "m:100:1: no further plugin was loaded"


def test_a_plugin_that_prints_does_not_spoil_stdout(tmp_path, capsys):
    write(tmp_path, "net.py", "print('a banner')\n" + GOOD.format(kind="a.b"))
    load_vocabulary(["./net.py"], tmp_path)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "a banner" in printed.err


@pytest.mark.parametrize("signal", ["KeyboardInterrupt", "__import__('ptpipe.errors').errors.Terminated"])
def test_an_interrupt_while_loading_is_no_broken_plugin(tmp_path, signal):
    write(tmp_path, "net.py", f"raise {signal}")
    with pytest.raises(BaseException, match=r"^$") as raised:
        load_vocabulary(["./net.py"], tmp_path)
    assert not isinstance(raised.value, Exception)


def test_a_kind_that_two_plugins_offer(tmp_path):
    write(tmp_path, "one.py", GOOD, kind="a.b")
    write(tmp_path, "two.py", GOOD, kind="a.b")
    problem = the_problem(load_vocabulary(["./one.py", "./two.py"], tmp_path))
    assert problem == "plugin ./two.py and plugin ./one.py both offer it: stage kind a.b"


def test_a_kind_that_one_plugin_offers_twice(tmp_path):
    twice = GOOD.replace("return [some]", "return [some, stage('a.b')(some.function)]")
    write(tmp_path, "one.py", twice, kind="a.b")
    assert the_problem(load_vocabulary(["./one.py"], tmp_path)) == "plugin ./one.py offers it twice: stage kind a.b"


def test_two_files_of_one_name(tmp_path):
    write(tmp_path, "a/net.py", GOOD, kind="a.b")
    write(tmp_path, "b/net.py", GOOD, kind="b.b")
    problem = the_problem(load_vocabulary(["a/net.py", "b/net.py"], tmp_path))
    assert problem.endswith(f"{tmp_path / 'a' / 'net.py'} has the same module name; rename one of them")


@pytest.mark.parametrize("helper", ["helpers.py", "helpers/__init__.py"])
@pytest.mark.parametrize("line", ["import {0}", "from {0} import value", "def late():\n    import {0}"])
def test_two_plugins_with_a_module_of_one_name(tmp_path, helper, line):
    """The second would run the code beside the first. What neither imports, and what others install, does not count."""
    name = f"helpers_of_{tmp_path.name}"
    for folder in ("a", "b"):
        write(
            tmp_path, f"{folder}/plugin_{folder}.py", line.format(name) + "\nimport random\n" + GOOD, kind=f"{folder}.b"
        )
        write(tmp_path, f"{folder}/{helper.replace('helpers', name)}", f"value = {folder!r}")
        write(tmp_path, f"{folder}/unused_{name}.py", "")
        write(tmp_path, f"{folder}/random.py", "raise SystemExit")
    with_both = load_vocabulary(["a/plugin_a.py", "b/plugin_b.py"], tmp_path)
    first, second = (tmp_path / folder / helper.replace("helpers", name) for folder in "ab")
    problem = the_problem(with_both)
    assert problem.endswith(f"it imports {name}, which is {first} in this process, not {second}; rename one of them")


@pytest.mark.parametrize("again", ["./net.py", "net.py"])
def test_a_file_named_twice(tmp_path, again):
    write(tmp_path, "net.py", GOOD, kind="a.b")
    assert the_problem(load_vocabulary(["./net.py", again], tmp_path)).endswith("it is named twice")


ANSWERS = """
from ptpipe import hookimpl

@hookimpl
def ptpipe_reporters():
    {body}
"""


def test_each_plugin_is_asked_alone(tmp_path):
    bodies = {"a.py": "return [1, 2]", "b.py": "return 1 / 0", "c.py": "yield 3", "d.py": "return None"}
    for name, body in bodies.items():
        write(tmp_path, name, ANSWERS, body=body)
    manager = load_vocabulary(list(bodies), tmp_path).manager
    answers = [tuple(answer) for answer in call_each(manager, "ptpipe_reporters")]
    assert answers == [
        ("a.py", [1, 2], ""),
        ("b.py", [], "ZeroDivisionError: division by zero (b.py:6)"),
        ("c.py", [3], ""),
        ("d.py", [], ""),
    ]


@pytest.mark.parametrize("was_on", [True, False])
def test_no_garbage_is_looked_for_while_importing(was_on):
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(KeyError), gc_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()
