"""`ptpipe verify`: whatever is altered, missing or out of place is named."""

from __future__ import annotations

import copy
import json
import os
import shutil

import pytest

from ptpipe.errors import IntegrityError, UsageError
from ptpipe.execution.gc import collect_garbage
from ptpipe.execution.statement import statement_path
from ptpipe.provenance.statement import Statement
from ptpipe.provenance.verify import Verification
from ptpipe.store.documents import read_document, write_document
from ptpipe.store.store import Store

THOROUGH = os.environ.get("PTPIPE_THOROUGH", "0") != "0"


def verified(project, run=None, file=None):
    verification = Verification(Store(project.artifacts))
    if file:
        verification.verify_file(file)
    elif run:
        verification.verify_run(run)
    else:
        verification.verify_store()
    return verification


def faults(*arguments, **keywords):
    return [(str(fault.state), fault.subject) for fault in verified(*arguments, **keywords).faults]


def flip(path, position=None, bit=3):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1 << bit
    path.chmod(0o644)
    path.write_bytes(content)


def truncate(path):
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size // 2)


def replace_by_link(path):
    kept = path.with_name(f".{path.name}")
    path.rename(kept)
    path.symlink_to(kept.name)


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = [flip, truncate, replace_by_link, replace_by_folder, lambda path: path.unlink()]
FILES = {
    "entry": lambda stored: stored.artifacts / "index" / f"{stored.result.stages['sum'].key}.json",
    "object": lambda stored: stored.object("one") / "files" / "number.json",
    "record of object": lambda stored: stored.object("text") / "record.json",
    "record": lambda stored: stored.run / "record.json",
    "manifest": lambda stored: stored.run / "manifest.yaml",
    "deliverable": lambda stored: stored.run / "sum" / "number.json",
    "statement": lambda stored: stored.run / "sum" / "number.json.intoto.json",
}


def test_what_is_whole_has_no_faults(shop):
    shop.write(
        "bad: {uses: toy.fail}\none: {uses: toy.make}\ngate: {uses: toy.gate, needs: {a: one}, with: {least: 5}}"
    )
    for keep_going in (True, False):
        shop.run(options=options(keep_going=keep_going))
    verification = verified(shop)
    assert verification.faults == []
    assert (verification.checked["run"], verification.checked["result"], verification.checked["object"]) == (2, 2, 2)
    assert verification.checked["deliverable"] == 1
    assert faults(shop, run="last") == []


def options(**keywords):
    from ptpipe.execution.engine import RunOptions

    return RunOptions(**keywords)


@pytest.mark.parametrize("damage", DAMAGES, ids=["flip", "truncate", "link", "folder", "lose"])
@pytest.mark.parametrize("kind", FILES)
def test_every_damage_to_every_kind_of_file_is_named(stored, kind, damage):
    assert faults(stored) == []
    path = FILES[kind](stored)
    damage(path)
    whole = faults(stored)
    assert sorted(whole) == sorted(faults(stored, run=stored.run.name))
    name = path.relative_to(stored.artifacts).as_posix()
    ((_, subject),) = whole
    assert name.startswith(subject)


def test_altered_linked_bytes_are_named_where_they_are(shop):
    result = shop.run()
    flip(result.folder / "sum" / "number.json")
    digest = result.stages["sum"].outputs["output"]["digest"]
    expected = [("altered", f"objects/{digest[:2]}/{digest}"), ("altered", f"runs/{result.run_id}/sum/number.json")]
    assert sorted(faults(shop)) == expected


