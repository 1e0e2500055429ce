"""A run on a real pseudo-terminal, read back through a small model of one."""

from __future__ import annotations

import codecs
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from ptpipe_report.progress_bar import _fork_lock

pty = pytest.importorskip("pty", reason="needs a Unix terminal")
fcntl = pytest.importorskip("fcntl")
termios = pytest.importorskip("termios")

ROWS, COLUMNS = 40, 100
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"

PLUGIN = '''
"""A stage that takes its time."""

import sys
import time

from pydantic import Field

from ptpipe import Context, StageConfig, Verdict, hookimpl, stage
from ptpipe.artifact import Decision


class SlowConfig(StageConfig):
    num_steps: int = Field(4, description="steps of a quarter of a second")


@stage("test.slow")
def slow(config: SlowConfig, ctx: Context) -> Verdict:
    """Work slowly."""
    print("a library warns", file=sys.stderr)
    for step in range(config.num_steps):
        ctx.progress(step + 1, config.num_steps, "step", loss=0.5)
        time.sleep(0.25)
    ctx.notice("it took its time")
    return Verdict(Decision.PASSED, "slow enough")


@hookimpl
def ptpipe_stages():
    return [slow]
'''
MANIFEST = """
version: 1
name: slow-run
plugins: [./slow.py]
stages:
  first: {{uses: test.slow, with: {{num_steps: {num_steps}}}}}
  second: {{uses: test.slow, with: {{num_steps: 1}}}}
"""


class Terminal:
    """As much of a terminal as the console uses: text, line feeds, cursor up, erasing a line, links."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        for piece in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\|[\r\n]|[^\x1b\r\n]+", text):
            if piece.startswith("\x1b]8;"):
                continue  # where a link begins or ends
            if piece == "\r":
                self.column = 0
            elif piece == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif piece.startswith("\x1b["):
                self._obey(piece[2:-1], piece[-1])
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + piece + line[self.column + len(piece) :]
                self.column += len(piece)

    def _obey(self, parameter: str, command: str) -> None:
        if command == "A":
            self.row -= int(parameter or 1)
            assert self.row >= 0
        elif command == "K":
            assert parameter == "2"
            self.lines[self.row] = ""
        else:
            assert command in "mhl", f"the console sent {parameter}{command}"

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines]


class Session:
    """A `ptpipe run` on a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], leader: int) -> None:
        self.process, self._leader = process, leader
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def read_until(self, awaited: str, timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while awaited not in self.text:
            assert time.monotonic() < end, f"{awaited!r} did not appear in {self.text!r}"
            assert self._read(), f"ended without {awaited!r}: {self.text!r}"

    def read_all(self) -> int:
        while self._read():
            pass
        return self.process.wait(timeout=60)

    def _read(self) -> bool:
        try:
            content = os.read(self._leader, 65536)
        except OSError:  # raised on Linux when the other side is closed
            return False
        self.text += self._decoder.decode(content)
        return bool(content)

    @property
    def screen(self) -> list[str]:
        terminal = Terminal()
        terminal.feed(self.text)
        return terminal.shown


def write_manifest(folder: Path, num_steps: int) -> None:
    (folder / "slow.py").write_text(PLUGIN)
    (folder / "run.yaml").write_text(MANIFEST.format(num_steps=num_steps))


@contextmanager
def running(folder: Path, num_steps: int = 4, **environ: str) -> Iterator[Session]:
    write_manifest(folder, num_steps)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    inherited = {
        name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "ptpipe", "run", "run.yaml"],
        cwd=folder,
        env=inherited | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | environ,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    try:
        yield Session(process, leader)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=60)
        os.close(leader)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Session]:
    """The screen while a run's first stage is running, and the session after its end."""
    with running(tmp_path_factory.mktemp("watched")) as session:
        session.read_until(" %")  # which share is seen first depends on how busy the machine is
        running_screen = session.screen
        assert session.read_all() == 0
    return running_screen, session


