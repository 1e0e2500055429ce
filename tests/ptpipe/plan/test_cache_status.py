"""What a run would do, why, and the records of those that were."""

from __future__ import annotations

import json
import shutil

import pytest

from ptpipe import ManifestError
from ptpipe.errors import UsageError
from ptpipe.execution.engine import source_digests
from ptpipe.plan.cache_status import cache_statuses
from ptpipe.plan.keys import compute_keys
from ptpipe.store.documents import write_document
from ptpipe.store.runs import find_run, run_records
from ptpipe.store.store import Store

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
        statuses = cache_statuses(plan, compute_keys(plan, source_digests(plan, store)), store, fresh)
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


def write_record(store, run_id, **changes):
    record = {
        "name": "toy", "started_at": "2026-01-01T00:00:00", "seconds": 1, "exit_code": 0, "finished": True,
        "keys": {}, "stages": [], "run_id": "../../somewhere/else",
    }  # fmt: skip
    path = store.root / "runs" / run_id / "record.json"
    path.parent.mkdir(parents=True)
    write_document(path, json.dumps(record | changes))
    return path


def test_records_come_newest_first(tmp_path):
    store = Store(tmp_path)
    assert list(run_records(store)) == []
    write_record(store, "20260101-000000-toy-ffff", started_at="2026-01-01T00:00:00.100")
    write_record(store, "20260101-000000-toy-0000", started_at="2026-01-01T00:00:00.900")
    write_record(store, "20260301-000000-other-aaaa", started_at="2026-03-01T00:00:00")
    write_record(store, "20260201-000000-toy-aaaa", started_at="2026-02-01T00:00:00")
    ids = [record["run_id"] for record in run_records(store)]
    assert ids == [
        "20260301-000000-other-aaaa",
        "20260201-000000-toy-aaaa",
        "20260101-000000-toy-0000",
        "20260101-000000-toy-ffff",
    ], "by time, and named after their folders"
    assert [record["run_id"] for record in run_records(store, "other")] == ["20260301-000000-other-aaaa"]


def test_a_folder_without_a_readable_record_is_passed_over(tmp_path):
    store = Store(tmp_path)
    for number, text in enumerate(["", "{", "[]", "{}", '{"started_at": 1}', "\0"]):
        write_record(store, f"20260101-00000{number}-toy-aaaa").write_text(text)
    (store.root / "runs" / "20260101-000009-toy-aaaa").mkdir()
    assert list(run_records(store)) == []


def test_a_run_is_found_by_a_part_of_its_id(tmp_path):
    store = Store(tmp_path)
    write_record(store, "20260101-000000-toy-aaaa")
    write_record(store, "20260102-000000-toy-bbbb")
    for wanted in ("20260102-000000-toy-bbbb", "bbbb", "20260102", "last"):
        record, folder = find_run(store, wanted)
        assert record["run_id"] == folder.name == "20260102-000000-toy-bbbb"
    with pytest.raises(UsageError, match="'2026' matches 2 runs; give more of the id"):
        find_run(store, "2026")
    with pytest.raises(UsageError, match=r"there is no run '20260103-000000-toy-bbbb'.*did you mean '20260102"):
        find_run(store, "20260103-000000-toy-bbbb")
    with pytest.raises(UsageError, match="there is no run 'last'"):
        find_run(Store(tmp_path / "empty"), "last")
