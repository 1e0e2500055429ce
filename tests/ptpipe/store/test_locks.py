"""Advisory locks: exclusive and shared, waited for or refused."""

from __future__ import annotations

import threading
import time

import pytest

from ptpipe.store.locks import LockedError, exclusive_lock, shared_lock


def test_a_lock_is_refused_or_waited_for(tmp_path):
    path, waited, order = tmp_path / "lock", [], []

    def second():
        with exclusive_lock(path, on_wait=lambda: waited.append(True)):
            order.append("second")

    with exclusive_lock(path):
        with pytest.raises(LockedError, match="is locked"), exclusive_lock(path):
            pass
        thread = threading.Thread(target=second)
        thread.start()
        while not waited:
            time.sleep(0.001)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    with exclusive_lock(path, on_wait=lambda: pytest.fail("no process holds it")):
        pass


def test_sharers_keep_an_exclusive_holder_out(tmp_path):
    path = tmp_path / "lock"
    with shared_lock(path), shared_lock(path), pytest.raises(LockedError), exclusive_lock(path):
        pass
    with exclusive_lock(path):
        pass