def test_the_running_stage_is_replaced_by_a_line(watched) -> None:
    running_screen, session = watched
    assert re.match(r"[⠋-⠿] 1/2 first   test.slow +0:\d\d  ━+[╸╺]?━* +(25|50|75|100) %", running_screen[-2])
    assert re.fullmatch(r"  step [1-4]/4 · loss 0.500", running_screen[-1])
    screen = session.screen
    assert screen[0] == "slow-run  run.yaml · 2 stages · seed 0"
    assert screen[2] == "a library warns"
    assert screen[3] == "▲ first: it took its time"
    assert re.fullmatch(r"✓ 1/2 first   test.slow          done +\d+\.\d s   slow enough", screen[4])
    assert not [line for line in screen if "━" in line or "step" in line], "nothing is left of the bar"
    assert screen[-3].startswith("  run folder:    ") and screen[-1] == ""
    assert re.fullmatch(r"  report:        artifacts/runs/[\w-]+/report.html", screen[-2])
    (link,) = re.findall(r"\x1b\]8;[^;]*;(file:///[^\x1b]+)\x1b", session.text)
    assert Path(unquote(urlsplit(link).path)).is_file(), "a click opens it"


def test_the_cursor_is_hidden_while_it_runs_and_given_back(watched) -> None:
    _, session = watched
    assert session.text.count(HIDE) == 1
    assert session.text.rindex(SHOW) > session.text.rindex(HIDE)


@pytest.mark.parametrize(
    ("signal_", "exit_code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
def test_a_signal_leaves_the_terminal_clean(tmp_path, signal_, exit_code, word) -> None:
    with running(tmp_path, num_steps=100) as session:
        session.read_until("%")
        os.killpg(session.process.pid, getattr(signal, signal_))
        assert session.read_all() == exit_code
    assert session.text.rindex(SHOW) > session.text.rindex(HIDE)
    screen = session.screen
    assert not [line for line in screen if "━" in line]
    assert [line for line in screen if line.startswith(f"✗ slow-run {word} after")]
    assert "  resume with:   ptpipe run run.yaml" in screen
    assert "Traceback" not in session.text


def test_no_color_and_a_dumb_terminal_are_honoured(tmp_path) -> None:
    with running(tmp_path, num_steps=1, NO_COLOR="1") as session:
        assert session.read_all() == 0
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3\d|9\d)", session.text)
    with running(tmp_path, num_steps=2, TERM="dumb") as session:
        assert session.read_all() == 0
    assert "\x1b" not in session.text


def test_no_process_is_forked_while_the_terminal_is_written_to() -> None:
    """A child born in that moment would have the terminal's locks taken for ever."""
    pen = _fork_lock()
    is_held, elapsed_s = threading.Event(), time.monotonic()

    def draw() -> None:
        with pen:
            is_held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=draw)
    thread.start()
    assert is_held.wait(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: forking beside threads
        child = os.fork()
    if child == 0:
        os._exit(0 if pen.acquire(blocking=False) else 1)
    elapsed_s = time.monotonic() - elapsed_s
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert elapsed_s >= 0.25
    assert pen.acquire(blocking=False)
    pen.release()


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path) -> None:
    write_manifest(tmp_path, num_steps=2)
    silent = PLUGIN.replace('print("a library warns", file=sys.stderr)', "")  # its own print would fail, and rightly
    (tmp_path / "slow.py").write_text(silent)
    with subprocess.Popen(
        [sys.executable, "-m", "ptpipe", "run", "run.yaml"], cwd=tmp_path, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.stderr.close()
        assert process.wait(timeout=60) == 0
    (events,) = tmp_path.glob("artifacts/runs/*/events.jsonl")
    last = json.loads(events.read_bytes().splitlines()[-1])
    assert (last["type"], last["exit_code"]) == ("run_finished", 0)
