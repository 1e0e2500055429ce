"""Files are replaced whole, and JSON is JSON."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import IntegrityError
from ptpipe.store.files import (
    atomic_path,
    errors_naming,
    make_folder,
    read_plain_file,
    strict_json,
    write_atomically,
)

ANY_TEXT = st.text(st.characters())  # surrogates too


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_may_be_read_by_whoever_the_umask_lets(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_the_old_content_survives_a_failure(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, b"one")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path], "and nothing is left lying about"


def test_a_failure_after_the_replacement_says_that_the_file_is_written(tmp_path, monkeypatch):
    sync = os.fsync

    def fails_for_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_for_folders)
    with pytest.raises(OSError, match=r"written, but a power cut may still undo it: Input/output error: '.*/a'"):
        write_atomically(tmp_path / "a", b"one")
    assert (tmp_path / "a").read_bytes() == b"one"


def test_only_plain_files_are_read(tmp_path):
    (tmp_path / "plain").write_bytes(b"1")
    assert read_plain_file(tmp_path / "plain") == b"1"
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    for name in ("link", "loop", "folder", "pipe"):
        with pytest.raises(IntegrityError, match=f"/{name} was altered: it is not a plain file"):
            read_plain_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_plain_file(tmp_path / "none")


@pytest.mark.parametrize(("above", "mode"), [(0o755, 0o755), (0o775, 0o775), (0o777, 0o777)])
def test_a_folder_is_as_open_to_writers_as_the_one_above(tmp_path, above, mode):
    tmp_path.chmod(above)
    before = os.umask(0o022)
    try:
        make_folder(tmp_path / "folder")
        make_folder(tmp_path / "folder")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == mode


def test_what_json_has_not_becomes_words():
    text = strict_json({"a": float("nan"), "b": [float("inf"), -float("inf"), 1.5], "c": ("x", None)})
    read = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert read == {"a": "NaN", "b": ["Infinity", "-Infinity", 1.5], "c": ["x", None]}


def test_an_undecodable_file_name_is_kept():
    assert json.loads(strict_json({"\udcff": [Path("\udcff"), float("nan")]})) == {"\udcff": ["\udcff", "NaN"]}


@given(
    st.recursive(st.none() | st.floats() | ANY_TEXT, lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner))
)
def test_json_is_always_strict(value):
    json.loads(strict_json(value), parse_constant=lambda word: pytest.fail(word))


def test_an_error_without_a_file_gets_the_name(tmp_path):
    """As those of write(2), fsync(2) and close(2) are."""
    path = tmp_path / "a.json"
    for error in (OSError(errno.EIO, "Input/output error"), OSError(errno.EIO, "Input/output error", str(path))):
        with (
            pytest.raises(OSError, match=re.escape(f"Input/output error: '{path}'")),
            errors_naming(tmp_path / "a.json"),
        ):
            raise error
    with pytest.raises(OSError, match=r"^no number$"), errors_naming(path):
        raise OSError("no number")
    with pytest.raises(OSError, match=re.escape(str(path))), atomic_path(path):
        raise OSError(errno.ENOSPC, "No space left on device")
