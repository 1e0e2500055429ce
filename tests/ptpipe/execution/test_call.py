"""A call is JSON, and any process can do it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import IntegrityError, StageError
from ptpipe.events import LogLine, Metric, Progress
from ptpipe.execution.call import Call, Nodes, StoredInput, execute
from ptpipe.execution.local_launcher import LocalLauncher
from ptpipe.plan.vocabulary import load_vocabulary
from ptpipe.store.store import Store

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
INPUTS = st.dictionaries(TEXT, st.lists(st.builds(StoredInput, TEXT, TEXT, TEXT, TEXT), max_size=3).map(tuple))
CALLS = st.builds(
    Call,
    stage_id=TEXT,
    kind=TEXT,
    options=st.dictionaries(TEXT, JSON, max_size=3),
    seed=st.integers(0, 2**32 - 1),
    key=TEXT,
    inputs=INPUTS,
    artifacts=TEXT,
    plugins=st.lists(TEXT).map(tuple),
    folder=TEXT,
    workers=st.integers(1, 64),
)


@given(CALLS)
def test_a_call_comes_back_from_json(call):
    assert Call.from_json(call.to_json()) == call
    assert "\n" not in call.to_json(), "one line, so that it can be sent through a pipe"


def test_the_arguments_of_a_node_are_those_that_describe_it():
    named = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:1")
    assert Nodes(2, 0, "a:1").arguments == named
    assert Nodes(2, 0, "a:1", max_restarts=3).arguments == (*named, "--max-restarts", "3")
    assert Nodes().arguments == Nodes(2, 0, "a:1", started=True).arguments == ()


@pytest.fixture
def vocabulary(project):
    return load_vocabulary(["./toy.py"], project.folder)


@pytest.fixture
def store(project):
    opened = Store(project.artifacts)
    opened.open_for_writing()
    return opened


def call_of(project, kind, inputs=None, **options):
    plugins, folder = ("./toy.py",), str(project.folder)
    return Call("x", kind, options, 7, "k" * 64, inputs or {}, str(project.artifacts), plugins, folder)


def number(vocabulary, store, value):
    """A stored number, as an input."""
    made = vocabulary.stages["toy.make"].outputs[0].type(value)
    return StoredInput("toy.make", "output", store.put(made).digest, f"n{value}")


def test_a_call_is_done(project, vocabulary, store):
    told = []
    outputs = execute(call_of(project, "toy.make", value=3.0, mode="loud"), vocabulary, store, told.append)
    imported = told.pop()
    assert imported.modules["ptpipe_file_toy"].file == str(project.plugin)
    assert outputs["output"].value == 3
    assert told == [
        Progress("x", 1, 2, "digits"),
        Metric("x", "value", 3.0),
        Metric("x", "seed", 7),
        LogLine("x", "made it"),
    ]
    assert (store.root / "scratch" / ("k" * 64)).is_dir()


def test_inputs_are_read_by_the_type_of_their_maker(project, vocabulary, store):
    one, two = number(vocabulary, store, 1), number(vocabulary, store, 2)
    inputs = {"a": (one,), "b": (two,)}
    assert execute(call_of(project, "toy.add", inputs), vocabulary, store, print)["output"].value == 3
    outputs = execute(call_of(project, "toy.split", {"a": (two,)}), vocabulary, store, print)
    assert (outputs["low"].value, outputs["high"].value) == (0.5, 1), "the optional input is left out"
    text = execute(call_of(project, "toy.total", {"numbers": (two, one)}), vocabulary, store, print)["output"]
    assert text.text == "n2+n1=3", "several, in their order, with their names"


def test_a_stage_is_told_the_digests_of_its_inputs(project, vocabulary, store):
    one, two = number(vocabulary, store, 1), number(vocabulary, store, 2)
    told = []
    execute(call_of(project, "toy.total", {"numbers": (two, one)}), vocabulary, store, told.append)
    assert told[0] == Metric("x", "digests", {"numbers": [two.digest, one.digest]})


def test_an_altered_input_is_not_read(project, vocabulary, store):
    one = number(vocabulary, store, 1)
    path = store.root / "objects" / one.digest[:2] / one.digest / "files" / "number.json"
    path.chmod(0o644)
    path.write_text("9")
    with pytest.raises(IntegrityError):
        execute(call_of(project, "toy.split", {"a": (one,)}), vocabulary, Store(store.root), print)


def test_what_it_returned_is_checked(project, vocabulary, store):
    with pytest.raises(TypeError, match=r"toy\.odd promised output: Number, returned Text"):
        execute(call_of(project, "toy.odd", how="wrong type"), vocabulary, store, print)


def test_the_launcher_here(project, vocabulary, store, capsys):
    launcher = LocalLauncher(vocabulary, store)
    assert launcher.ptpipe_launch(call_of(project, "toy.odd", how="print"), lambda event: None).keys() == {"output"}
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "on stdout\n")


def test_the_launcher_here_starts_no_workers(project, vocabulary, store):
    call = replace(call_of(project, "toy.odd", how="print"), workers=2)
    with pytest.raises(StageError, match=r"toy\.odd needs 2 workers, and no loaded plugin starts any"):
        LocalLauncher(vocabulary, store).ptpipe_launch(call, print)


def test_a_worker_knows_its_rank(project, vocabulary, store):
    call = replace(call_of(project, "toy.odd", how="say rank"), workers=3)
    assert execute(call, vocabulary, store, print, rank=2)["output"].value == 23


ELSEWHERE = """
import sys
from pathlib import Path
from ptpipe.plan.vocabulary import load_vocabulary
from ptpipe.store.store import Store
from ptpipe.execution.call import Call, execute

call = Call.from_json(sys.stdin.read())
vocabulary, store = load_vocabulary(call.plugins, Path(call.folder)), Store(Path(call.artifacts))
print(store.put(execute(call, vocabulary, store, lambda event: None)["output"]).digest)
"""


def test_another_process_can_do_it(project, vocabulary, store, tmp_path):
    inputs = {"a": (number(vocabulary, store, 1),), "b": (number(vocabulary, store, 2),)}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        input=call_of(project, "toy.add", inputs).to_json(),
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.strip() == number(vocabulary, store, 3).digest
    assert Path(project.artifacts).is_dir()
    assert json.loads(call_of(project, "toy.add").to_json())["workers"] == 1


@pytest.mark.parametrize("number", ["0", "-1", "True", "2.0", "'2'", "None"])
def test_a_number_of_workers_is_one_or_more(project, number):
    project.edit('@stage("toy.make")', f'@stage("toy.make", workers=lambda config: {number})')
    project.write("one: {uses: toy.make}")
    result = project.run()
    assert result.exit_code == 1
    assert (
        result.stages["one"].message == f"workers() of toy.make returned {number}, not a number of processes: 1 or more"
    )
