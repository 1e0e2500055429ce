"""Whatever a result depends on is changed between two runs, and the second must not take the first one's result."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import py_compile
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ptpipe import load_plan, run
from ptpipe.execution.engine import source_digests
from ptpipe.plan.cache_status import cache_statuses
from ptpipe.plan.keys import compute_keys
from ptpipe.store.documents import read_document, write_document
from ptpipe.store.store import Store

PLUGIN = """
import importlib, json, sys, time
from dataclasses import dataclass
from pathlib import Path
from ptpipe import Artifact, Context, StageConfig, stage
{imports}

@dataclass
class Word(Artifact):
    text: str

    def save(self, folder):
        (folder / "word").write_text(self.text)

    @classmethod
    def load(cls, folder):
        return cls((folder / "word").read_text())

def word():
    {body}

@stage("my.word")
def make(config: StageConfig, ctx: Context) -> Word:
    \"\"\"Say a word.\"\"\"
    return Word(str(word()))
"""
BODY = """
from ptpipe import Context, StageConfig, stage
from word import Word
from deep import helper

def make_stage():
    @stage("my.word")
    def make(config: StageConfig, ctx: Context) -> Word:
        \"\"\"Say a word.\"\"\"
        return Word(str(helper.WORD))
    return make
"""
WORD = PLUGIN.partition("@dataclass")[0].format(imports="") + "@dataclass" + PLUGIN.partition("@dataclass")[2]


class Bench:
    """A manifest with one stage, `word`, of a plugin that each test writes; each run imports everything anew."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.manifest(["./plugin.py"])

    def manifest(self, plugins: list[str]) -> None:
        text = f"version: 1\nname: stale\nplugins: {json.dumps(plugins)}\nstages:\n  word: {{uses: my.word}}\n"
        (self.folder / "m.yaml").write_text(text)

    def write(self, **files: str) -> None:
        """`write(plugin_py=..., ns__helper_py=...)`."""
        for name, text in files.items():
            path = self.folder / (name.removesuffix("_py").replace("__", "/").replace("init", "__init__") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    def plugin(self, imports: str, body: str = "return WORD") -> None:
        self.write(plugin_py=PLUGIN.format(imports=imports, body=body))

    def on_path(self, folder: str) -> None:
        (self.folder / folder).mkdir(exist_ok=True)
        self._monkeypatch.syspath_prepend(str(self.folder / folder))

    @contextlib.contextmanager
    def process(self):
        """As a process of its own would see it."""
        before, path = set(sys.modules), list(sys.path)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - before:
                del sys.modules[name]

    def event(self):
        with self.process():
            result = run(self.folder / "m.yaml", artifacts=self.folder / "artifacts")
        event = result.stages["word"]
        assert result.exit_code == (event.outcome == "failed")
        return event

    def outcome(self) -> str:
        return str(self.event().outcome)

    def reasons(self) -> list[str]:
        with self.process():
            plan, store = load_plan(self.folder / "m.yaml"), Store(self.folder / "artifacts")
            sources = source_digests(plan, store)
            (status,) = cache_statuses(plan, compute_keys(plan, sources), store, sources)
        return ["cached"] if status.entry else list(status.reasons)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file that changes within a second, and keeps its size
    return Bench(tmp_path, monkeypatch)


def beside(bench: Bench) -> None:
    bench.write(helper_py="WORD = 1")
    bench.plugin("from helper import WORD")


def namespace_package(bench: Bench) -> None:
    bench.write(ns__helper_py="WORD = 1")
    bench.plugin("from ns import helper", "return helper.WORD")


def nested_namespace_package(bench: Bench) -> None:
    bench.write(ns__deep__helper_py="WORD = 1")
    bench.plugin("from ns.deep.helper import WORD")


def imported_by_the_file_that_defines_the_stage(bench: Bench) -> None:
    bench.write(body_py=BODY, deep__helper_py="WORD = 1", word_py=WORD.format(body="return 0"))
    bench.write(plugin_py="import body\nmy_stage = body.make_stage()\n\ndef ptpipe_stages():\n    return [my_stage]\n")
    text = (bench.folder / "plugin.py").read_text()
    bench.write(plugin_py="from ptpipe import hookimpl\n" + text.replace("def ptpipe", "@hookimpl\ndef ptpipe"))


def the_plugin_of_a_stage_defined_elsewhere(bench: Bench) -> None:
    imported_by_the_file_that_defines_the_stage(bench)
    text = (bench.folder / "plugin.py").read_text()
    bench.write(plugin_py=f"import helper\nimport deep.helper\ndeep.helper.WORD = helper.WORD\n{text}")
    bench.write(helper_py="WORD = 1")


def library_on_the_path(bench: Bench) -> None:
    bench.on_path("elsewhere")
    bench.write(elsewhere__library__init_py="", elsewhere__library__a_py="from .b.helper import WORD")
    bench.write(elsewhere__library__b__init_py="from . import c", elsewhere__library__b__c_py="")
    bench.write(elsewhere__library__b__helper_py="from ..d.e import *\nWORD = 1", elsewhere__library__d__e_py="")
    bench.plugin("import library.a as a", "return a.WORD")


def package_around_a_library_module(bench: Bench) -> None:
    bench.on_path("elsewhere")
    bench.write(elsewhere__library__a_py="WORD = 0", elsewhere__library__init_py="from .helper import WORD")
    bench.write(elsewhere__library__helper_py="WORD = 1")
    bench.plugin("from library.a import WORD")


def editable_library(bench: Bench) -> None:
    """As setuptools installs it: a finder that knows where a package is."""
    bench.write(src__library__init_py="from library.helper import WORD", src__library__helper_py="WORD = 1")

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            file = bench.folder / "src" / "library" / "__init__.py"
            return importlib.util.spec_from_file_location(name, file) if name == "library" else None

    bench._monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    bench.plugin("from library import WORD")


def beside_a_package_plugin(bench: Bench) -> None:
    bench.on_path(".")
    bench.manifest(["acme"])
    bench.write(acme__init_py=PLUGIN.format(imports="from sibling.helper import WORD", body="return WORD"))
    bench.write(sibling__helper_py="WORD = 1")


def named_import(bench: Bench) -> None:
    bench.write(helper_py="WORD = 1")
    bench.plugin("", 'return importlib.import_module("helper").WORD')


STATIC = [
    beside, namespace_package, nested_namespace_package, imported_by_the_file_that_defines_the_stage,
    the_plugin_of_a_stage_defined_elsewhere, library_on_the_path, package_around_a_library_module, editable_library,
    beside_a_package_plugin, named_import,
]  # fmt: skip


def dynamic(bench: Bench) -> None:
    bench.write(helper_py="WORD = 1")
    bench.plugin("", 'return importlib.import_module("hel" + "per").WORD')


def dynamic_submodule(bench: Bench) -> None:
    bench.write(nets__helper_py="WORD = 1", nets__init_py="")
    bench.plugin("import nets", 'return importlib.import_module("." + "helper", "nets").WORD')


def dynamic_while_loading(bench: Bench) -> None:
    bench.write(helper_py="WORD = 1")
    bench.plugin('WORD = importlib.import_module("hel" + "per").WORD')


def imported_by_a_dynamic_one(bench: Bench) -> None:
    bench.write(first_py="from helper import WORD", helper_py="WORD = 1")
    bench.plugin("", 'return importlib.import_module("fi" + "rst").WORD')


def loaded_from_a_path(bench: Bench) -> None:
    bench.write(far__helper_py="WORD = 1")
    bench.plugin(
        "import importlib.util as u",
        f"""s = u.spec_from_file_location("far_away", {str(bench.folder / "far/helper.py")!r})
    m = sys.modules["far_away"] = u.module_from_spec(s)
    s.loader.exec_module(m)
    return m.WORD""",
    )


DYNAMIC = {
    dynamic: "helper.py", dynamic_submodule: "nets/helper.py", dynamic_while_loading: "helper.py",
    imported_by_a_dynamic_one: "helper.py", loaded_from_a_path: "{folder}/far/helper.py",
}  # fmt: skip


def helper_of(bench: Bench) -> Path:
    (path,) = bench.folder.rglob("helper.py")
    return path


@pytest.mark.parametrize("case", STATIC, ids=lambda case: case.__name__)
def test_code_that_the_source_imports(bench, case):
    case(bench)
    assert bench.outcome() == "done"
    assert bench.reasons() == ["cached"]
    helper = [
        path for path in bench.folder.rglob("helper.py") if "deep" not in path.parts or case.__name__[:3] != "the"
    ]
    helper[0].write_text("WORD = 2")
    assert bench.reasons() == ["the plugin's code"]
    assert bench.outcome() == "done"


@pytest.mark.parametrize("case", DYNAMIC, ids=lambda case: case.__name__)
def test_code_that_is_imported_by_a_computed_name(bench, case):
    case(bench)
    assert bench.outcome() == "done"
    assert bench.reasons() == ["cached"]
    helper_of(bench).write_text("WORD = 1  # a comment")
    assert bench.reasons() == ["cached"]
    helper_of(bench).write_text("WORD = 2")
    shown = DYNAMIC[case].format(folder=bench.folder)
    assert bench.reasons() == [f"a module it imported changed: {shown}"]
    assert bench.outcome() == "done"
    assert bench.reasons() == ["cached"]
    if case is dynamic_while_loading:
        return
    path = helper_of(bench)
    path.rename(path.with_name("other"))
    assert bench.reasons() == [f"a module it imported is missing: {shown}"]


def test_a_module_that_shadows_another(bench):
    dynamic(bench)
    bench.on_path("first")
    assert bench.outcome() == "done"
    bench.write(first__helper_py="WORD = 2")
    assert bench.reasons() == ["a module it imported changed: helper.py"]


def test_modules_that_a_stage_writes_are_no_dependency(bench):
    bench.plugin(
        "",
        """Path(__file__).with_name("made").mkdir(exist_ok=True)
    name = f"made_{time.time_ns()}"
    Path(__file__).with_name("made").joinpath(name + ".py").write_text("WORD = 1")
    spec = importlib.util.spec_from_file_location("of_no_name", Path(__file__).with_name("made") / (name + ".py"))
    module = sys.modules["of_no_name"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WORD""",
    )
    text = (bench.folder / "plugin.py").read_text()
    bench.write(plugin_py=text.replace("import importlib,", "import importlib, importlib.util,"))
    assert bench.outcome() == "done"
    assert bench.reasons() == ["cached"]
    for file in (bench.folder / "made").iterdir():
        file.unlink(missing_ok=True) if file.is_file() else None
    assert bench.reasons() == ["cached"]


READING = """
    path = Path(__file__).with_name("data.txt")
    text = path.read_text()
    trouble = Path(__file__).with_name("trouble")
    if trouble.exists():
        exec(trouble.read_text(), dict(globals(), path=path))
    return text
"""


def reading(bench: Bench) -> Path:
    """A stage that reads a file, and executes `trouble` meanwhile. Returns the file."""
    bench.plugin("def reads(config):\n    return Path(__file__).with_name('data.txt').read_text()", READING)
    text = (bench.folder / "plugin.py").read_text()
    bench.write(plugin_py=text.replace('@stage("my.word")', '@stage("my.word", fingerprint=reads)'))
    data = bench.folder / "data.txt"
    data.write_text("A")
    return data


def test_data_that_changes_while_the_stage_works(bench):
    data, trouble = reading(bench), bench.folder / "trouble"
    trouble.write_text("path.write_text('B')")
    event = bench.event()
    assert (event.outcome, event.message) == (
        "failed",
        "data changed while the stage ran, so its result is not kept: run it again",
    )
    data.write_text("A")
    assert bench.reasons() == ["no earlier result"]
    trouble.write_text("path.unlink(); path.mkdir()")
    event = bench.event()
    assert "Is a directory" in event.message
    assert event.message.startswith("data changed while the stage ran, so its result is not kept")
    data.rmdir()
    data.write_text("A")
    trouble.unlink()
    assert bench.outcome() == "done"


def test_checkpoints_of_a_stage_whose_data_changed_are_dropped(bench):
    reading(bench)
    (bench.folder / "trouble").write_text("path.write_text('B')")
    key = bench.event().key
    assert not (bench.folder / "artifacts" / "scratch" / key).exists()


def test_code_that_is_edited_after_it_was_imported(bench):
    """A training of hours isn't lost because its user goes on working: it used the code that its key describes."""
    bench.write(helper_py="WORD = 1")
    bench.plugin("from helper import WORD", "edit('helper'); edit('plugin'); return WORD")
    edit = """
def edit(name):
    path = Path(__file__).with_name(name + '.py')
    path.write_text(path.read_text() + '\\nMORE = 1')
"""
    text = (bench.folder / "plugin.py").read_text()
    bench.write(plugin_py=text.replace("@dataclass", f"{edit}\n@dataclass"))
    assert bench.outcome() == "done"
    assert bench.reasons() == ["the plugin's code"]


@pytest.mark.parametrize("name", ['"helper"', '"hel" + "per"'], ids=["static", "dynamic"])
def test_code_that_changes_before_the_stage_imports_it(bench, name):
    bench.write(helper_py="WORD = 1")
    bench.plugin(
        "",
        f"Path(__file__).with_name('helper.py').write_text('WORD = 2'); return importlib.import_module({name}).WORD",
    )
    event = bench.event()
    assert event.outcome == "failed"
    helper = bench.folder / "helper.py"
    assert event.message == f"{helper} changed during the run, so the stage's result is not kept: run it again"


@pytest.mark.parametrize("name", ['"helper"', '"hel" + "per"'], ids=["static", "dynamic"])
def test_bytecode_of_an_older_version(bench, name):
    """Python takes it for that of a file of the same size and second: an edit within a second, a restored time."""
    bench.plugin("", f"return importlib.import_module({name}).WORD")
    helper = bench.folder / "helper.py"
    bench.write(helper_py="WORD = 1")
    bytecode, time_ns = Path(py_compile.compile(str(helper))), helper.stat().st_mtime_ns
    assert bench.outcome() == "done"
    helper.write_text("WORD = 2")
    os.utime(helper, ns=(time_ns, time_ns))
    event = bench.event()
    assert event.outcome == "failed"
    assert event.message == (
        f"{helper} was imported from bytecode of an older version of it, so the stage's result is not kept: "
        f"delete {bytecode}, and run it again"
    )
    bytecode.unlink()
    assert bench.outcome() == "done"


def test_bytecode_of_the_same_code(bench):
    """A comment, or a mere copy of the file, makes no bytecode stale."""
    bench.write(helper_py="WORD = 1  # a")
    bench.plugin("from helper import WORD")
    helper = bench.folder / "helper.py"
    py_compile.compile(str(helper))
    time_ns = helper.stat().st_mtime_ns
    helper.write_text("WORD = 1  # b")
    os.utime(helper, ns=(time_ns, time_ns))
    assert bench.outcome() == "done"


@pytest.mark.parametrize("code", ["WORD = 1e999 - 1e999", "WORD = (1e999 - 1e999, 'a' in {'b', 'a'}, -0.0)"])
def test_bytecode_of_the_same_code_in_other_objects(bench, code):
    """NaN equals nothing, and PYTHONNODEBUGRANGES leaves out the columns of lines."""
    bench.write(helper_py=code)
    bench.plugin("from helper import WORD", "return str(WORD)")
    helper = bench.folder / "helper.py"
    subprocess.run([sys.executable, "-X", "no_debug_ranges", "-m", "py_compile", str(helper)], check=True)
    helper.chmod(0o755)  # its ctime is later than the bytecode, as in the layers of an image
    assert bench.outcome() == "done"


def test_bytecode_that_was_written_after_an_edit(bench):
    """An import reads the source, compiles it, and only then writes bytecode."""
    bench.write(helper_py="WORD = 1")
    bench.plugin("from helper import WORD")
    helper = bench.folder / "helper.py"
    bytecode, time_ns = Path(py_compile.compile(str(helper))), helper.stat().st_mtime_ns
    helper.write_text("WORD = 2")
    os.utime(helper, ns=(time_ns, time_ns))
    later_ns = helper.stat().st_ctime_ns + 10**9
    os.utime(bytecode, ns=(later_ns, later_ns))
    assert bench.outcome() == "failed"


def test_code_that_a_second_run_in_one_process_does_not_import_again(bench):
    """As in a notebook: Python keeps the module as it was."""
    bench.write(helper_py="WORD = 1")
    bench.plugin("from helper import WORD")
    with bench.process():
        bench.process = contextlib.nullcontext
        assert bench.outcome() == "done"
        assert bench.outcome() == "cached"
        (bench.folder / "helper.py").write_text("WORD = 2")
        event = bench.event()
    assert event.outcome == "failed"
    assert event.message == (
        f"this process imported {bench.folder / 'helper.py'} before it changed, so the stage's result is not kept: "
        "run it again in a new one"
    )


def test_a_generation_of_imports_has_its_own_entry(bench):
    """An older result of the same key isn't mistaken for the newer one, nor the other way round."""
    dynamic(bench)
    for word in (1, 2, 1):
        (bench.folder / "helper.py").write_text(f"WORD = {word}")
        assert bench.outcome() == "done"


def test_a_module_that_is_deleted_after_its_import(bench):
    bench.write(helper_py="WORD = 1")
    bench.plugin(
        "",
        "m = importlib.import_module('hel' + 'per'); Path(__file__).with_name('helper.py').unlink(); return m.WORD",
    )
    event = bench.event()
    assert event.outcome == "failed"
    assert "helper.py changed during the run" in event.message


def test_links_to_nothing_in_a_package(bench):
    """Emacs leaves them beside a file that is being edited."""
    beside_a_package_plugin(bench)
    (bench.folder / "acme" / ".#__init__.py").symlink_to("me@machine.17")
    assert bench.outcome() == "done"
    assert bench.reasons() == ["cached"]


def test_a_module_in_a_temporary_folder(bench):
    """Some libraries import a configuration from a copy, and delete it."""
    bench.plugin(
        "import importlib.util, shutil",
        """folder = Path(__file__).with_name("temporary")
    folder.mkdir()
    (folder / "settings.py").write_text("WORD = 1")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("set" + "tings").WORD
    finally:
        sys.path.remove(str(folder))
        shutil.rmtree(folder)""",
    )
    assert bench.outcome() == "done"
    assert bench.reasons() == ["cached"]


def test_a_lazy_module_is_left_lazy(bench):
    bench.write(helper_py="raise SystemExit('it was imported')")
    bench.plugin(
        "import importlib.util as u",
        """s = u.find_spec("helper")
    s.loader = u.LazyLoader(s.loader)
    m = sys.modules["helper"] = u.module_from_spec(s)
    s.loader.exec_module(m)
    return 1""",
    )
    assert bench.outcome() == "done"


def test_a_relative_folder_on_the_path(bench, monkeypatch):
    monkeypatch.chdir(bench.folder)
    bench.write(lib__helper_py="WORD = 1")
    bench.plugin('sys.path.insert(0, "lib")\nfrom helper import WORD')
    assert bench.outcome() == "done"
    (bench.folder / "lib" / "helper.py").write_text("WORD = 2")
    assert bench.reasons() == ["the plugin's code"]


READS = """with ReadLog() as log:
        word = Path("word.txt").read_text()
    {declared}
    return word"""


@pytest.fixture
def finding(bench, monkeypatch):
    """A stage that reads a file which no option names."""
    monkeypatch.chdir(bench.folder)
    Path("word.txt").write_text("1")
    bench.plugin("from ptpipe import ReadLog", READS.format(declared="ctx.reads(log)"))
    text = (bench.folder / "plugin.py").read_text()
    bench.write(plugin_py=text.replace("def word():", "def word(ctx):").replace("word())", "word(ctx))"))
    return bench


def test_a_file_that_a_stage_finds_and_reads(finding):
    assert [finding.outcome(), finding.outcome()] == ["done", "cached"]
    Path("word.txt").write_text("2")
    assert finding.reasons() == ["a file it read changed: word.txt"]
    assert [finding.outcome(), finding.outcome()] == ["done", "cached"]
    Path("word.txt").touch()
    assert finding.reasons() == ["cached"]
    Path("word.txt").unlink()
    assert finding.reasons() == ["a file it read is missing: word.txt"]
    assert finding.event().message.startswith("FileNotFoundError")


def test_an_entry_with_other_facts_of_a_file_is_none(finding):
    finding.outcome()
    (path,) = (finding.folder / "artifacts" / "index").glob("*.json")
    entry = read_document(path)
    entry["files"]["word.txt"] = [1, 2]
    write_document(path, json.dumps(entry))
    (reason,) = finding.reasons()
    assert "no index entry of this version of ptpipe" in reason


def test_known_files_are_left_out(finding):
    text = (finding.folder / "plugin.py").read_text()
    finding.write(plugin_py=text.replace("ctx.reads(log)", 'ctx.reads(log, known=[Path(".")])'))
    assert finding.outcome() == "done"
    Path("word.txt").write_text("2")
    assert finding.reasons() == ["cached"]
