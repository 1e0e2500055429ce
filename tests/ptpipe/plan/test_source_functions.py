"""Functions in files that options name: what is in the key, what reaches the stages below, what changes are seen."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from ptpipe import Artifact, ManifestError, StageError, load_plan, run, source_code
from ptpipe.execution.call import Call, make_call
from ptpipe.execution.engine import ONE_NODE, source_digests
from ptpipe.execution.statement import statement_path
from ptpipe.plan.cache_status import cache_statuses
from ptpipe.plan.keys import compute_keys
from ptpipe.store.documents import read_document
from ptpipe.store.store import Store
from ptpipe.testing import Bench

PLUGIN = '''
import importlib.util, sys
from dataclasses import dataclass
from pathlib import Path
from pydantic import Field
from ptpipe import Artifact, Context, StageConfig, StageError, record_import, stage

@dataclass
class Answer(Artifact):
    value: str
    functions: tuple = ()

    def save(self, folder):
        (folder / "value").write_text(self.value)

    @classmethod
    def load(cls, folder):
        return cls((folder / "value").read_text())

    @classmethod
    def deliverables(cls, folder):
        return ["value"]

    def with_source_functions(self, functions):
        return Answer(self.value, tuple(functions))

class Config(StageConfig):
    file: str = Field(description="a file")
    function: str = Field("f", description="a function")

def called(config):
    path = Path(config.file).absolute()
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location("called_" + path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        record_import(module)
        return getattr(module, config.function)()
    finally:
        sys.path.remove(str(path.parent))

@stage("my.call", source_functions=lambda config: [f"{config.file}:{config.function}"])
def call(config: Config, ctx: Context) -> Answer:
    """Call it."""
    try:
        return Answer(str(called(config)))
    except Exception as error:
        raise StageError(f"it failed: {error}") from error

@stage("my.slow")
def slow(config: StageConfig, ctx: Context, answer: Answer) -> Answer:
    """Leave a checkpoint, and fail; then say whether it was there."""
    checkpoint = ctx.scratch / "checkpoint"
    if Path("stop").exists():
        checkpoint.touch()
        raise StageError("stopped")
    return Answer("resumed" if checkpoint.exists() else "from the beginning")

@stage("my.show")
def show(config: StageConfig, ctx: Context, answer: Answer) -> Answer:
    """Say what it may call."""
    return Answer(",".join(answer.functions))
'''
STAGES = """
one:  {uses: my.call, with: {file: code/mine.py}}
two:  {uses: my.call, with: {file: other.py, function: g}}
show: {uses: my.show, needs: {answer: one}}
deep: {uses: my.show, needs: {answer: show}}
"""
MINE = "from helper import A\n\ndef f():\n    return A\n"


class Place:
    """A manifest, its plugin and two files; each run and plan as in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "code").mkdir()
        (folder / "plugin.py").write_text(PLUGIN)
        (folder / "m.yaml").write_text(
            "version: 1\nname: m\nplugins: [./plugin.py]\nstages:" + STAGES.replace("\n", "\n  ")
        )
        (folder / "code" / "mine.py").write_text(MINE)
        (folder / "code" / "helper.py").write_text("A = 1\n")
        (folder / "other.py").write_text("def g():\n    return 2\n")

    def forget(self) -> None:
        for name in [name for name in sys.modules if name in ("helper", "other") or name.startswith("called_")]:
            del sys.modules[name]

    def run(self):
        self.forget()
        return run(self.folder / "m.yaml", artifacts=self.folder / "artifacts")

    def outcomes(self) -> list[str]:
        return [str(stage.outcome) for stage in self.run().stages.values()]

    def reasons(self) -> dict[str, tuple[str, ...]]:
        plan, store = load_plan(self.folder / "m.yaml"), Store(self.folder / "artifacts")
        sources = source_digests(plan, store)
        statuses = cache_statuses(plan, compute_keys(plan, sources), store, sources)
        return {status.stage_id: status.reasons for status in statuses if not status.entry}

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.folder / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))


