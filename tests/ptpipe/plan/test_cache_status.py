"""What a run would do, why, and the records of those that were."""

from __future__ import annotations

import shutil

import pytest

from ptpipe import ManifestError
from ptpipe.errors import IntegrityError, UsageError
from ptpipe.execution.engine import source_digests
from ptpipe.plan.cache_status import cache_statuses
from ptpipe.plan.keys import compute_keys
from ptpipe.store.runs import find_run, list_runs, run_records
from ptpipe.store.store import Store

from ..synthetic import stage_facts, write_record

STAGES = """
one: {uses: toy.make, with: {value: 3}}
two: {uses: toy.make, with: {value: 2}}
sum: {uses: toy.add, needs: {a: one, b: two}}
gate: {uses: toy.gate, needs: {a: sum}, with: {least: 9}}
"""


@pytest.fixture
def reasons(project):
    """Why each stage would work; `cached` where it would not."""

    def look(overrides=None, fresh=()):
        plan, store = project.plan(overrides), Store(project.artifacts)
        sources = source_digests(plan, store)
        statuses = cache_statuses(plan, compute_keys(plan, sources), store, sources, fresh)
        return {item.stage_id: list(item.reasons) if item.entry is None else "cached" for item in statuses}

    return look


NEVER = ["no earlier result"]


def test_reasons_name_what_changed(project, reasons):
    project.write(STAGES)
    assert reasons() == dict.fromkeys(["one", "two", "sum", "gate"], NEVER)
    project.run()
    assert reasons() == dict.fromkeys(["one", "two", "sum", "gate"], "cached"), "a refused gate's verdict too"
    assert reasons({"one.value": 4, "one.note": "x"}) == {
        "one": ["config.note:  -> x", "config.value: 3.0 -> 4.0"],
        "two": "cached",
        "sum": ["upstream changed: one"],
        "gate": ["upstream changed: sum"],
    }
    assert reasons({"seed": 1})["two"] == ["seed: 0 -> 1"]
    assert reasons({"seed": 1})["sum"] == ["seed: 0 -> 1", "upstream changed: one, two"]
    assert reasons(fresh=("sum",)) == {
        "one": "cached",
        "two": "cached",
        "sum": ["requested with --fresh"],
        "gate": "cached",  # trusted until the run knows better
    }
    project.write(STAGES.replace("a: one, b: two", "a: one, b: one"))
    assert reasons()["sum"] == ["connected to other inputs"]
    project.write(STAGES)
    project.edit("a.value + b.value", "b.value + a.value")
    assert reasons()["one"] == ["the plugin's code"]


def test_a_result_that_has_gone(project, reasons):
    project.write(STAGES)
    result = project.run()
    path = project.artifacts / "index" / f"{result.stages['two'].key}.json"
    path.write_text("{")
    assert reasons()["two"] == [f"{path} was altered"]
    assert reasons()["sum"] == "cached"
    path.unlink()
    assert reasons()["two"] == ["result missing, altered or unfinished"]
    digest = result.stages["one"].outputs["output"]["digest"]
    shutil.rmtree(project.artifacts / "objects" / digest[:2])
    assert reasons()["one"] == [f"object {digest[:12]} is missing, or its record"]


def test_a_failed_stage_was_never_made(project, reasons):
    project.write("one: {uses: toy.make}\nfail: {uses: toy.fail}")
    project.run()
    assert reasons() == {"one": "cached", "fail": NEVER}


def test_what_was_made_is_looked_for_in_all_runs_of_the_name(project, reasons):
    project.write(STAGES)
    project.run()
    project.write("one: {uses: toy.make, with: {value: 3}}")
    project.run()
    project.write(STAGES.replace("value: 2", "value: 7"))
    assert reasons()["two"] == ["config.value: 2.0 -> 7.0"]
    project.write(STAGES.replace("value: 2", "value: 7"), head="name: toy-2\nplugins: [./toy.py]")
    assert reasons()["two"] == NEVER
    assert reasons()["one"] == "cached", "results don't belong to a name"


def test_an_unknown_stage_that_is_to_be_fresh(project, reasons):
    project.write(STAGES)
    with pytest.raises(ManifestError) as raised:
        reasons(fresh=("summ", "one", "x"))
    assert [str(problem) for problem in raised.value.problems] == [
        "--fresh summ: there is no stage 'summ' (did you mean 'sum'?)",
        "--fresh x: there is no stage 'x'",
    ]


