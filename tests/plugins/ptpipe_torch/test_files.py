from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from ptpipe_torch import files
from ptpipe_torch.files import NotAFileError, emptied_on_error, open_beneath, open_regular


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "link").symlink_to("a")
    for name in ("a", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"content"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "gone")


def test_a_file_beneath_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(b"content")
    for location in ("a/b/c", "./a//b/./c"):
        with open_beneath(tmp_path, location) as file:
            assert file.read() == b"content"


@pytest.mark.parametrize("location", ["", ".", "..", "../a", "a/../../a", "a/../a", "/etc/passwd", "//etc/passwd"])
def test_a_path_out_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "a").write_bytes(b"content")
    with pytest.raises(ValueError, match=r"it (leads out of the folder|names no file)"):
        open_beneath(tmp_path, location)


def test_links_and_what_is_no_file_are_refused_beneath_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"content")
    (tmp_path / "folder").symlink_to("a")
    (tmp_path / "file").symlink_to("a/b")
    (tmp_path / "loose").symlink_to("gone")
    for location in ("folder/b", "file", "loose"):
        with pytest.raises(NotAFileError, match="a symbolic link is on its path"):
            open_beneath(tmp_path, location)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAFileError, match="not a regular file"):
        open_beneath(tmp_path, "pipe")
    with pytest.raises(NotADirectoryError):
        open_beneath(tmp_path, "a/b/c")


def test_a_link_that_takes_a_files_place_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"content")
    (tmp_path / "folder").symlink_to("a")
    (tmp_path / "file").symlink_to("a/b")
    monkeypatch.setattr(files, "_check_no_link", lambda name, directory: None)
    for location in ("folder/b", "file"):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            open_beneath(tmp_path, location)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    before = len([*Path("/dev/fd").iterdir()])
    for location in ("a", "a/b", "gone/a", "gone"):
        with contextlib.suppress(OSError), open_beneath(tmp_path, location):
            pass
    assert len([*Path("/dev/fd").iterdir()]) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_folder_is_emptied_on_error_alone(tmp_path: Path, error: type[BaseException]) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    for name in ("folder/inner/a", "other/b"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (folder / "link").symlink_to(other)
    with emptied_on_error(folder):
        (folder / "c").touch()
    assert len(list(folder.iterdir())) == 3
    with pytest.raises(error), emptied_on_error(folder):
        raise error
    assert list(folder.iterdir()) == [] and (other / "b").exists()
