"""Artifacts by content: round trips, altered bytes, concurrent writers, and a writer that is killed."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe import Artifact, IntegrityError, PtpipeError, UsageError
from ptpipe.store.documents import read_document, write_document
from ptpipe.store.files import make_folder
from ptpipe.store.format import FORMAT
from ptpipe.store.store import Entry, Store


@dataclass
class Files(Artifact):
    """Any files, by name."""

    contents: dict[str, bytes] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        for name, content in self.contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    @classmethod
    def load(cls, folder: Path) -> Self:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return cls({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})

    def summary(self):
        return {"num_files": len(self.contents)}


class OtherFiles(Files):
    pass


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "artifacts")
    opened.open_for_writing()
    return opened


def folder_of(store, stored):
    return store.root / "objects" / stored.digest[:2] / stored.digest


def left_over(store):
    return list(store.root.glob("objects/.*")) + list(store.root.glob("index/.*"))


NAMES = st.from_regex(r"[a-z]{1,5}(/[a-z]{1,5}){0,2}\.bin", fullmatch=True)


@settings(max_examples=25)
@given(st.dictionaries(NAMES, st.binary(max_size=50), max_size=4))
def test_what_is_put_can_be_got(tmp_path_factory, contents):
    store = Store(tmp_path_factory.mktemp("artifacts"))
    store.open_for_writing()
    stored = store.put(Files(contents))
    assert stored.type == "Files"
    assert stored.size_bytes == sum(map(len, contents.values()))
    assert stored.summary == {"num_files": len(contents)}
    fresh = Store(store.root)
    assert fresh.has(stored.digest)
    assert fresh.get(stored.digest, Files) == Files(contents)
    assert not left_over(store)


def test_the_digest_is_of_the_content(store):
    one = store.put(Files({"a": b"1", "b": b"2"}))
    assert store.put(Files({"b": b"2", "a": b"1"})).digest == one.digest
    others = [
        Files({"a": b"1", "b": b"3"}),
        Files({"a": b"1", "c": b"2"}),
        Files({"a": b"1"}),
        OtherFiles({"a": b"1", "b": b"2"}),
    ]
    assert one.digest not in {store.put(other).digest for other in others}
    assert len(list(store.root.glob("objects/??/*"))) == 5


def test_nothing_is_written_before_it_is_asked_for(tmp_path):
    store = Store(tmp_path / "artifacts")
    assert store.entry("0" * 64) is None
    assert not store.has("0" * 64)
    with pytest.raises(PtpipeError, match="there is no artifacts folder"), store.exclusive():
        pass
    assert not (tmp_path / "artifacts").exists()


def test_objects_are_read_only_and_open_to_the_team(store):
    stored = store.put(Files({"a/b": b"1"}))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder_of(store, stored).rglob("*")}
    umask = os.umask(0)
    os.umask(umask)
    assert modes["b"] == 0o444 & ~umask
    assert modes["a"] == 0o777 & ~umask
    assert stat.S_IMODE(folder_of(store, stored).stat().st_mode) == 0o777 & ~umask


class LinkArtifact(Files):
    def save(self, folder):
        (folder / "real").write_bytes(b"1")
        (folder / "link").symlink_to("real")


class PipeArtifact(Files):
    def save(self, folder):
        os.mkfifo(folder / "pipe")


@pytest.mark.parametrize(("artifact", "name"), [(LinkArtifact(), "link"), (PipeArtifact(), "pipe")])
def test_only_plain_files_are_stored(store, artifact, name):
    with pytest.raises(ValueError, match=f"plain files and folders, and {name} is neither"):
        store.put(artifact)
    assert not list(store.root.glob("objects/*"))


def saved(tmp_path, contents):
    """A folder that another process saved `Files` to."""
    folder = tmp_path / "saved"
    folder.mkdir()
    Files(contents).save(folder)
    return folder


def test_a_saved_folder_is_moved_not_written_again(store, tmp_path):
    contents = {"a": b"1", "deep/b": b"22"}
    folder = saved(tmp_path, contents)
    inodes = {path.name: path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
    stored = store.adopt(folder, Files)
    assert not folder.exists()
    placed = [path for path in store.files(stored.digest).rglob("*") if path.is_file()]
    assert {path.name: path.stat().st_ino for path in placed} == inodes
    assert {stat.S_IMODE(path.stat().st_mode) & 0o222 for path in placed} == {0}
    assert stored == store.put(Files(contents)), "digest, size and summary are those of a value that is put"
    assert Store(store.root).get(stored.digest, Files) == Files(contents)
    assert not left_over(store)


def test_a_folder_on_another_file_system_is_copied(store, tmp_path, monkeypatch):
    folder, rename = saved(tmp_path, {"a": b"1"}), os.rename

    def other_device(source, target):
        if Path(source) == folder:
            raise OSError(18, "Invalid cross-device link")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.os.rename", other_device)
        stored = store.adopt(folder, Files)
    assert not folder.exists()
    assert store.get(stored.digest, Files) == Files({"a": b"1"})


class Picky(Files):
    @classmethod
    def load(cls, folder):
        raise ValueError("damaged")


def test_what_cannot_be_adopted_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match="is not the folder of a saved Files"):
        store.adopt(tmp_path / "absent", Files)
    folder = saved(tmp_path, {"a": b"1"})
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ValueError, match="is not the folder of a saved Files"):
        store.adopt(tmp_path / "link", Files)
    with pytest.raises(ValueError, match="damaged"):
        store.adopt(folder, Picky)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "link").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="link is neither"):
        store.adopt(tmp_path / "again", Files)
    assert not list(store.root.glob("objects/*"))
    assert not left_over(store)


class BadSummary(Files):
    def summary(self):
        return {"path": Path()}


def test_a_summary_that_is_not_json_is_named(store):
    with pytest.raises(TypeError, match="the summary of BadSummary is not JSON: Object of type PosixPath"):
        store.put(BadSummary({"a": b"1"}))
    assert not left_over(store)


def test_what_a_class_returns_by_mistake_is_named_and_not_stored(store):
    class Forgetful(Files):
        def summary(self):
            """Without `return`."""

        @classmethod
        def load(cls, folder):
            """Without `return`."""

    with pytest.raises(TypeError, match=r"^the summary of Forgetful is a NoneType, not a dict$"):
        store.put(Forgetful({"a": b"1"}))
    assert not list(store.root.glob("objects/*"))
    with pytest.raises(TypeError, match=r"^Forgetful\.load\(\) returned a NoneType$"):
        store.get(store.put(Files({"a": b"1"})).digest, Forgetful)


def test_an_entry_whose_summary_is_none_is_no_entry(store):
    """As former versions wrote it: it must not stop every later run."""
    outputs = {"output": store.put(Files({"a": b"1"}))}
    entry = asdict(Entry("0" * 64, "toy.make", {}, {}, outputs, {}, (), 1.0, "2026-01-02T03:04:05+00:00"))
    assert Entry.from_json(entry).outputs == outputs
    entry["outputs"]["output"]["summary"] = None
    with pytest.raises(ValueError, match="no index entry: an output has no digest or no summary"):
        Entry.from_json(entry)


def linked(path):
    """Replace a path by a link to the same content elsewhere."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def folder_in_place(path):
    path.unlink()
    path.mkdir()