def test_records_come_newest_first(tmp_path):
    store = Store(tmp_path)
    assert list(run_records(store)) == []
    write_record(store, "20260101-000000-toy-00001")
    write_record(store, "20260101-000000-toy-00009", run_id="../../somewhere/else")
    write_record(store, "20670301-000000-toy-00002")  # the clock was ahead
    write_record(store, "20260301-000000-other-00003", name="other")
    write_record(store, "20260201-000000-toy-100000")
    write_record(store, "20260201-000000-toy-00004")
    write_record(store, "20260401-000000-toy-aaaa")
    write_record(store, "20260402-000000-toy-0000")
    assert [record["run_id"] for record in run_records(store)] == [
        "20260201-000000-toy-100000",
        "20260201-000000-toy-00004",
        "20260301-000000-other-00003",
        "20670301-000000-toy-00002",
        "20260101-000000-toy-00001",
        "20260402-000000-toy-0000",
        "20260401-000000-toy-aaaa",
    ], "by number, then (former versions) by time; never that of another run"
    assert [record["run_id"] for record in run_records(store, "other")] == ["20260301-000000-other-00003"]
    assert list(run_records(store, "the")) == []


def test_a_folder_without_a_readable_record_is_passed_over(tmp_path):
    store = Store(tmp_path)
    for number, text in enumerate(["", "{", "[]", "{}", '{"started_at": 1}', "\0"]):
        write_record(store, f"20260101-000000-toy-0000{number}").write_text(text)
    (store.root / "runs" / "20260101-000009-toy-00009").mkdir()
    (store.root / "runs" / "notes").mkdir()
    (store.root / "runs" / "20260101-000009-toy-00010").write_text("")
    (store.root / "runs" / "20260101-000009-toy-00011").symlink_to("20260101-000009-toy-00011")
    assert list(run_records(store)) == []
    assert [run.number for run in list_runs(store)] == [9, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": {}}, {"stages": [1]}, {"stages": [stage_facts("one", "k", outcome=1)]}, {"keys": {"one": 1}},
        {"stages": [stage_facts("one", "k") | {"outputs": {"output": {"digest": 1}}}]}, {"machine": {}},
        {"stages": [stage_facts("one", "k", deliverables=[1])]}, {"seconds": "1"}, {"started_at": None},
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_no_record(tmp_path, changes):
    store = Store(tmp_path)
    write_record(store, "20260101-000000-toy-00001", **changes)
    assert list(run_records(store)) == []
    with pytest.raises(IntegrityError, match="written by another version of ptpipe"):
        find_run(store, "last")


@pytest.mark.parametrize("run_id", ["20260101-000000-toy-00002", "../../somewhere/else", None])
def test_a_record_of_another_run_is_no_record(tmp_path, run_id):
    store = Store(tmp_path)
    write_record(store, "20260101-000000-toy-00001", run_id=run_id)
    assert list(run_records(store)) == []
    with pytest.raises(IntegrityError, match="was altered: it is that of another run"):
        find_run(store, "last")


def test_a_run_is_found_by_a_part_of_its_id(tmp_path):
    store = Store(tmp_path)
    write_record(store, "20260101-000000-toy-00001")
    write_record(store, "20260102-000000-toy-00002")
    for wanted in ("20260102-000000-toy-00002", "00002", "20260102", "last"):
        record, folder = find_run(store, wanted)
        assert record["run_id"] == folder.name == "20260102-000000-toy-00002"
    with pytest.raises(UsageError, match="the id of the run is empty; `last` is the newest one"):
        find_run(store, "")
    with pytest.raises(UsageError, match="'2026' matches 2 runs; give more of the id"):
        find_run(store, "2026")
    with pytest.raises(UsageError, match=r"there is no run '20260103-000000-toy-00002'.*did you mean '20260102"):
        find_run(store, "20260103-000000-toy-00002")
    with pytest.raises(UsageError, match="there is no run 'last'"):
        find_run(Store(tmp_path / "empty"), "last")


def test_only_recent_records_are_read_for_a_stage_that_was_never_made(project, reasons):
    project.write("one: {uses: toy.make}")
    store = Store(project.artifacts)
    for number in range(20):
        write_record(store, f"20260101-000000-toy-{number:05}")
    assert reasons()["one"] == ["no result in the last 20 runs"]


def test_an_altered_record_stops_no_plan(project, reasons):
    project.write(STAGES)
    project.run()
    second = project.run({"one.value": 4})
    record = second.folder / "record.json"
    record.write_text(record.read_text().replace('"parts"', '"partz"'))
    assert reasons({"one.value": 5})["one"] == ["config.value: 3.0 -> 5.0"]
    assert project.run({"one.value": 5}).exit_code == 3
