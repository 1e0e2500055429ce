import json
import os
import subprocess
import sys

import pytest

from ..conftest import environment
from .forked_commands import CommandFork

STATE = """
import json, os, signal, sys, threading, warnings

signals = {each.name: str(signal.getsignal(each)) for each in signal.valid_signals() - {0} if hasattr(each, "name")}
print(json.dumps({
    "name": __name__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "arguments": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "flags": str(sys.flags),
    "warnings": str(warnings.filters),
    "signals": {name: handler.partition(" at ")[0] for name, handler in signals.items()},
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [[file.encoding, file.errors, file.seekable(), file.isatty(), file.line_buffering]
        for file in (sys.stdin, sys.stdout, sys.stderr)],
    "files": len(os.listdir("/dev/fd")),
    "threads": threading.active_count(),
    "group": os.getpgrp(),
    "umask": os.umask(0),
}))
"""
ENDINGS = {
    "end": "print('out')",
    "exit": "raise SystemExit",
    "number": "import sys; sys.exit(3)",
    "text": "import sys; print('out'); sys.exit('why')",
    "os._exit": "import os; os._exit(7)",
    "error": "1 / 0",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "at exit": "import atexit; atexit.register(print, 'last')",
    "child": "import subprocess, sys; sys.exit(subprocess.call(['sh', '-c', 'echo $0; exit 4']))",
    "much": "import sys; sys.stdout.write('x' * 300_000); sys.stderr.write('y' * 300_000)",
}


@pytest.fixture
def both(command_fork, tmp_path):
    """Run Python's code forked and started: exit code, stdout and stderr of each."""

    def run(code, *arguments, **changes):
        command, variables = [sys.executable, "-c", code, *arguments], environment(**changes)
        assert command_fork.can_run(variables)
        done = subprocess.run(command, cwd=tmp_path, env=variables, stdin=subprocess.DEVNULL, capture_output=True)
        return command_fork.run(command, tmp_path, variables, 60), (done.returncode, done.stdout, done.stderr)

    return run


def test_a_forked_command_finds_what_one_that_is_started_finds(both):
    forked, started = both(STATE, "an argument", "ö\udc80", VALUE="\udc80")
    assert (forked[0], forked[2]) == (started[0], started[2]) == (0, b"")
    assert json.loads(forked[1]) == json.loads(started[1])


@pytest.mark.parametrize("name", ENDINGS)
def test_it_ends_the_same_way(both, name):
    forked, started = both(ENDINGS[name])
    assert forked[:2] == started[:2]
    if name in {"error", "interrupted"}:  # the traceback has more frames
        assert forked[2].splitlines()[::len(forked[2].splitlines()) - 1] == [
            b"Traceback (most recent call last):", started[2].splitlines()[-1]
        ]  # fmt: skip
    else:
        assert forked[2] == started[2]


def test_a_module_is_found_as_by_the_interpreter(command_fork, tmp_path):
    (tmp_path / "shown.py").write_text("import sys; print(__name__, __spec__.name, __file__, sys.argv, sys.path)")
    command = [sys.executable, "-m", "shown", "argument"]
    started = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, check=True)
    assert command_fork.run(command, tmp_path, environment(), 60) == (0, started.stdout, b"")


def test_nothing_of_a_command_stays_and_no_plugin_is_imported_before(command_fork, tmp_path):
    code = (
        "import os, sys, ptpipe.cli; print(os.environ.get('LEFT'), hasattr(ptpipe.cli, 'left')); "
        "print([name for name in sys.modules if name in ('torch', 'numpy', 'pytest') or name.startswith('ptpipe_')]); "
        "os.environ['LEFT'] = ptpipe.cli.left = 'here'; os.chdir('/'); sys.path.clear()"
    )
    for _ in range(2):
        ended = command_fork.run([sys.executable, "-c", code], tmp_path, environment(), 60)
        assert ended == (0, b"None False\n[]\n", b"")


def test_a_command_that_takes_too_long_is_killed(command_fork, tmp_path):
    code = (
        "import os, time; open('part', 'w').write(str(os.getpid())); os.rename('part', 'pid'); "  # whole, or not there
        "os.close(1); os.close(2); time.sleep(100)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        command_fork.run([sys.executable, "-c", code], tmp_path, environment(), 0.5)
    path = tmp_path / "pid"
    if path.exists():  # it had begun
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


@pytest.mark.parametrize("name", ["PYTHONPATH", "PYTHONIOENCODING", "LANG", "LC_ALL", "TZ"])
def test_what_the_interpreter_reads_at_its_start_needs_a_real_one(command_fork, name):
    assert command_fork.can_run(environment(OTHER="1"))
    assert not command_fork.can_run(environment(**{name: "unheard-of"}))


def test_why_nothing_is_forked_is_told(tmp_path):
    fork = CommandFork(environment(PYTHONHASHSEED="none"))
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="PYTHONHASHSEED must be"):
                fork.run([sys.executable, "-c", ""], tmp_path, environment(), 60)
    finally:
        fork.end()
