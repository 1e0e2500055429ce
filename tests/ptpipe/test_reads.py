"""The log of files that Python opens for reading."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ptpipe import ReadLog
from ptpipe.reads import ReadFile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.bin").write_bytes(b"12345")
    return tmp_path


@pytest.mark.parametrize(
    "read",
    [
        lambda path: open(path).read(),  # noqa: SIM115, PTH123
        lambda path: Path(path).read_bytes(),
        lambda path: os.close(os.open(os.fsencode(path), os.O_RDONLY)),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_python_opens_is_heard_once(folder: Path, read) -> None:
    with ReadLog() as log:
        read("a.bin")
        os.chdir("/")
        read(str(folder / "a.bin"))
    assert {path: file.size_bytes for path, file in log.files.items()} == {str(folder / "a.bin"): 5}


def test_only_inside_the_with(folder: Path) -> None:
    with ReadLog() as log:
        pass
    Path("a.bin").read_bytes()
    assert log.files == {}


def test_logs_inside_each_other(folder: Path) -> None:
    Path("b.bin").write_bytes(b"")
    with ReadLog() as outer:
        with ReadLog() as inner:
            Path("a.bin").read_bytes()
        Path("b.bin").read_bytes()
    assert list(inner.files) == [str(folder / "a.bin")]
    assert list(outer.files) == [str(folder / "a.bin"), str(folder / "b.bin")]


def test_what_is_written_to_is_no_input(folder: Path) -> None:
    with ReadLog() as log:
        Path("new.txt").write_text("1")
        Path("new.txt").read_text()
        Path("a.bin").read_bytes()
        with Path("a.bin").open("r+b") as file:
            file.write(b"0")
    assert log.files == {}


def test_what_is_no_file_to_read(folder: Path) -> None:
    Path("module.py").write_text("")
    with ReadLog() as log:
        Path("module.py").read_text()
        with pytest.raises(FileNotFoundError):
            Path("missing").read_text()
        with pytest.raises(IsADirectoryError):
            Path().read_text()
        with pytest.raises(ValueError, match="null"):
            Path("a\0b").read_text()
        with open(os.open("/dev/null", os.O_RDONLY)):  # noqa: PTH123
            pass
    assert log.files == {}


def test_a_file_that_python_does_not_open_is_added(folder: Path) -> None:
    log = ReadLog()
    log.add("a.bin")
    assert log.files == {str(folder / "a.bin"): ReadFile.of("a.bin")}


def test_what_was_read_once_is_repeated_until_it_changes(folder: Path) -> None:
    with ReadLog() as log:
        Path("a.bin").read_bytes()
    with ReadLog() as other:
        log.repeat()
    assert (other.files, log.is_current) == (log.files, True)
    Path("a.bin").write_bytes(b"54321")
    assert not log.is_current
    Path("a.bin").unlink()
    assert log.is_current, "a temporary file"
