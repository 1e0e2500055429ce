"""Keys: everything that decides a result enters, and nothing else."""

from __future__ import annotations

import json
import math
from importlib.metadata import PackageNotFoundError

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import ptpipe.plan.keys
from ptpipe import ManifestError, StageError
from ptpipe.errors import ExitCode
from ptpipe.execution.engine import source_digests
from ptpipe.plan.keys import Key, compute_keys, differences
from ptpipe.store.store import Store

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
NAMES = st.text("abc_", min_size=1, max_size=3)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=8)
PARTS = st.dictionaries(NAMES, JSON, min_size=1, max_size=4)


def shuffled(value, random):
    if isinstance(value, dict):
        items = [(key, shuffled(item, random)) for key, item in value.items()]
        random.shuffle(items)
        return dict(items)
    return [shuffled(item, random) for item in value] if isinstance(value, list) else value


@given(PARTS, st.randoms())
def test_the_same_parts_give_the_same_key_in_any_order(parts, random):
    assert Key.of(shuffled(parts, random)).digest == Key.of(parts).digest


@given(PARTS, PARTS)
def test_other_parts_give_another_key(parts, others):
    assume(json.dumps(parts, sort_keys=True) != json.dumps(others, sort_keys=True))
    assert Key.of(parts).digest != Key.of(others).digest


@given(PARTS, st.data())
def test_a_change_of_any_part_changes_the_key(parts, data):
    name = data.draw(st.sampled_from(sorted(parts)))
    value = data.draw(JSON)
    assume(repr(value) != repr(parts[name]))
    changed = parts | {name: value}
    assert Key.of(changed).digest != Key.of(parts).digest
    assert differences(parts, parts) == []
    assert differences(parts, changed)


def test_twelve_digits_are_shown():
    key = Key.of({"a": 1})
    assert len(key.digest) == 64
    assert key.short == key.digest[:12]


def test_differences_are_named_in_full():
    old = {"config": {"lr": 0.05, "inner": {"x": 1}, "gone": None}, "source": "ab", "machine": "x"}
    new = {"config": {"lr": 0.01, "inner": {"x": 2}, "word": "w" * 99}, "source": "cd", "machine": "y"}
    old |= {"seed": 3, "depends": {"torch": "2.12"}}
    new |= {"seed": 3, "depends": {"torch": "2.13"}}
    assert differences(old, new) == [
        "config.gone: null -> absent",
        "config.inner.x: 1 -> 2",
        "config.lr: 0.05 -> 0.01",
        f"config.word: absent -> {'w' * 57}...",
        "depends.torch: 2.12 -> 2.13",
        "measured on another machine",
        "the plugin's code",
    ]


@pytest.fixture
def keys(project):
    """The keys of the project's plan, by stage."""

    def compute(overrides=None):
        plan = project.plan(overrides)
        return {
            name: key.digest for name, key in compute_keys(plan, source_digests(plan, Store(project.artifacts))).items()
        }

    return compute


STAGES = """
one: {uses: toy.make, with: {value: 3, mode: loud}}
two: {uses: toy.make, with: {value: 2}}
sum: {uses: toy.add, needs: {a: one, b: two}}
all: {uses: toy.total, needs: {numbers: [one, two]}}
"""


def changed(before, after):
    return [name for name in before if before[name] != after[name]]


def test_what_changes_which_keys(project, keys):
    project.write(STAGES)
    before = keys()
    assert keys() == before
    assert changed(before, keys({"two.value": 5})) == ["two", "sum", "all"]
    assert changed(before, keys({"one.note": "x"})) == ["one", "sum", "all"]
    assert changed(before, keys({"seed": 1})) == ["one", "two", "sum", "all"]
    assert keys({"two.value": 2.0}) == before, "the same number"
    assert keys({"two.note": ""}) == before, "the default, said aloud"
    project.write(STAGES.replace("value: 3, mode: loud", "mode: loud, value: 3"))
    assert keys() == before, "another order of options"
    project.write(STAGES.replace("a: one, b: two", "a: two, b: one"))
    assert changed(before, keys()) == ["sum"]
    project.write(STAGES.replace("[one, two]", "[two, one]"))
    assert changed(before, keys()) == ["all"]


def test_a_stages_name_counts_only_where_it_is_told(project, keys):
    project.write(STAGES)
    before = keys()
    project.write(STAGES.replace("two:", "deux:").replace("b: two", "b: deux").replace("[one, two]", "[one, deux]"))
    after = keys()
    assert after["deux"] == before["two"]
    assert after["sum"] == before["sum"]
    assert after["all"] != before["all"], "a port that takes several tells their names"


