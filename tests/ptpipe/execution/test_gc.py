"""What may go and what must stay."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe import PtpipeError
from ptpipe.execution.engine import RunOptions, source_digests
from ptpipe.execution.gc import collect_garbage
from ptpipe.execution.record import RunRecord
from ptpipe.plan.keys import compute_keys
from ptpipe.store.documents import read_document, write_document
from ptpipe.store.runs import find_run, list_runs, run_records
from ptpipe.store.store import Store

from .. import synthetic
from ..synthetic import (
    Bytes,
    check_index,
    check_run,
    deliver,
    key_of,
    put_entry,
    stage_facts,
    without_fsync,
    write_record,
)

STAGES = "one: {uses: toy.make, with: {value: 3}}\nsum: {uses: toy.add, needs: {a: one, b: one}}"


def contents(store):
    """Every path of the store but the locks, which are nothing while no process holds them."""
    return {path for path in synthetic.contents(store.root) if not path.startswith("locks/")}


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
    left = ["objects/.new-0123/files/x", "objects/.old-0123/files/x", "index/.k.json-0123456789ab"]
    left += ["runs/20260101-000000-toy-00007/.record.json-0123456789ab", "scratch/" + "0" * 64 + "/checkpoint"]
    left += ["runs/.new-0123/record.json", "runs/.old-20260101-000000-toy-00009/one/number.json"]
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


def old_and_new(project):
    """Two runs that share nothing."""
    project.write(STAGES)
    return project.run({"one.value": 1}), project.run({"one.value": 10})


# What cannot be read is kept, with all that it may need


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"stages"', '"stagez"'),
        lambda text: "",
        lambda text: "[]",
    ],
    ids=["cut short", "a bit of a key", "empty", "no record"],
)
def test_a_record_that_cannot_be_read_costs_nothing(project, damage):
    old, new = old_and_new(project)
    record = new.folder / "record.json"
    sound = record.read_text()
    record.write_text(damage(sound))
    store = Store(project.artifacts)
    before = contents(store)
    garbage = collect_garbage(store, 1)
    assert contents(store) == before
    assert "every stored result is kept" in garbage.problems[0]
    assert str(record) in garbage.problems[1]
    collect_garbage(store, 0)
    assert not old.folder.exists(), "what can be read may go"
    assert contents(store) == before - {path for path in before if path.startswith(f"runs/{old.run_id}")}
    record.write_text(sound)
    assert collect_garbage(store, 1).problems == ()
    check_run(store, new.folder)
    assert project.outcomes(project.run({"one.value": 10})) == {"one": "cached", "sum": "cached"}


def test_a_lost_record_costs_nothing(project):
    _, new = old_and_new(project)
    (new.folder / "record.json").rename(project.folder / "record.json")
    garbage = collect_garbage(Store(project.artifacts), 0)
    assert garbage.num_objects == 0
    assert "is missing" in garbage.problems[1]
    (project.folder / "record.json").rename(new.folder / "record.json")
    check_run(Store(project.artifacts), new.folder)


def test_a_record_of_another_version_costs_nothing(project):
    _, new = old_and_new(project)
    record = read_document(new.folder / "record.json")
    record["steps"] = record.pop("stages")
    write_document(new.folder / "record.json", json.dumps(record))
    garbage = collect_garbage(Store(project.artifacts), 0)
    assert (garbage.num_runs, garbage.num_objects) == (1, 0)
    assert "was written by another version of ptpipe" in garbage.problems[1]


@pytest.mark.parametrize("change", [{"priority": 3}, {"key": "0" * 64}], ids=["another version", "another key"])
def test_an_entry_that_is_not_understood_keeps_what_it_mentions(project, change):
    old, new = old_and_new(project)
    entry = project.artifacts / "index" / f"{old.stages['sum'].key}.json"
    write_document(entry, json.dumps(read_document(entry) | change))
    garbage = collect_garbage(Store(project.artifacts), 1)
    assert [str(entry) in problem for problem in garbage.problems] == [True]
    assert entry.exists()
    Store(project.artifacts).verify(old.stages["sum"].outputs["output"]["digest"])
    check_run(Store(project.artifacts), new.folder)
    assert garbage.num_runs == 1


def test_an_altered_entry_keeps_every_result(project):
    old, _ = old_and_new(project)
    entry = project.artifacts / "index" / f"{old.stages['sum'].key}.json"
    entry.write_text(entry.read_text().replace('"outputs"', '"outputz"'))
    store = Store(project.artifacts)
    before = contents(store)
    garbage = collect_garbage(store, 1)
    assert contents(store) == before - {path for path in before if path.startswith(f"runs/{old.run_id}")}
    assert [line for line in garbage.problems if str(entry) in line]
    entry.unlink()
    assert collect_garbage(store, 1).num_objects == 2


def test_an_entry_that_became_a_folder_is_named(project):
    old, _ = old_and_new(project)
    entry = project.artifacts / "index" / f"{old.stages['sum'].key}.json"
    entry.unlink()
    entry.mkdir()
    assert [line for line in collect_garbage(Store(project.artifacts), 1).problems if str(entry) in line]


def test_a_kept_record_keeps_the_digests_that_it_lists(project):
    project.write("dice: {uses: toy.dice}")
    first, second = project.run(), project.run(options=RunOptions(fresh=("dice",)))
    assert first.stages["dice"].outputs != second.stages["dice"].outputs
    assert collect_garbage(Store(project.artifacts), 2).num_objects == 0
    check_run(Store(project.artifacts), first.folder)
    check_run(Store(project.artifacts), second.folder)
    collect_garbage(Store(project.artifacts), 1)
    check_run(Store(project.artifacts), second.folder)


def test_a_clock_that_was_ahead_makes_no_run_the_newest(project, monkeypatch):
    project.write(STAGES)
    ahead = type("Now", (), {"now": staticmethod(lambda zone: datetime(2067, 1, 2, 3, 4, 5, tzinfo=zone))})
    with monkeypatch.context() as patched:
        patched.setattr("ptpipe.execution.record.datetime", ahead)
        future = project.run({"one.value": 1})
    present = project.run({"one.value": 10})
    store = Store(project.artifacts)
    assert [run.id for run in list_runs(store)] == [present.run_id, future.run_id]
    assert find_run(store, "last")[1] == present.folder
    assert collect_garbage(store, 1).num_runs == 1
    check_run(store, present.folder)


def write_sweep(project, name, *run_ids):
    folder = project.artifacts / "sweeps" / name
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"trials": [{"run_id": run_id} for run_id in run_ids]}))
    return folder


def test_a_sweep_goes_with_the_last_of_its_runs(project):
    project.write(STAGES)
    old, new = (project.run({"one.value": value}).run_id for value in (1, 2))
    lost, kept = write_sweep(project, "a-00001", old), write_sweep(project, "b-00002", old, new)
    unbegun, odd = write_sweep(project, "c-00003"), write_sweep(project, "d-00004", new)
    (odd / "sweep.json").write_text("{")
    garbage = collect_garbage(Store(project.artifacts), 1)
    assert [folder.exists() for folder in (lost, kept, unbegun, odd)] == [False, True, False, True]
    assert garbage.num_runs == 1
    (problem,) = garbage.problems
    assert problem.startswith(f"{odd} is kept: cannot read its sweep.json")


def test_quarantine_is_kept_until_it_is_said_otherwise(project):
    project.write(STAGES)
    result = project.run()
    store = Store(project.artifacts)
    place = store.quarantine(result.stages["sum"].outputs["output"]["digest"])
    garbage = collect_garbage(store, 0)
    assert place.is_dir()
    assert list(garbage.quarantine) == [f"quarantine/{place.name}"]
    assert garbage.quarantine[f"quarantine/{place.name}"] > 0
    emptied = collect_garbage(store, 0, empty_quarantine=True)
    assert (emptied.paths, emptied.quarantine) == ((f"quarantine/{place.name}",), {})
    assert not place.exists()


def test_what_is_no_run_stays_with_what_its_record_needs(project):
    old, new = old_and_new(project)
    runs = project.artifacts / "runs"
    (runs / "latest").symlink_to(new.run_id)
    (runs / "lost").symlink_to("nowhere")
    (runs / "notes.txt").write_text("x")
    old.folder.rename(runs / "before the change")
    (project.folder / "moved").mkdir()
    (runs / "20260101-000000-toy-00007").symlink_to(project.folder / "moved")
    store = Store(project.artifacts)
    garbage = collect_garbage(store, 0)
    assert (garbage.num_runs, garbage.num_objects) == (1, 0), "the link `latest` led to a record when gc began"
    assert len(garbage.problems) == 5
    assert collect_garbage(store, 0).num_objects == 2
    assert sorted(path.name for path in runs.iterdir()) == [
        "20260101-000000-toy-00007", "before the change", "latest", "lost", "notes.txt",
    ]  # fmt: skip
    check_run(store, runs / "before the change")


@pytest.mark.parametrize("name", ["scratch", "locks", "objects", "index"])
def test_what_is_not_of_the_store_stays_where_a_link_leads(project, name):
    """A disk of its own for checkpoints, say, that holds other things too."""
    project.write(STAGES)
    project.run()
    elsewhere = (project.artifacts / name).rename(project.folder / "elsewhere")
    (project.artifacts / name).symlink_to(elsewhere)
    others = [elsewhere / "data" / "x.bin", elsewhere / "notes.txt", elsewhere / ".hidden"]
    others[0].parent.mkdir()
    for path in others:
        path.write_text("x")
    collect_garbage(Store(project.artifacts), 0)
    assert [path.read_text() for path in others] == ["x"] * 3


# What killed processes left


def test_checkpoints_of_a_stored_stage_go(project):
    project.write("slow: {uses: toy.slow, with: {steps: 1}}")
    result = project.run()
    store = Store(project.artifacts)
    collect_garbage(store, 1)  # locks
    (store.scratch(result.stages["slow"].key) / "step").write_text("1")
    assert collect_garbage(store, 1).paths == (f"scratch/{result.stages['slow'].key}",)


def test_halves_in_a_kept_run_go(project):
    project.write(STAGES)
    folder = project.run().folder
    collect_garbage(Store(project.artifacts), 1)  # locks
    halves = [".record.json-0123456789ab", "one/.number.json-0123456789ab"]
    others = ["files/one/.plot-0123456789ab", ".hidden"]
    for name in halves + others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    garbage = collect_garbage(Store(project.artifacts), 1)
    assert set(garbage.paths) == {f"runs/{folder.name}/{name}" for name in halves}
    assert all((folder / name).exists() for name in others)


class Interruption:
    """Ends, or fails, the calls that change names on the disk: an audit hook hears of each before it is made."""

    def __init__(self):
        self.error = None
        self.root = ""
        self.calls_left = 0
        self.is_lasting = False
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if self.error is None or event not in ("os.remove", "os.rename", "os.rmdir"):
            return
        self.calls_left -= 1
        if self.calls_left == 0 or (self.calls_left < 0 and self.is_lasting):
            raise self.error

    @contextmanager
    def at(self, call, error, is_lasting=False):
        self.calls_left, self.error, self.is_lasting = call, error, is_lasting
        try:
            yield
        finally:
            self.error = None


interruption = Interruption()


class Killed(BaseException):
    pass


def two_deep(store):
    """A store with an old run and a new one that share a result, and a result of no run."""
    with without_fsync():
        store.open_for_writing()
        objects = [store.put(Bytes(bytes([number]))) for number in range(5)]
        for number, stored in enumerate(objects):
            put_entry(store, key_of(number), {"output": stored})
        for number, used in ((1, (0, 1, 2)), (2, (2, 3))):
            folder = store.root / "runs" / f"20260101-000000-toy-{number:05}"
            stages = [
                stage_facts(
                    f"s{one}", key_of(one), {"output": objects[one]},
                    deliverables=[deliver(store, folder.with_name(f".make-{number}"), f"s{one}", objects[one])],
                )
                for one in used
            ]  # fmt: skip
            write_record(store, folder.name, *stages)
            for path in folder.with_name(f".make-{number}").iterdir():
                path.rename(folder / path.name)
            folder.with_name(f".make-{number}").rmdir()
        (store.scratch(key_of("none")) / "checkpoint").write_text("x")


@pytest.mark.parametrize(
    ("error", "is_lasting"),
    [(Killed(), False), (OSError(errno.EIO, "Input/output error"), False), (OSError(errno.EROFS, "Read-only"), True)],
    ids=["killed", "fails once", "fails for good"],
)
def test_no_end_leaves_halves_that_count(tmp_path, error, is_lasting):
    whole = Store(tmp_path / "whole")
    two_deep(whole)
    collect_garbage(whole, 1)
    expected = contents(whole)
    for call in range(1, 200):
        store = Store(tmp_path / str(call))
        two_deep(store)
        before = contents(store)
        with without_fsync(), interruption.at(call, error, is_lasting):
            try:
                garbage = collect_garbage(store, 1)
            except Killed:
                garbage = None
            was_reached = interruption.calls_left <= 0
        if not was_reached:
            break
        for run in list_runs(store):
            check_run(store, run.folder)
        check_index(store)
        if garbage is not None:
            assert garbage.problems
            assert all(not (store.root / path).exists() for path in garbage.paths)
        if is_lasting and call == 1:
            assert contents(store) == before
        assert collect_garbage(store, 1).problems == ()
        assert contents(store) == expected
        shutil.rmtree(store.root)
    assert 15 < call < 199


# Any store


@st.composite
def stores(draw):
    """Which objects each key has, which keys each run lists, and what is broken."""
    objects, keys = range(5), range(4)
    outputs = st.lists(st.sampled_from(objects), max_size=2)
    entries = draw(st.dictionaries(st.sampled_from(keys), outputs))
    runs = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["toy", "toy-2"]),
                st.dictionaries(st.sampled_from(keys), st.sampled_from(objects), max_size=3),  # finished stages
                st.sets(st.sampled_from(keys), max_size=2),  # unfinished ones
                st.sampled_from(["sound"] * 4 + ["altered", "lost"]),
            ),
            max_size=5,
        )
    )
    return {
        "entries": entries,
        "runs": runs,
        "altered": draw(st.sets(st.sampled_from(keys), max_size=1)) if draw(st.booleans()) else set(),
        "scratch": draw(st.sets(st.sampled_from(keys))),
        "extra": draw(st.sets(st.sampled_from(EXTRA))),
    }


EXTRA = (
    "objects/.new-0123/files/x", "objects/.old-0123/files/x", "index/.k.json-0123456789ab", "runs/.new-01/record.json",
    "runs/.old-20260101-000000-toy-00001/one/x", "quarantine/0123-4/record.json", "runs/notes.txt",
    f"locks/{'0' * 64}", f"scratch/{'1' * 64}/step",
)  # fmt: skip


def build(root, facts):
    store = Store(root)
    store.open_for_writing()
    stored = [store.put(Bytes(bytes([number]))) for number in range(5)]
    for key, numbers in facts["entries"].items():
        put_entry(store, key_of(key), {f"out{number}": stored[number] for number in numbers})
    for key in facts["altered"] & facts["entries"].keys():
        path = store.root / "index" / f"{key_of(key)}.json"
        path.write_text(path.read_text()[:-9])
    for number, (name, finished, unfinished, state) in enumerate(facts["runs"], start=1):
        run_id = f"20260101-000000-{name}-{number:05}"
        stages = [
            stage_facts(f"s{key}", key_of(key), {"output": stored[one]}, deliverables=[f"s{key}/bytes"])
            for key, one in finished.items()
        ]
        keys = {f"s{key}": key_of(key) for key in {*finished, *unfinished}}
        record = write_record(store, run_id, *stages, name=name, keys=keys)
        for key, one in finished.items():
            deliver(store, record.parent, f"s{key}", stored[one])
        if state == "altered":
            record.write_text(record.read_text()[1:])
        elif state == "lost":
            record.rename(record.with_name("lost.json"))
    for key in facts["scratch"]:
        (store.scratch(key_of(key)) / "step").write_text("1")
    for name in facts["extra"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    return store


@given(stores(), st.integers(0, 3), st.booleans())
@settings(max_examples=2000 if os.environ.get("PTPIPE_THOROUGH", "0") != "0" else 60)
def test_a_dry_run_tells_what_goes_and_every_kept_result_stays(facts, keep_runs, empty_quarantine):
    with TemporaryDirectory(prefix="gc-") as folder, without_fsync():
        store = build(Path(folder) / "artifacts", facts)
        before = contents(store)
        told = collect_garbage(store, keep_runs, True, empty_quarantine)
        assert contents(store) == before
        done = collect_garbage(store, keep_runs, False, empty_quarantine)
        after = contents(store)
        assert done == told
        went = {path for path in before if any(path == one or path.startswith(f"{one}/") for one in told.paths)}
        assert after == before - went
        left = {run.id for run in list_runs(store)}
        check_index(store)
        seen = Counter()
        is_readable = True
        for number, (name, finished, _, state) in reversed([*enumerate(facts["runs"], start=1)]):
            run_id = f"20260101-000000-{name}-{number:05}"
            seen[name] += state == "sound"
            is_kept = state != "sound" or seen[name] <= keep_runs
            assert (run_id in left) == is_kept
            is_readable = is_readable and state == "sound"
            if is_kept and state == "sound":
                check_run(store, store.root / "runs" / run_id)
                for key in finished.keys() & facts["entries"].keys() - facts["altered"]:
                    assert store.entry(key_of(key)) is not None
        if not is_readable or facts["altered"] & facts["entries"].keys():
            assert len(list(store.root.glob("objects/[0-9a-f][0-9a-f]/*"))) == 5
            assert "every stored result is kept" in done.problems[0]
        assert collect_garbage(store, keep_runs, False, empty_quarantine).paths == ()
