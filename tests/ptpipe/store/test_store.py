"""Artifacts by content: round trips, altered bytes, concurrent writers, and a writer that is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptpipe import Artifact, IntegrityError, PtpipeError
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


ALTERATIONS = {
    "changed": lambda files: (files / "a").write_bytes(b"2"),
    "longer": lambda files: (files / "a").write_bytes(b"11"),
    "emptied": lambda files: (files / "a").write_bytes(b""),
    "gone": lambda files: (files / "a").unlink(),
    "renamed": lambda files: (files / "a").rename(files / "c"),
    "added": lambda files: (files / "c").write_bytes(b""),
    "linked": lambda files: ((files / "a").unlink(), (files / "a").symlink_to(files / "b")),
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
    with pytest.raises(IntegrityError, match=f"object {stored.digest[:12]}"):
        fresh.get(stored.digest, Files)
    place = fresh.quarantine(stored.digest)
    assert place.is_dir()
    assert not fresh.has(stored.digest)
    assert fresh.put(Files({"a": b"1", "b": b"1"})).digest == stored.digest
    assert Store(store.root).get(stored.digest, Files) == Files({"a": b"1", "b": b"1"})


def test_storing_what_is_there_in_altered_form_mends_it(store):
    stored = store.put(Files({"a": b"1"}))
    (folder_of(store, stored) / "files" / "a").write_bytes(b"2")
    fresh = Store(store.root)
    fresh.put(Files({"a": b"1"}))
    assert Store(store.root).get(stored.digest, Files) == Files({"a": b"1"})
    assert len(list(store.root.glob("quarantine/*"))) == 1
    assert not left_over(store)


def test_an_object_that_is_not_there(store):
    with pytest.raises(IntegrityError, match="cannot be read"):
        store.get("0" * 64, Files)


def entry_of(store, key="k" * 64):
    stored = store.put(Files({"a": b"1"}))
    return Entry(
        key, "a.b", {"x": 1}, {"port": ("d1", "d2")}, {"output": stored}, {"m": float("inf")}, ("n",), 1.5, "2026"
    )


def test_entries_come_back(store):
    entry = entry_of(store)
    store.put_entry(entry)
    assert store.entry(entry.key) == entry
    assert store.entry("0" * 64) is None


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
    assert "\n" not in str(raised.value)


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