@pytest.fixture
def place(tmp_path, monkeypatch, modules_forgotten):
    monkeypatch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


def test_the_digest_is_that_of_the_code_wherever_it_is(place):
    before = source_code(Path("code/mine.py"))
    assert before.modules == {"helper": place.folder / "code" / "helper.py"}
    shutil.copytree("code", "moved")
    Path("moved/mine.py").rename("moved/yours.py")
    moved = source_code(Path("moved/yours.py"))
    assert (moved.digest, moved.sha256) == (before.digest, before.sha256)
    place.edit("code/mine.py", "return A", "return A  # as it is")
    commented = source_code(Path("code/mine.py"))
    assert commented.digest == before.digest and commented.sha256 != before.sha256
    place.edit("code/helper.py", "1", "2")
    assert source_code(Path("code/mine.py")).digest != before.digest


def test_only_what_is_in_its_own_folder_belongs_to_it(place, monkeypatch):
    Path("elsewhere").mkdir()
    Path("elsewhere/far.py").write_text("")
    monkeypatch.syspath_prepend("elsewhere")
    place.edit("code/mine.py", "def", "import far, json, sys, pkg.part\ndef")
    Path("code/sys.py").write_text("")  # Python has its own, always
    Path("code/pkg").mkdir()
    Path("code/pkg/part.py").write_text("from . import near\n")
    Path("code/pkg/near.py").write_text("import mine\n")
    assert source_code(Path("code/mine.py")).modules.keys() == {"helper", "pkg.part", "pkg.near", "mine"}


def test_code_is_in_the_key_and_layout_is_not(place):
    assert place.outcomes() == ["done"] * 4
    assert place.reasons() == {}
    place.edit("code/mine.py", "def f", "# a comment\ndef f")
    assert place.outcomes() == ["cached"] * 4
    place.edit("code/helper.py", "1", "5")
    upstream = {"show": ("upstream changed: one",), "deep": ("upstream changed: show",)}
    assert place.reasons() == {"one": ("code/mine.py, or what it imports, changed",), **upstream}
    result = place.run()
    assert [str(stage.outcome) for stage in result.stages.values()] == ["done", "cached", "done", "done"]
    assert result.artifact("one").value == "5"


def test_stages_below_may_call_what_the_manifest_names_and_nothing_else(place):
    result = place.run()
    mine = f"{place.folder}/code/mine.py:f"
    assert result.artifact("show").value == mine
    assert result.artifact("deep").value == mine, "of all stages above"
    assert result.artifact("two").functions == (f"{place.folder}/other.py:g",)
    plan = load_plan(place.folder / "m.yaml")
    digests = {"answer": ["d" * 64]}
    call = make_call(plan, plan["deep"], "k" * 64, digests, Store(place.folder / "artifacts"), ONE_NODE)
    assert call.inputs["answer"][0].source_functions == (mine,)
    assert Call.from_json(call.to_json()) == call


def test_an_artifact_without_functions_ignores_them(place):
    class Plain(Artifact):
        def save(self, folder):
            pass

        @classmethod
        def load(cls, folder):
            return cls()

    plain = Plain()
    assert plain.with_source_functions(("/x.py:f",)) is plain


def test_a_name_that_is_too_long_for_the_file_system_is_a_missing_file(place):
    text = (place.folder / "m.yaml").read_text()
    (place.folder / "m.yaml").write_text(text.replace("other.py", "x" * 5000 + ".py"))
    with pytest.raises(ManifestError, match=r"two: there is no file .*/xxx"):
        load_plan(place.folder / "m.yaml")


def test_a_missing_file_is_found_before_any_stage(place):
    (place.folder / "other.py").unlink()
    with pytest.raises(ManifestError) as raised:
        load_plan(place.folder / "m.yaml")
    (problem,) = raised.value.problems
    assert problem.message == f"two: there is no file {place.folder}/other.py"
    assert problem.location.line == 6 and problem.location.column > 30


