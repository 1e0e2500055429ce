"""Holding back signals while everybody is told the end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from importlib import import_module

import pytest

from ptpipe.errors import ExitCode, Terminated
from ptpipe.execution.signals import SignalHandlers, signals_deferred


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    hook = sys.unraisablehook
    handlers = SignalHandlers()
    handlers.install()
    yield handlers
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated), (signal.SIGHUP, Terminated)],
)
def test_a_signal_waits_for_the_end_of_the_block(number, error):
    before = signal.getsignal(number)
    done = []
    with pytest.raises(error), signals_deferred():
        signal.raise_signal(number)
        done.append("the rest of the block")
    assert done
    assert signal.getsignal(number) == before


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
    assert signal.getsignal(signal.SIGINT) == before


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


# While a module is imported


SWALLOWING = """
import signal, time
done = []
try:
    signal.raise_signal({number})
    time.sleep(0.1)
    done.append("the rest of the import")
except BaseException as error:
    raise ImportError("initialization failed") from error
"""


@pytest.mark.parametrize(
    ("number", "error", "code"),
    [
        (signal.SIGINT, KeyboardInterrupt, ExitCode.INTERRUPTED),
        (signal.SIGTERM, Terminated, ExitCode.TERMINATED),
        (signal.SIGHUP, Terminated, ExitCode.HUNG_UP),
    ],
)
def test_a_signal_waits_for_the_end_of_an_import(handlers, tmp_path, monkeypatch, number, error, code):
    name = f"importing_{number:d}"
    (tmp_path / f"{name}.py").write_text(SWALLOWING.format(number=int(number)))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert handlers.exit_code is None
    with pytest.raises(error) as raised:
        import_and_wait(name)
    assert getattr(raised.value, "exit_code", ExitCode.INTERRUPTED) is code
    assert sys.modules.pop(name).done
    assert handlers.exit_code is code


def import_and_wait(name):
    import_module(name)
    time.sleep(5)


def test_two_signals_in_one_import_are_one(handlers, tmp_path, monkeypatch):
    (tmp_path / "importing_twice.py").write_text(
        "import signal\nfor _ in range(2):\n    signal.raise_signal(signal.SIGINT)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        import_and_wait("importing_twice")
    time.sleep(0.2)


def test_an_import_that_does_not_end_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr("ptpipe.execution.signals._LONGEST_IMPORT_S", 0.1)
    (tmp_path / "importing_for_ever.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(30)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Terminated):
        import_module("importing_for_ever")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_from_the_start_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    SignalHandlers().install()
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated), (signal.SIGHUP, Terminated)],
)
def test_a_signal_whose_exception_is_discarded_is_sent_again(capsys, number, error):
    class Dying:
        def __del__(self):
            signal.raise_signal(number)

    with pytest.raises(error) as raised:
        discard_and_wait([Dying()])
    assert getattr(raised.value, "exit_code", ExitCode.INTERRUPTED) == 128 + number
    assert capsys.readouterr().err == ""


def discard_and_wait(holder):
    holder.clear()
    time.sleep(5)


def test_other_errors_that_python_discards_are_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    SignalHandlers().install()

    class Dying:
        def __del__(self):
            raise ValueError("in __del__")

    Dying()
    assert [str(each.exc_value) for each in reported] == ["in __del__"]
