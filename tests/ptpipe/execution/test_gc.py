"""What may go and what must stay."""

from __future__ import annotations

import json

import pytest

from ptpipe import PtpipeError
from ptpipe.execution.engine import source_digests
from ptpipe.execution.gc import collect_garbage
from ptpipe.execution.record import RunRecord
from ptpipe.plan.keys import compute_keys
from ptpipe.store.documents import read_document, write_document
from ptpipe.store.runs import run_records
from ptpipe.store.store import Store

STAGES = "one: {uses: toy.make, with: {value: 3}}\nsum: {uses: toy.add, needs: {a: one, b: one}}"


def contents(store):
    return sorted(path.relative_to(store.root).as_posix() for path in store.root.rglob("*"))


def test_only_what_old_runs_alone_used_goes(project):
    project.write(STAGES)
    project.run({"one.value": 1})
    project.run({"one.value": 2})
    last = project.run()
    store = Store(project.artifacts)
    before = contents(store)
    expected = collect_garbage(store, 1, dry_run=True)
    assert contents(store) == before
    assert (expected.num_runs, expected.num_objects) == (2, 3), "1, 2 (which 1+1 is as well) and 2+2"
    assert collect_garbage(store, 1) == expected
    assert [record["run_id"] for record in run_records(store)] == [last.run_id]
    assert project.outcomes(project.run()) == {"one": "cached", "sum": "cached"}
    assert project.outcomes(project.run({"one.value": 1})) == {"one": "done", "sum": "done"}


def test_each_name_keeps_its_runs(project):
    for name in ("first", "second"):
        project.write(STAGES, head=f"name: {name}\nplugins: [./toy.py]")
        for value in (1, 2):
            project.run({"one.value": value})
    assert collect_garbage(Store(project.artifacts), 1).num_runs == 2
    assert sorted(record["name"] for record in run_records(Store(project.artifacts))) == ["first", "second"]


def test_keeping_none_empties_the_store(project):
    project.write(STAGES)
    project.run()
    store = Store(project.artifacts)
    assert collect_garbage(store, 0).size_bytes > 0
    assert not [name for name in contents(store) if name.count("/") > 1]
    assert collect_garbage(store, 0).num_objects == 0


def test_what_killed_processes_left_goes(project):
    project.write(STAGES)
    project.run()
    root = project.artifacts
    left = ["objects/.new-0123/files/x", "index/.k.json-0123", "quarantine/0123-4/record.json"]
    left += ["runs/20260101-000000-toy-aaaa/log.txt", "scratch/" + "0" * 64 + "/checkpoint"]
    for name in left:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    collect_garbage(Store(root), 1)
    assert not [name for name in left if (root / name).exists()]
    assert project.outcomes(project.run()) == {"one": "cached", "sum": "cached"}


def test_checkpoints_of_a_kept_run_stay(project):
    project.write("slow: {uses: toy.slow, with: {steps: 1000}}")
    plan = project.plan()
    store = Store(project.artifacts)
    store.open_for_writing()
    keys = compute_keys(plan, source_digests(plan, store))
    RunRecord(plan, store, keys).open()  # and then the process was killed
    (store.scratch(keys["slow"].digest) / "step").write_text("500")
    collect_garbage(store, 1)
    assert (store.scratch(keys["slow"].digest) / "step").read_text() == "500"
    collect_garbage(store, 0)
    assert not (store.root / "scratch" / keys["slow"].digest).exists()


def test_a_record_cannot_point_outside(project):
    project.write(STAGES)
    result = project.run()
    (project.folder / "precious").mkdir()
    record = result.folder / "record.json"
    write_document(record, json.dumps(read_document(record)).replace(result.run_id, "../../precious"))
    collect_garbage(Store(project.artifacts), 0)
    assert (project.folder / "precious").is_dir()


def test_not_while_a_run_goes_on(project):
    project.write(STAGES)
    project.run()
    with Store(project.artifacts).in_use(), pytest.raises(PtpipeError, match="a run is using"):
        collect_garbage(Store(project.artifacts), 0)
    with pytest.raises(PtpipeError, match="there is no artifacts folder"):
        collect_garbage(Store(project.folder / "elsewhere"), 0)