def test_a_file_that_lies_beside_the_manifest_alone(place, monkeypatch):
    (place.folder / "elsewhere").mkdir()
    monkeypatch.chdir(place.folder / "elsewhere")
    with pytest.raises(
        ManifestError, match=r"two: there is no file .*; it lies beside the manifest: .* or name it \.\./o"
    ):
        load_plan("../m.yaml")


def test_an_edit_while_the_stage_runs_fails_it(place):
    write = "Path(__file__).write_text(Path(__file__).read_text() + 'B = 1\\n')"
    place.edit("code/mine.py", "    return A", f"    from pathlib import Path\n    {write}\n    return A")
    assert place.outcomes() == ["done"] * 4, "what was imported is what the key says: an edit after that does no harm"
    place.edit("code/mine.py", "from helper", f"from pathlib import Path\n{write}\nfrom helper")
    result = place.run()
    assert str(result.stages["one"].outcome) == "failed"
    assert "mine.py changed during the run" in result.stages["one"].message


def test_a_process_with_the_old_code_says_so(place):
    assert place.outcomes() == ["done"] * 4
    place.edit("code/helper.py", "1", "7")
    result = run(place.folder / "m.yaml", artifacts=place.folder / "artifacts")  # `helper` is imported already
    assert "this process imported" in result.stages["one"].message and "helper.py" in result.stages["one"].message


def test_what_it_imports_is_no_dependency_of_other_stages(place):
    result = place.run()
    store = Store(place.folder / "artifacts")
    assert {name: store.read_entry(stage.key).dependencies for name, stage in result.stages.items()} == {
        "one": {}, "two": {}, "show": {}, "deep": {},
    }  # fmt: skip


def test_a_file_of_another_stage_is_a_dependency_where_it_may_have_been_imported(place):
    place.edit("code/mine.py", "from helper", "import sys\nsys.path.append('.')\nimport other\nfrom helper")
    place.edit("code/mine.py", "return A", "return A + other.g()")
    result = place.run()
    assert result.artifact("one").value == "3" and result.artifact("show").functions
    place.edit("other.py", "2", "4")
    reasons = place.reasons()
    assert "other.py" in reasons["one"][0] and reasons["two"] == ("other.py, or what it imports, changed",)
    assert place.run().artifact("one").value == "5"


def test_a_failure_shows_the_users_lines(place):
    place.edit("code/mine.py", "return A", "return A / 0")
    result = place.run()
    assert result.stages["one"].message == "it failed: division by zero"
    assert result.stages["one"].frames == ("mine.py:4 in f: return A / 0",)
    assert result.exit_code == 1


def test_the_statement_lists_the_files(place):
    (path,) = place.run().stages["one"].deliverables
    (listed,) = [
        item
        for item in read_document(statement_path(path))["predicate"]["buildDefinition"]["resolvedDependencies"]
        if "source file" in item.get("name", "")
    ]
    digest = source_code(Path("code/mine.py")).digest
    assert listed == {"name": "source file code/mine.py", "digest": {"ptpipeSource": digest}}


def test_the_bench_names_them_too(place, tmp_path):
    kinds = load_plan(place.folder / "m.yaml").vocabulary.stages
    bench = Bench(tmp_path / "bench")
    made = bench.run(kinds["my.call"], {"file": "other.py", "function": "g"})
    assert made.functions == (f"{place.folder}/other.py:g",)
    assert bench.run(kinds["my.show"], answer=made).value == f"{place.folder}/other.py:g"
    with pytest.raises(StageError, match="it failed"):
        bench.run(kinds["my.call"], {"file": "other.py", "function": "h"})
    json.dumps(bench.metrics)


LIB = "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))\nfrom far import A\n"