def test_the_plugins_code_counts_and_its_layout_does_not(project, keys):
    project.write(STAGES)
    before = keys()
    project.edit("    return Number(a.value + b.value)", "    # a comment\n    return Number(  a.value + b.value  )")
    assert keys() == before
    project.edit("a.value + b.value", "b.value + a.value")
    assert changed(before, keys()) == ["one", "two", "sum", "all"]


def test_the_version_counts(project):
    project.write(STAGES)
    plan = project.plan()
    sources = source_digests(plan, Store(project.artifacts))
    before = compute_keys(plan, sources)
    object.__setattr__(plan["sum"].stage, "version", 2)  # said elsewhere than in the source
    after = compute_keys(plan, sources)
    assert [name for name in before if before[name] != after[name]] == ["sum"]


def test_versions_of_libraries_count(project, keys, monkeypatch):
    project.edit('@stage("toy.add")', '@stage("toy.add", packages=("torch", "no-such-thing"))')
    project.write(STAGES)
    versions = {"torch": "2.12"}

    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("ptpipe.plan.keys.version", version)
    monkeypatch.setattr("ptpipe.plan.keys._version", ptpipe.plan.keys._version.__wrapped__)  # without its memory
    before = keys()
    versions["torch"] = "2.13"
    assert changed(before, keys()) == ["sum"]
    versions["no-such-thing"] = "1"
    assert changed(before, keys()) == ["sum"]


def test_the_machine_counts_for_what_was_measured(project, keys, monkeypatch):
    project.write("one: {uses: toy.make}\ntime: {uses: toy.clock}")
    before = keys()
    monkeypatch.setattr("ptpipe.host.fingerprint", lambda: "another")
    assert changed(before, keys()) == ["time"]


def test_thread_and_container_limits_count_for_what_was_measured(project, keys, monkeypatch, tmp_path):
    monkeypatch.setattr("ptpipe.host.os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("ptpipe.host.CGROUPS", tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    project.write("one: {uses: toy.make}\ntime: {uses: toy.clock}")
    whole = keys()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    limited = keys()
    assert changed(whole, limited) == ["time"]
    (tmp_path / "cpu.max").write_text("200000 100000")
    assert changed(limited, keys()) == ["time"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert changed(whole, keys()) == ["time"]


READS = """
def _reads(config):
    {body}

@stage("toy.add", fingerprint=_reads)"""


def with_reads(project, body):
    project.edit('@stage("toy.add")', READS.format(body=body))
    project.write(STAGES)


def test_files_that_are_read_count(project, keys):
    (project.folder / "data").write_text("1")
    with_reads(project, f"return {{'data': (Path({str(project.folder)!r}) / 'data').read_text()}}")
    before = keys()
    (project.folder / "data").write_text("2")
    assert changed(before, keys()) == ["sum"]


def test_a_file_that_is_not_there_is_the_users_mistake(project, keys):
    with_reads(project, "raise StageError('put the data into ./data')")
    with pytest.raises(ManifestError) as raised:
        keys()
    assert str(raised.value) == f"{project.manifest}:7:8: sum: put the data into ./data"
    assert raised.value.exit_code == ExitCode.USAGE
    assert issubclass(StageError, ValueError)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return {}['a']", r"KeyError: 'a' \(toy\.py:\d+\)"),
        ("return Path()", "TypeError: Object of type PosixPath is not JSON serializable"),
    ],
)
def test_reads_that_break_are_the_plugins_fault(project, keys, body, reason):
    with_reads(project, body)
    blame = r"sum: fingerprint\(\) of toy\.add \(plugin \./toy\.py\) failed: "
    with pytest.raises(ManifestError, match=blame + reason) as raised:
        keys()
    assert raised.value.exit_code == ExitCode.PLUGIN


def test_what_reads_gives_is_compared_as_it_is_stored(project, keys):
    with_reads(project, "return {1: (2, 3)}")
    plan = project.plan()
    parts = compute_keys(plan, source_digests(plan, Store(project.artifacts)))["sum"].parts
    assert parts["fingerprint"] == {"1": [2, 3]}


def test_a_key_may_hold_what_json_does_not():
    assert Key.of({"a": math.nan}).digest == Key.of({"a": math.nan}).digest