ALTERATIONS = {
    "changed": lambda files: (files / "a").write_bytes(b"2"),
    "longer": lambda files: (files / "a").write_bytes(b"11"),
    "emptied": lambda files: (files / "a").write_bytes(b""),
    "gone": lambda files: (files / "a").unlink(),
    "renamed": lambda files: (files / "a").rename(files / "c"),
    "added": lambda files: (files / "c").write_bytes(b""),
    "linked": lambda files: ((files / "a").unlink(), (files / "a").symlink_to(files / "b")),
    "files linked": lambda files: linked(files),
    "object linked": lambda files: linked(files.parent),
    "record linked": lambda files: linked(files.parent / "record.json"),
    "linked to itself": lambda files: (shutil.rmtree(files.parent), files.parent.symlink_to(files.parent)),
    "a pipe": lambda files: ((files / "a").unlink(), os.mkfifo(files / "a")),
    "a file in place of the folder": lambda files: (shutil.rmtree(files), files.write_text("")),
    "a file in place of the object": lambda files: (shutil.rmtree(files.parent), files.parent.write_text("")),
    "a folder in place of the record": lambda files: folder_in_place(files.parent / "record.json"),
    "all gone": lambda files: shutil.rmtree(files.parent),
    "deep record": lambda files: (files.parent / "record.json").write_text("[" * 100_000),
    "record gone": lambda files: (files.parent / "record.json").unlink(),
    "record truncated": lambda files: (files.parent / "record.json").write_text("{"),
    "record of another type": lambda files: (files.parent / "record.json").write_text('{"type": "X", "files": {}}'),
    "record without a listing": lambda files: (files.parent / "record.json").write_text('{"type": "X", "files": 3}'),
    "record is a list": lambda files: (files.parent / "record.json").write_text("[]"),
}


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
def test_altered_bytes_are_seen(store, alter):
    stored = store.put(Files({"a": b"1", "b": b"1"}))
    alter(folder_of(store, stored) / "files")
    fresh = Store(store.root)
    with pytest.raises(IntegrityError, match=f"object {stored.digest[:12]}|record.json was altered"):
        fresh.get(stored.digest, Files)
    was_there = os.path.lexists(folder_of(store, stored))
    place = fresh.quarantine(stored.digest)
    assert was_there == bool(place and os.path.lexists(place))
    assert not fresh.has(stored.digest)
    assert fresh.put(Files({"a": b"1", "b": b"1"})).digest == stored.digest
    assert Store(store.root).get(stored.digest, Files) == Files({"a": b"1", "b": b"1"})