@pytest.fixture
def far(place):
    """A file that finds a module of another folder by a path of its own, which no plan can know."""
    (place.folder / "lib").mkdir()
    (place.folder / "lib" / "far.py").write_text("from further import A\n")
    (place.folder / "lib" / "further.py").write_text("A = 1\n")
    place.edit("code/mine.py", "from helper import A\n", LIB)
    yield place
    forget_far()


def forget_far():
    for name in ("far", "further"):
        sys.modules.pop(name, None)


def outcomes_of(place, *seeds):
    """Run once for each seed in this process, as a notebook does."""
    path, outcomes = list(sys.path), []
    for seed in seeds:
        result = run(place.folder / "m.yaml", {"seed": seed}, artifacts=place.folder / "artifacts")
        outcomes.append(str(result.stages["one"].outcome))
        sys.path[:] = path
    return outcomes


def test_a_second_run_in_one_process_depends_on_what_the_first_imported(far):
    assert outcomes_of(far, 1, 2) == ["done", "done"]
    forget_far()
    assert outcomes_of(far, 1, 2) == ["cached", "cached"]
    far.edit("lib/further.py", "1", "2")
    assert outcomes_of(far, 1, 2) == ["done", "done"]


def test_so_does_a_run_in_a_process_that_had_imported_it_before(far, monkeypatch):
    monkeypatch.syspath_prepend(str(far.folder / "lib"))
    __import__("far")
    assert outcomes_of(far, 1) == ["failed"]  # the files are younger than this process
    monkeypatch.setattr("ptpipe.plan.module_files._process_start_ns", lambda: 2**63)
    for module in map(sys.modules.get, ("far", "further")):
        del module.__spec__._ptpipe_imported
    assert outcomes_of(far, 1) == ["done"]
    forget_far()
    far.edit("lib/further.py", "1", "2")
    assert outcomes_of(far, 1) == ["done"]


def test_an_edit_between_two_runs_in_one_process_is_refused(far):
    assert outcomes_of(far, 1) == ["done"]
    far.edit("lib/further.py", "1", "2")
    assert outcomes_of(far, 2) == ["failed"]


def test_another_checkout_has_its_own_file(far, monkeypatch):
    """Both use one store."""
    assert outcomes_of(far, 1) == ["done"]
    forget_far()
    shutil.copytree(far.folder / "code", far.folder / "b" / "code")
    shutil.copytree(far.folder / "lib", far.folder / "b" / "lib")
    for name in ("plugin.py", "other.py", "m.yaml"):
        shutil.copy(far.folder / name, far.folder / "b" / name)
    far.edit("b/lib/further.py", "1", "2")
    monkeypatch.chdir(far.folder / "b")
    result = run("m.yaml", {"seed": 1}, artifacts=far.folder / "artifacts")
    assert (str(result.stages["one"].outcome), result.artifact("one").value) == ("done", "2")


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_checkpoint_is_left_where_other_code_made_its_input(far, is_edited):
    """The input's own bytes are the same: a network's code is executed again when its weights are loaded."""
    stages = "\n  one: {uses: my.call, with: {file: code/mine.py}}\n  slow: {uses: my.slow}\n"
    (far.folder / "m.yaml").write_text(f"version: 1\nname: m\nplugins: [./plugin.py]\nstages:{stages}")
    (far.folder / "stop").touch()
    result = run(far.folder / "m.yaml", artifacts=far.folder / "artifacts")
    assert str(result.stages["slow"].outcome) == "failed"
    forget_far()
    if is_edited:
        far.edit("lib/further.py", "A = 1", "A = 1\nB = 2")
    (far.folder / "stop").unlink()
    result = run(far.folder / "m.yaml", artifacts=far.folder / "artifacts")
    assert str(result.stages["one"].outcome) == ("done" if is_edited else "cached")
    assert result.artifact("slow").value == ("from the beginning" if is_edited else "resumed")
