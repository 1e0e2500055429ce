"""Fixtures for all rooms: the command line as a user calls it, and a plugin without torch to run."""

from __future__ import annotations

import compileall
import gc
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from ptpipe import RunResult, load_plan, run

from .forks import fork_server as fork_server_running
from .ptpipe.forked_commands import CommandFork

# A busy machine is no bug: how long one example may take is not limited, how long a test may take is.
settings.register_profile("ptpipe", deadline=None)
settings.load_profile("ptpipe")

ROOT = Path(__file__).parents[1]
MEMORY, ENOUGH_BYTES = Path("/dev/shm"), 8 * 2**30


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process, and the environment of those that the tests start."""
    gc.disable()  # what is imported and collected stays: traversing it over and over would be a waste
    if not hasattr(config, "workerinput"):  # of pytest-xdist
        # Once: where bytecode isn't written, each of hundreds of processes would compile the project again.
        for folder in ("pipeline", "plugins"):
            compileall.compile_dir(ROOT / folder, quiet=2)
    # Figures and comparisons are of the CPU, also where there are CUDA devices: `make test-gpu` has the tests of those.
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    root = str(MEMORY) if _has_room(MEMORY) else tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", root)
    if not hasattr(config, "workerinput"):
        _use_temporary_files_in(root)
    # Where the tests run in GitHub Actions, its annotations and summary are left to them.
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        os.environ.pop(name, None)
    # Ctrl-C is heard, in the processes that the tests start too: a shell's background jobs inherit that it is ignored.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under `nohup`
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _use_temporary_files_in(root: str) -> None:
    """Let temporary files be in a folder that is deleted at the end: processes that tests kill leave theirs."""
    folder = tempfile.mkdtemp(prefix="ptpipe-tests-", dir=root)
    Path(folder).chmod(0o1777)  # as /tmp: tests act as other users
    after_multiprocessings_own = -101
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=after_multiprocessings_own)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None


def _has_room(folder: Path) -> bool:
    """Return whether tests can write there, and start programs: on a disk they wait half of the time for fsync."""
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return False
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize >= ENOUGH_BYTES and not status.f_flag & os.ST_NOEXEC


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip further combinations of long tests, unless they are asked for, and what needs torch where it is missing.

    Tests that the file $PTPIPE_PASSED_IN lists are left out: in CI, those of the core that passed without torch.
    """
    if path := os.environ.get("PTPIPE_PASSED_IN"):
        passed = set(Path(path).read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    reasons = {}
    if os.environ.get("PTPIPE_THOROUGH", "0") == "0":
        reasons["thorough"] = "one more combination: PTPIPE_THOROUGH=1 runs it"
        for item in _left_out(items):
            item.add_marker("thorough")
    if importlib.util.find_spec("torch") is None:
        reasons["plugins"] = "torch is not installed"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """List what passes in the file $PTPIPE_PASSED_TO; of pytest-xdist's processes, the one that knows of all tests."""
    path = os.environ.get("PTPIPE_PASSED_TO")
    if path and report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt what is there, millions of objects, from garbage collection.

    All of what tests import and keep later is traversed once in a million new objects: a twelfth of the time otherwise.
    """
    gc.freeze()
    gc.set_threshold(1000, 10, 100)
    gc.enable()


def _left_out(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the combinations of `sampled` tests that are not among every n-th one."""
    counts: Counter[str] = Counter()
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            every, first = (*marker.args, 0)[:2]
            test = item.nodeid.partition("[")[0]
            if counts[test] % every != first:
                yield item
            counts[test] += 1


TOY = Path(__file__).parent / "ptpipe" / "toy.py"


@dataclass(frozen=True)
class Ended:
    """A finished process."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, read strictly."""
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what would change ptpipe's ways, or write bytecode beside tests' files."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PTPIPE_ARTIFACTS", "FORCE_COLOR"}}
    fixed = {"PYTHONWARNINGS": "default", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    return {**kept, **fixed, **changes}


SINGLE_WORKER = "import ptpipe.plan.vocabulary as p; p.BUILT_IN = (); from ptpipe.cli import main; main()"


def command(*arguments: object, python: Sequence[str] = (), alone: bool = False) -> list[str]:
    """The command line of `ptpipe`, in this interpreter; `alone` leaves the built-in plugins out, to be quick."""
    start = ["-c", SINGLE_WORKER] if alone else ["-m", "ptpipe"]
    return [sys.executable, *python, *start, *map(str, arguments)]


@dataclass(frozen=True)
class CommandLine:
    """`run_cli("plan", "m.yaml")`: the process's exit code, stdout and stderr."""

    folder: Path
    fork: CommandFork | None = None
    """Where commands that run to their end are forked."""

    def __call__(
        self,
        *arguments: object,
        python: Sequence[str] = (),
        alone: bool = False,
        timeout_s: float = 120,
        real: bool = False,
        **changes: str,
    ) -> Ended:
        """Run to the end; `real`: in an interpreter of its own in any case."""
        if self.fork and not real and not python and self.fork.can_run(variables := environment(**changes)):
            words = command(*arguments, alone=alone)
            code, out, err = self.fork.run(words, self.folder, variables, timeout_s)
            return Ended(code, out.decode(), err.decode())
        with self.start(*arguments, python=python, alone=alone, **changes) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return Ended(process.returncode, out.decode(), err.decode())

    def start(
        self,
        *arguments: object,
        python: Sequence[str] = (),
        alone: bool = False,
        stdout: int = subprocess.PIPE,
        **changes: str,
    ) -> subprocess.Popen[bytes]:
        """Start only."""
        return subprocess.Popen(
            command(*arguments, python=python, alone=alone),
            cwd=self.folder,
            env=environment(**changes),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )


@pytest.fixture
def run_cli(tmp_path: Path) -> CommandLine:
    """The command line, run in `tmp_path`."""
    return CommandLine(tmp_path)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    """The process of `forks.py`, for all modules: it takes seconds to start."""
    with fork_server_running():
        yield


@pytest.fixture
def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


class Project:
    """A folder with a copy of the toy plugin and a manifest `m.yaml` that names it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.artifacts = folder / "artifacts"
        self.manifest = folder / "m.yaml"
        self.plugin = folder / "toy.py"
        shutil.copy(TOY, self.plugin)

    def write(self, stages: str, head: str = "name: toy\nplugins: [./toy.py]") -> Path:
        """Write the manifest: `write("one: {uses: toy.make}")`."""
        body = textwrap.indent(textwrap.dedent(stages).strip(), "  ")
        self.manifest.write_text(f"version: 1\n{head}\nstages:\n{body}\n", encoding="utf-8")
        return self.manifest

    def plan(self, overrides: Mapping[str, Any] | None = None):
        """The bound plan."""
        return load_plan(self.manifest, overrides)

    def run(self, overrides: Mapping[str, Any] | None = None, **keywords: Any) -> RunResult:
        """Run it in this process."""
        return run(self.manifest, overrides, artifacts=self.artifacts, **keywords)

    @staticmethod
    def outcomes(result: RunResult) -> dict[str, str]:
        """Stage id to outcome."""
        return {stage_id: str(event.outcome) for stage_id, event in result.stages.items()}

    def edit(self, old: str, new: str) -> None:
        """Change the plugin's source."""
        source = self.plugin.read_text(encoding="utf-8")
        assert old in source
        self.plugin.write_text(source.replace(old, new), encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A folder of one's own to run the toy plugin in."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # plugins beside a manifest put their folder on it
    monkeypatch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ())  # in this process the core is alone
    return Project(tmp_path)


@pytest.fixture
def modules_forgotten(tmp_path: Path) -> Iterator[None]:
    """Forget, at the end, what was imported from the test's folder: the next test may have modules of these names."""
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{tmp_path}/"):
            del sys.modules[name]
