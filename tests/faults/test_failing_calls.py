"""Every system call below the artifacts folder fails in turn, or the process is killed before or after it.

After each: a documented exit code and a clear line, the very results and verdict of an undisturbed run from the next
one, sound bytes left alone, nothing half-written counted as a result, and leftovers that `gc` collects.
"""

from __future__ import annotations

import errno
import itertools
import os
import platform
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from .workplace import HERE, Ended, Workplace, differences, workplace

THOROUGH = os.environ.get("PTPIPE_THOROUGH", "0") != "0"
NUM_CASES = 8
"""Of each command, where not all are tried."""
READING = {"open", "read", "stat", "opendir"}
ERRORS = ("ENOSPC", "EIO", "EACCES", "EDQUOT", "ESTALE", "ENOLCK")
READING_ERRORS = ("EIO", "EACCES", "ESTALE")
RUN = ("run", "m.yaml", "--json")
COMMANDS = {
    "new run": ("empty", RUN),
    "cached run": ("finished", RUN),
    "resumed run": ("resumed", RUN),
    "rebuilding run": ("altered", RUN),
    "gc": ("old", ("gc", "--keep-runs", "1")),
    "show": ("old", ("show", "last")),
    "runs": ("old", ("runs",)),
    "plan": ("old", ("plan", "m.yaml")),
    "get": ("old", ("get", "last", "export", "got", "--force")),
}
if find_spec("ptpipe.cli.verify"):
    COMMANDS["verify"] = ("old", ("verify",))


@dataclass(frozen=True)
class Case:
    """A command, the call that is disturbed, and how."""

    command: str
    number: int
    call: str
    mode: str
    error: str = ""
    for_good: tuple[str, ...] = ()
    """Names of the calls that fail from then on."""


@dataclass(frozen=True)
class Failed:
    """A case after which something did not hold."""

    case: Case
    path: str
    problem: str


def cases_of(command: str, trace: tuple[str, ...]) -> Iterator[Case]:
    """Every case of a command that made these calls."""
    everything = tuple(sorted({line.partition(" ")[0] for line in trace}))
    for number, line in enumerate(trace):
        call = line.partition(" ")[0]
        for error in READING_ERRORS if call in READING else ERRORS:
            yield Case(command, number, call, "fail", error)
        for error in ("EIO",) if call in READING else ("EIO", "ENOSPC"):
            yield Case(command, number, call, "fail", error, (call,))
            yield Case(command, number, call, "fail", error, everything)
        if call not in READING:
            yield Case(command, number, call, "kill before")
            yield Case(command, number, call, "kill after")


def call(place: Workplace, command: str, **options: object) -> Ended:
    """Run a command on the store that it starts from."""
    template, arguments = COMMANDS[command]
    place.restore(template)
    there = [place.folder / word if word.endswith(("yaml", "got")) else word for word in arguments]
    return place.call(*there, **options)


def attempt(place: Workplace, case: Case, undisturbed: Ended) -> Iterator[Failed]:
    """Disturb a command and yield what did not hold afterwards."""
    fault = {
        "folder": str(place.artifacts),
        "number": case.number,
        "mode": case.mode,
        "error": getattr(errno, case.error, 0),
        "for_good": case.for_good,
    }
    ended = call(place, case.command, fault=fault)
    path = ended.trace[case.number].partition(" ")[2] if case.number < len(ended.trace) else ""
    path = path.replace(f"{place.artifacts}/", "")
    problems = itertools.chain(judged(place, case, ended, undisturbed), aftermath(place, case))
    yield from (Failed(case, path, problem) for problem in problems)


def judged(place: Workplace, case: Case, ended: Ended, undisturbed: Ended) -> Iterator[str]:
    """Yield what is wrong with how the disturbed command itself ended."""
    if case.mode.startswith("kill"):
        if ended.code != (-9 if ended.num_disturbed else undisturbed.code):
            yield f"killed, it ended with {ended.code}"
        return
    if ended.code is None:
        yield "it hangs"
    elif ended.code not in (undisturbed.code, 1, 2, 5) or "Traceback" in ended.err:
        yield f"exit code {ended.code}, {ended.err[-500:]!r}"
    elif ended.code != undisturbed.code:
        reason = os.strerror(getattr(errno, case.error))
        told = [line for line in (ended.out + ended.err).splitlines() if reason in line]
        if not told or not ("stages.py:" in ended.err or any(names_file(line, place) for line in told)):
            yield f"no line names reason and file: exit code {ended.code}, {ended.err[-500:]!r}"
    elif not same_output(place, ended, undisturbed, getattr(errno, case.error)):
        changed = differences(place.outcome(ended), place.outcome(undisturbed))
        yield f"silently different: {str(changed)[:600]}, {ended.err[-500:]!r}"


def names_file(line: str, place: Workplace) -> bool:
    """Whether a line has a path: a whole one, or one relative to the artifacts folder."""
    return str(place.artifacts) in line or re.search(r"\b(runs|objects|index)/\w", line) is not None