@pytest.mark.parametrize("kind", ["record", "statement", "manifest", "entry", "deliverable"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(stored, kind):
    replace_by_pipe(FILES[kind](stored))
    assert len(faults(stored)) == 1


def test_every_flipped_bit_of_a_statement_is_named(stored):
    path = FILES["statement"](stored)
    content = path.read_bytes()
    missed = []
    for position in range(0, 8 * len(content), 5 if THOROUGH else 97):
        altered = bytearray(content)
        altered[position // 8] ^= 1 << position % 8
        path.write_bytes(altered)
        try:
            Statement.read(path)
            missed.append(position)
        except IntegrityError:
            pass
    assert missed == []


def test_flipped_bits_anywhere_are_named(stored):
    """An object's record has a summary that nothing reads; logs and caches decide nothing; opening reads `format`."""
    not_verified = {"log.txt", "sources.cache", "in-use", "format"}
    files = [path for path in stored.artifacts.rglob("*") if path.is_file() and path.name not in not_verified]
    files = [path for path in files if path.parent.name != "locks" and not path.match("objects/*/*/record.json")]
    assert len(files) == 4 + 4 + 2 + 2 * 3, "entries, objects, record and manifest, deliverables with statements"
    step = 29 if THOROUGH else 2003
    missed, tried = [], 0
    for path in files:
        content = path.read_bytes()
        path.chmod(0o644)
        for position in range(path.stat().st_size % 7, 8 * len(content), step):
            altered = bytearray(content)
            altered[position // 8] ^= 1 << position % 8
            path.write_bytes(altered)
            tried += 1
            missed += [] if faults(stored) else [(path.name, position)]
        path.write_bytes(content)
    print(f"{tried} bits flipped, {len(missed)} missed")
    assert missed == []
    assert faults(stored) == []


def test_what_a_run_needs_and_gc_left_alone_is_there(shop):
    old = shop.run({"one.value": 7})
    new = shop.run()
    collect_garbage(Store(shop.artifacts), 1)
    assert faults(shop) == []
    assert faults(shop, run=new.run_id) == []
    with pytest.raises(UsageError, match="there is no run"):
        verified(shop, run=old.run_id)


def test_missing_objects_are_named_once(stored):
    shutil.rmtree(stored.object("one"))
    assert faults(stored) == [("missing", str(stored.object("one").relative_to(stored.artifacts)))]


def test_the_last_run_is_found_though_its_record_is_damaged(stored):
    newest = stored.run.with_name("29991231-235959-toy-0000")
    shutil.copytree(stored.run, newest)
    (newest / "record.json").unlink()
    assert faults(stored, run="last") == [("missing", "runs/29991231-235959-toy-0000/record.json")]


def test_a_run_that_was_killed_before_its_first_record_is_no_fault(stored):
    folder = stored.artifacts / "runs" / "20260101-000000-toy-0000"
    folder.mkdir()
    (folder / "manifest.yaml").write_text("")
    (folder / ".record.json-0123456789ab").write_text("{")
    assert faults(stored) == []


def test_what_cannot_be_read_is_told_apart(stored, monkeypatch):
    path = FILES["manifest"](stored)
    opened = type(path).open

    def failing(self, *arguments, **keywords):
        if self == path:
            raise OSError(5, "Input/output error")
        return opened(self, *arguments, **keywords)

    monkeypatch.setattr(type(path), "open", failing)
    assert faults(stored) == [("unreadable", f"runs/{stored.run.name}/manifest.yaml")]


def test_swapped_files_are_named(stored):
    for kind, other in (("statement", "one/number.json.intoto.json"), ("deliverable", "one/number.json")):
        one, two = FILES[kind](stored), stored.run / other
        swap(one, two)
        assert {subject for _, subject in faults(stored)} >= {str(p.relative_to(stored.artifacts)) for p in (one, two)}
        swap(one, two)
    assert faults(stored) == []
    entries = sorted(stored.artifacts.glob("index/*.json"))[:2]
    swap(*entries)
    assert faults(stored) == [("altered", f"index/{path.name}") for path in entries]


def swap(one, other):
    one.rename(one.with_name(".aside"))
    other.rename(one)
    one.with_name(".aside").rename(other)


def test_nothing_is_written(stored):
    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in stored.artifacts.rglob("*")}

    before = state()
    verified(stored)
    verified(stored, run="last")
    verified(stored, file=FILES["deliverable"](stored))
    assert state() == before


# A file elsewhere


@pytest.fixture
def file(stored, tmp_path):
    """A deliverable with its statement, outside of the store."""
    shutil.copytree(stored.run / "sum", tmp_path / "shipped")
    return tmp_path / "shipped" / "number.json"


def test_a_file_is_verified_without_its_store(stored, file):
    shutil.rmtree(stored.artifacts)
    verification = verified(stored, file=file)
    assert (verification.faults, verification.checked["deliverable"]) == ([], 1)
    assert faults(stored, file=statement_path(file)) == []
    for position in range(8 * file.stat().st_size):
        flip(file, position // 8, position % 8)
        assert faults(stored, file=file) == [("altered", str(file))]
        flip(file, position // 8, position % 8)
    statement_path(file).unlink()
    assert faults(stored, file=file) == [("missing", str(statement_path(file)))]


def test_a_file_is_compared_with_the_store_that_made_it(stored, file):
    assert verified(stored, file=file).checked["object"] == 3
    flip(FILES["object"](stored))
    assert faults(stored, file=file) == [("altered", str(stored.object("one").relative_to(stored.artifacts)))]


def test_a_forged_statement_differs_from_that_of_the_run(stored, file):
    content = read_document(statement_path(file))
    content["predicate"]["buildDefinition"]["externalParameters"]["manifest"]["text"] += "# forged"
    write_document(statement_path(file), json.dumps(content))
    assert faults(stored, file=file) == [("altered", str(statement_path(file)))]


def forge_subject(content):
    content["subject"][0]["digest"]["sha256"] = "0" * 64


def forge_name(content):
    content["subject"][0]["name"] = "other.json"


def forge_output(content):
    content["predicate"]["runDetails"]["metadata"]["ptpipe_results"][2]["outputs"]["output"]["digest"] = "0" * 64


def forge_files(content):
    files = content["predicate"]["runDetails"]["metadata"]["ptpipe_results"][2]["outputs"]["output"]["files"]
    files["more.json"] = files["number.json"]


def forge_input(content):
    content["predicate"]["runDetails"]["metadata"]["ptpipe_results"][2]["inputs"]["a"] = ["0" * 64]


def forge_no_input(content):
    content["predicate"]["runDetails"]["metadata"]["ptpipe_results"][2]["inputs"] = {}


def forge_upstream(content):
    content["predicate"]["runDetails"]["metadata"]["ptpipe_results"][0]["outputs"]["output"]["digest"] = "0" * 64


def forge_option(content):
    content["predicate"]["buildDefinition"]["internalParameters"]["stages"][0]["parts"]["config"]["value"] = 4.0


def forge_key(content):
    content["predicate"]["buildDefinition"]["internalParameters"]["stages"][0]["key"] = "0" * 64


def forge_stage(content):
    del content["predicate"]["buildDefinition"]["internalParameters"]["stages"][0]


def forge_type(content):
    content["predicateType"] = "https://example.com/other"


def forge_digest(content):
    content["subject"][0]["digest"]["sha256"] = "../../etc/passwd"


def forge_members(content):
    content["predicate"] = []


FORGERIES = [value for name, value in globals().items() if name.startswith("forge_")]


@pytest.mark.parametrize("forge", FORGERIES, ids=[forge.__name__ for forge in FORGERIES])
def test_a_statement_that_contradicts_itself_is_named_anywhere(stored, file, forge):
    shutil.rmtree(stored.artifacts)
    content = read_document(statement_path(file))
    forged = copy.deepcopy(content)
    forge(forged)
    assert forged != content
    write_document(statement_path(file), json.dumps(forged))
    assert faults(stored, file=file) == [("altered", str(statement_path(file)))]


@pytest.mark.parametrize(
    "text",
    ["[]", '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}", '{"a": 1}', '{"subject": [{}]}', '{"_type": "\\ud800"}'],
)
def test_what_is_no_statement_is_named(stored, file, text):
    if text == "[]":
        statement_path(file).write_text(text)
    else:
        write_document(statement_path(file), text)
    assert faults(stored, file=file) == [("altered", str(statement_path(file)))]


def test_numbers_that_json_has_not_are_no_fault(shop):
    shop.edit('@stage("toy.make")', '@stage("toy.make", fingerprint=lambda c: [float("inf"), float("nan")])')
    shop.run()
    assert faults(shop) == []