def test_what_is_altered_after_it_was_verified_is_seen(store):
    stored = store.put(Files({"a": b"1"}))
    assert store.get(stored.digest, Files) == Files({"a": b"1"})
    os.link(store.files(stored.digest) / "a", store.root / "shipped")
    (store.root / "shipped").write_bytes(b"22")
    with pytest.raises(IntegrityError, match="was altered: a"):
        store.get(stored.digest, Files)


def test_what_was_verified_is_not_read_again(store, monkeypatch):
    stored = store.put(Files({"a": b"1"}))
    monkeypatch.setattr("ptpipe.store.object_files.hashlib.file_digest", lambda *_: pytest.fail("it was read"))
    store.verify(stored.digest)
    os.link(store.files(stored.digest) / "a", store.root / "shipped")
    store.verify(stored.digest)


def test_what_cannot_be_read_is_no_damage(store):
    stored = store.put(Files({"a": b"1"}))
    fresh = Store(store.root)
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path("/dev/null").open() as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                fresh.verify(stored.digest)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    fresh.verify(stored.digest)


@pytest.mark.parametrize("function", ["hashlib.file_digest", "os.scandir"])
def test_a_passing_error_is_no_damage(store, monkeypatch, function):
    stored = store.put(Files({"a": b"1"}))
    fresh = Store(store.root)

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(f"ptpipe.store.object_files.{function}", fails)
        with pytest.raises(OSError, match="Input/output error"):
            fresh.verify(stored.digest)
    fresh.verify(stored.digest)
    assert Store(store.root).get(stored.digest, Files) == Files({"a": b"1"})


def test_storing_what_is_there_in_altered_form_mends_it(store):
    stored = store.put(Files({"a": b"1"}))
    (folder_of(store, stored) / "files" / "a").write_bytes(b"2")
    fresh = Store(store.root)
    fresh.put(Files({"a": b"1"}))
    assert Store(store.root).get(stored.digest, Files) == Files({"a": b"1"})
    assert len(list(store.root.glob("quarantine/*"))) == 1
    assert not left_over(store)


def test_an_object_that_is_not_there(store):
    with pytest.raises(IntegrityError, match="is missing"):
        store.get("0" * 64, Files)


def entry_of(store, key="k" * 64):
    stored = store.put(Files({"a": b"1"}))
    return Entry(
        key, "a.b", {"x": 1}, {"port": ("d1", "d2")}, {"output": stored}, {"m": float("inf")}, ("n",), 1.5, "2026"
    )


def test_entries_come_back(store):
    entry = entry_of(store)
    store.put_entry(entry)
    assert store.entry(entry.key) == store.read_entry(entry.key) == entry
    assert store.entry("0" * 64) is store.read_entry("0" * 64) is None


def test_what_is_no_entry_of_the_key_is_damage(store):
    entry = entry_of(store)
    store.put_entry(entry)
    path = store.root / "index" / f"{entry.key}.json"
    content = read_document(path)
    output = content["outputs"]["output"]
    for changes in (
        {"key": "j" * 64},
        {"more": 1},
        {"outputs": None},
        {"outputs": {"output": output | {"digest": "../../../somewhere"}}},
        {"outputs": {"output": output | {"digest": 1}}},
        {"inputs": {"a": 1}},
        {"notices": None},
    ):
        write_document(path, json.dumps(content | changes))
        with pytest.raises(IntegrityError, match="entry"):
            store.read_entry(entry.key)
        assert store.entry(entry.key) is None


