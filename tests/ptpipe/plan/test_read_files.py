"""Files that a stage read: which a result depends on, and which have changed since."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ptpipe import ReadLog
from ptpipe.plan import read_files
from ptpipe.plan.read_files import changed_files, kept_files, listed_digests

ARTIFACTS = Path("/nowhere/artifacts")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def read(*names: str):
    with ReadLog() as log:
        for name in names:
            if not Path(name).exists():
                shutil.copyfile(os.devnull, name)
                Path(name).write_text(name)
            log.add(name)
    return {**log._read}


def test_paths_are_relative_in_the_working_directory(folder: Path) -> None:
    kept, notices = kept_files(read("a", "../b"), ARTIFACTS)
    assert (list(kept), notices) == (["a", str(folder.parent / "b")], [])
    assert changed_files(kept) == ()


def test_what_is_left_out(folder: Path) -> None:
    Path("artifacts").mkdir()
    found = read("artifacts/a", "temporary", os.__file__.replace("os.py", "LICENSE.txt"), "/etc/passwd")
    Path("temporary").unlink()
    assert list(kept_files(found, folder / "artifacts")[0]) == []


def test_private_folders_are_in_no_record(folder: Path) -> None:
    kept, _ = kept_files(read("a", "../a", "../b"), ARTIFACTS)
    assert list(listed_digests(kept)) == ["a", "a (2)", "b"]


def test_changes() -> None:
    kept, _ = kept_files(read("same", "touched", "longer", "other", "gone"), ARTIFACTS)
    os.utime("touched", (1, 1))
    Path("longer").write_text("longer than it was")
    before = Path("other").stat()
    Path("other").write_text("rehto")
    os.utime("other", ns=(before.st_atime_ns, before.st_mtime_ns))
    Path("gone").unlink()
    assert changed_files(kept) == (
        "a file it read changed: longer",
        "a file it read changed: other",
        "a file it read is missing: gone",
    )


def test_a_file_that_changes_while_the_stage_runs() -> None:
    found = read("a")
    Path("a").write_text("more than a")
    kept, notices = kept_files(found, ARTIFACTS)
    assert notices == ["a changed while the stage ran: the next run reruns the stage"]
    assert changed_files(kept) == ("a file it read changed: a",)


def test_large_files_count_by_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_files, "_MAX_DIGESTED_BYTES", 3)
    kept, _ = kept_files(read("abcd", "abc"), ARTIFACTS)
    assert changed_files(kept) == ()
    for name in kept:
        os.utime(name, (1, 1))
    assert changed_files(kept) == ("a file it read changed: abcd",)
    assert listed_digests(kept)["abcd"].startswith("4 bytes, modified at ")


def test_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_files, "_MAX_FILES", 8)
    monkeypatch.setattr(read_files, "_MAX_LISTED", 7)
    kept, notices = kept_files(read(*"abcdefghi"), ARTIFACTS)
    assert notices == ["it read 9 files: only a change of the first 8 of them reruns it"]
    (name,) = before = listed_digests(kept)
    assert name == "8 files"
    for path in kept:
        Path(path).write_text("x")
    assert changed_files(kept)[4:] == ("a file it read changed: e", "and 3 more of the files it read changed")
    assert listed_digests(kept_files(read(*kept), ARTIFACTS)[0]) != before
