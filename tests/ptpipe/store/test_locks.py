"""Advisory locks: exclusive and shared, waited for or refused."""

from __future__ import annotations

import errno
import fcntl
import threading
import time

import pytest

from ptpipe import PtpipeError
from ptpipe.store.locks import LockedError, exclusive_lock, shared_lock


@pytest.mark.parametrize("lock", [exclusive_lock, shared_lock])
def test_a_lock_is_refused_or_waited_for(tmp_path, lock):
    path, waited, order = tmp_path / "lock", [], []

    def second():
        with lock(path, on_wait=lambda: waited.append(True)):
            order.append("second")

    with exclusive_lock(path):
        with pytest.raises(LockedError, match="is locked"), lock(path):
            pass
        thread = threading.Thread(target=second)
        thread.start()
        while not waited:
            time.sleep(0.001)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    with lock(path, on_wait=lambda: pytest.fail("no process holds it")):
        pass


def test_sharers_keep_an_exclusive_holder_out(tmp_path):
    path = tmp_path / "lock"
    with shared_lock(path), shared_lock(path), pytest.raises(LockedError), exclusive_lock(path):
        pass
    with exclusive_lock(path):
        pass


@pytest.mark.parametrize("lock", [exclusive_lock, shared_lock])
@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOLCK, "must be on a file system that supports file locks"), (errno.EIO, "")]
)
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, lock, number, advice):
    def flock(descriptor, operation):
        raise OSError(number, "no such luck")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(PtpipeError, match=f"cannot lock {tmp_path}/lock: no such luck.*{advice}"),
        lock(tmp_path / "lock"),
    ):
        pass


def test_what_is_in_the_place_of_a_lock_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("folder", "link", "none/lock"):
        with pytest.raises(PtpipeError, match=f"cannot lock {tmp_path}/{name}: "), exclusive_lock(tmp_path / name):
            pass
    assert not (tmp_path / "elsewhere").exists(), "links are not followed"