@pytest.mark.parametrize("replace", [linked, folder_in_place], ids=["link", "folder"])
def test_an_entry_is_a_plain_file(store, replace):
    entry = entry_of(store)
    store.put_entry(entry)
    path = store.root / "index" / f"{entry.key}.json"
    replace(path)
    with pytest.raises(IntegrityError, match="not a plain file"):
        store.read_entry(entry.key)
    store.put_entry(entry)
    assert store.read_entry(entry.key) == entry
    assert path.is_file()
    assert not path.is_symlink()


def damaged(text):
    content = json.loads(text)
    yield ""
    yield text[: len(text) // 2]
    yield "[]"
    yield "{}"
    yield text.replace("k", "j")
    yield json.dumps(content | {"more": 1})
    yield json.dumps(content | {"outputs": None})
    yield json.dumps(content | {"outputs": {"output": {"digest": "0" * 64, "type": "Files", "size_bytes": 1}}})
    yield "\0" * len(text)


def test_a_damaged_entry_is_unknown(store):
    entry = entry_of(store)
    store.put_entry(entry)
    path = store.root / "index" / f"{entry.key}.json"
    whole = path.read_text()
    for text in damaged(whole):
        path.write_text(text)
        assert store.entry(entry.key) is None, text
    path.write_bytes(b"\xff\xfe")
    assert store.entry(entry.key) is None
    path.write_text(whole)
    assert store.entry(entry.key) == entry


def test_an_entry_whose_object_is_gone_is_unknown(store):
    entry = entry_of(store)
    store.put_entry(entry)
    store.quarantine(entry.outputs["output"].digest)
    assert store.entry(entry.key) is None


def test_scratch_is_kept_until_it_is_dropped(store):
    (store.scratch("k") / "checkpoint").write_text("1")
    assert (store.scratch("k") / "checkpoint").read_text() == "1"
    store.drop_scratch("k")
    assert list(store.scratch("k").iterdir()) == []
    store.drop_scratch("never made")


@pytest.mark.parametrize("blocked", ["artifacts", "artifacts/objects", "artifacts/runs"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, blocked):
    path = tmp_path / blocked
    path.parent.mkdir(exist_ok=True)
    path.write_text("a file in its place")
    with pytest.raises(PtpipeError, match="cannot write to the artifacts folder") as raised:
        Store(tmp_path / "artifacts").open_for_writing()
    assert str(raised.value).endswith(f": {path} is not a folder")


def test_scratch_that_was_left_is_dropped_unless_it_is_used(store):
    (store.scratch("k") / "checkpoint").write_text("1")
    with Store(store.root).lock("k"):
        store.drop_leftover_scratch("k")
    assert (store.scratch("k") / "checkpoint").exists()
    store.drop_leftover_scratch("k")
    assert not (store.root / "scratch" / "k").exists()
    store.drop_leftover_scratch("never made")


def test_checkpoints_of_inputs_of_another_origin_are_dropped(store):
    for origin, is_kept in (("", True), ("a", False), ("a", True), ("b", False), ("", False), ("", True)):
        (store.scratch("k") / "checkpoint").touch()
        store.claim_scratch("k", origin)
        assert (store.scratch("k") / "checkpoint").exists() == is_kept, origin
    store.claim_scratch("never made", "")
    assert not (store.root / "scratch" / "never made").exists()


# The format number


def test_a_store_has_a_format_number(store):
    assert (store.root / "format").read_text() == f"{FORMAT}\n"
    assert Store(store.root).open_for_writing() == ""


def test_a_newer_store_is_refused(store):
    (store.root / "format").write_text(f"{FORMAT + 1}\n")
    with pytest.raises(UsageError, match=f"newer ptpipe: its format is {FORMAT + 1}, and this version reads {FORMAT};"):
        Store(store.root)


@pytest.mark.parametrize("text", ["", "2", "x\n", "-2\n", "2\n2\n", "٢\n", "9" * 5000 + "\n"])
def test_a_format_that_is_no_number_is_damage(store, text):
    (store.root / "format").write_text(text)
    with pytest.raises(IntegrityError, match="format was altered: it has no number; delete it if"):
        Store(store.root)


@pytest.mark.parametrize("replace", [linked, folder_in_place], ids=["link", "folder"])
def test_a_format_is_a_plain_file(store, replace):
    replace(store.root / "format")
    with pytest.raises(IntegrityError, match="format was altered"):
        Store(store.root)


def test_results_of_a_former_format_are_named_and_kept(store):
    (store.root / "format").unlink()
    assert Store(store.root).open_for_writing() == "", "there are none"
    (store.root / "format").unlink()
    (store.root / "index" / "k.json").write_text("{}")
    notice = Store(store.root).open_for_writing()
    assert notice == f"{store.root} is of a former version: results without a digest are kept, but not used"
    assert Store(store.root).open_for_writing() == "", "once is enough"
    assert (store.root / "index" / "k.json").exists()


# Locks


TEAM_MATE = """
import os, sys
from pathlib import Path
from ptpipe import Artifact
from ptpipe.store.store import Entry, Store
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.umask(0o022)

class Blob(Artifact):
    def save(self, folder): (folder / "a").write_bytes(b"2")
    @classmethod
    def load(cls, folder): return cls()

store = Store(Path(sys.argv[1]))
store.open_for_writing()
with store.in_use(), store.lock("k"):
    (store.scratch("k") / "checkpoint").write_text("1")
    stored = store.put(Blob())
    store.put_entry(Entry("k", "a.b", {}, {}, {"output": stored}, {}, (), 0, ""))
    store.quarantine(sys.argv[2])
with store.exclusive():
    pass
"""


class Blob(Files):
    pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_team_with_any_umask_shares_a_folder_that_all_may_write_to(store):
    blob = store.put(Blob({"a": b"2"})).digest
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is closed to others
        Path(folder).chmod(0o755)
        root = Path(folder) / "artifacts"
        root.mkdir()
        root.chmod(0o777)
        before = os.umask(0o022)
        try:
            store = Store(root)
            store.open_for_writing()
            with store.in_use(), store.lock("k"):
                (store.scratch("k") / "of mine").write_text("1")
                stored = store.put(Files({"a": b"1"}))
                make_folder(store.root / "objects" / blob[:2])
            (root / "locks" / "in-use").chmod(0o644)  # as former versions created it
        finally:
            os.umask(before)
        script = Path(folder) / "mate.py"
        script.write_text(TEAM_MATE)
        ended = subprocess.run(
            [sys.executable, script, root, stored.digest], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        assert store.has(blob)
        assert not store.has(stored.digest)
        assert {path.stat().st_uid for path in root.glob("locks/*")} == {0}, "the same locks"


def test_a_key_is_held_by_one_at_a_time(store):
    waited, order = [], []
    other = Store(store.root)

    def second():
        with other.lock("k", lambda: waited.append(True)):
            order.append("second")

    with store.lock("k", lambda: pytest.fail("nobody holds it")):
        thread = threading.Thread(target=second)
        thread.start()
        while not waited:
            time.sleep(0.001)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_garbage_is_collected_by_nobody_else(store):
    with (
        store.in_use(),
        store.in_use(),
        pytest.raises(PtpipeError, match="a run is using"),
        Store(store.root).exclusive(),
    ):
        pass
    with Store(store.root).exclusive():
        pass


WRITER = """
import os, sys
from pathlib import Path
from ptpipe import Artifact
from ptpipe.store.store import Entry, Store

class Blob(Artifact):
    def __init__(self, seed): self.seed = seed
    def save(self, folder):
        for number in range(4):
            (folder / str(number)).write_bytes(bytes([self.seed % 256]) * 20_000)
    @classmethod
    def load(cls, folder): return cls(0)

store = Store(Path(sys.argv[1]))
store.open_for_writing()
print("ready", flush=True)
for seed in range(int(sys.argv[2]), 10**6):
    stored = store.put(Blob(seed))
    store.put_entry(Entry(f"{seed:064}", "a.b", {}, {}, {"output": stored}, {}, (), 0, ""))
"""


def test_a_killed_writer_leaves_nothing_half_written(store, tmp_path):
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    chance = random.Random(7)
    for number in range(8):
        process = subprocess.Popen(
            [sys.executable, str(script), str(store.root), str(number * 1000)], stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == b"ready\n"
        enough = len(list(store.root.glob("index/*.json"))) + chance.randrange(1, 5)
        while len(list(store.root.glob("index/*.json"))) < enough:
            assert process.poll() is None, "the writer ended by itself"
        time.sleep(chance.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    fresh = Store(store.root)
    objects = list(store.root.glob("objects/[0-9a-f][0-9a-f]/*"))
    assert objects
    for path in objects:
        fresh.verify(path.name)
    entries = list(store.root.glob("index/*.json"))
    assert entries
    for path in entries:
        assert fresh.entry(path.stem) is not None
