"""Holding back signals while everybody is told the end."""

from __future__ import annotations

import signal
import threading

import pytest

from ptpipe.errors import Terminated
from ptpipe.execution.signals import signals_deferred, terminate


@pytest.fixture(autouse=True)
def _handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, terminate)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_waits_for_the_end_of_the_block(number, error):
    done = []
    with pytest.raises(error), signals_deferred():
        signal.raise_signal(number)
        done.append("the rest of the block")
    assert done
    assert signal.getsignal(signal.SIGTERM) is terminate


def test_a_second_signal_is_heard_at_once():
    done = []
    with pytest.raises(Terminated), signals_deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        done.append("too late")
    assert not done


def test_without_a_signal_nothing_happens():
    before = signal.getsignal(signal.SIGINT)
    with signals_deferred():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals_deferred():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_have_no_signals_to_hold():
    done = []

    def work():
        with signals_deferred():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