def same_output(place: Workplace, ended: Ended, undisturbed: Ended, error: int) -> bool:
    """Whether a command that claims to have done its work did the same as undisturbed, or says why not."""
    says_so = os.strerror(error) in ended.out + ended.err
    found, expected = place.outcome(ended), place.outcome(undisturbed)
    if "out" not in found and says_so:  # deliverables that could not be placed
        for outcome in (found, expected):
            for stage in outcome.values():
                if isinstance(stage, dict):
                    stage.pop("deliverables")
        return found == expected
    return found == expected or ("out" in found and says_so)


def aftermath(place: Workplace, case: Case) -> Iterator[str]:
    """Yield what does not hold for the store after a disturbed command."""
    is_altered = case.command == "rebuilding run"
    if case.number % 2:  # garbage is collected before the next run, or after it
        yield from place.leftovers(of_killed=True)
        if not is_altered:
            yield from place.unsound()
    yield from place.unlike_undisturbed(may_be_gone=is_altered)
    if case.command == "gc":
        yield from place.unlike_undisturbed("other", 1)
        yield from place.unlike_undisturbed("m", 3, may_be_gone=True)
    yield from place.leftovers()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A workplace whose commands can be disturbed."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if platform.libc_ver()[0] != "glibc" or compiler is None:
        pytest.skip("a C compiler and glibc are needed to let system calls fail")
    library = tmp_path_factory.mktemp("preload") / "failing_calls.so"
    build(compiler, library)
    with workplace(library) as found:
        yield found


def build(compiler: str, library: Path) -> None:
    """Compile the library that is preloaded."""
    source = HERE / "failing_calls.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)


FAILED_ONCE = {
    ("new run", "close", "in-use", "ENOLCK"),
    ("new run", "fsync", "record.json", "EIO"),
    ("cached run", "read", "record.json", "ESTALE"),
    ("new run", "opendir", "deep", "EACCES"),
    ("new run", "rename", "format", "kill"),
    ("gc", "flock", "in-use", "ENOLCK"),
    ("gc", "rename", "", "EIO"),
    ("runs", "read", "record.json", "EIO"),
    ("get", "open", "count.txt", "EIO"),
    ("cached run", "stat", "report.html", "EIO for good"),
    ("verify", "opendir", "/runs", "EACCES"),
}
"""Command, call, a part of its path, error or kill: each found a fault, so the last such case is always tried."""


def known(cases: list[Case], trace: tuple[str, ...]) -> list[Case]:
    """The last case of each kind in FAILED_ONCE."""
    found: dict[tuple[str, ...], Case] = {}
    for case in cases:
        for kind in FAILED_ONCE:
            command, call, part, how = kind
            is_call = (case.command, case.call) == (command, call) and part in trace[case.number]
            disturbance = f"{case.error or case.mode.split()[0]}{' for good' if case.for_good else ''}"
            if is_call and disturbance == how and case.for_good in ((), (call,)):
                found[kind] = case
    return list(found.values())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.timeout(3600)
def test_every_call_may_fail(place: Workplace, command: str) -> None:
    undisturbed = call(place, command, fault={"folder": str(place.artifacts)})
    assert "Traceback" not in undisturbed.err
    cases = list(cases_of(command, undisturbed.trace))
    if not THOROUGH:
        cases = random.Random(command).sample(cases, NUM_CASES) + known(cases, undisturbed.trace)
    failed = [problem for case in cases for problem in attempt(place, case, undisturbed)]
    print(f"{command}: {len(cases)} cases, {len({problem.case for problem in failed})} failed")
    if failed:
        pytest.fail(summary(failed), pytrace=False)


def summary(failed: list[Failed]) -> str:
    """For each kind of failure: how often, and one of its cases."""
    kinds: dict[str, list[Failed]] = {}
    for item in failed:
        frames = re.findall(r"/ptpipe/(\S+)\", line \d+, in (\w+)", item.problem)
        where = f" in {frames[-1]}" if frames else ""
        kind = f"{item.case.command}: {item.case.call}: {item.problem.partition(':')[0].partition(', ')[0]}{where}"
        kinds.setdefault(kind, []).append(item)
    return "\n".join(
        f"{len(items)} x {kind}\n  {items[0].path}\n  {items[0].case}\n  {items[0].problem}"
        for kind, items in kinds.items()
    )


def test_the_calls_are_disturbed(place: Workplace) -> None:
    """Without this, a library that no longer reaches the calls would let every case pass."""
    trace = call(place, "new run", fault={"folder": str(place.artifacts)}).trace
    called = {line.partition(" ")[0] for line in trace}
    assert called >= {
        "create",
        "write",
        "fsync",
        "rename",
        "link",
        "unlink",
        "mkdir",
        "rmdir",
        "flock",
        "chmod",
        "read",
    }
    number = next(number for number, line in enumerate(trace) if line.startswith("flock"))
    fault = {"folder": str(place.artifacts), "number": number, "mode": "fail", "error": errno.ENOLCK}
    assert call(place, "new run", fault=fault).code == 1
    assert call(place, "new run", fault=fault | {"mode": "kill before"}).code == -9
