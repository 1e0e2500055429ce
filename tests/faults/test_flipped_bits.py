"""Every kind of stored file is altered, cut short, swapped, lost, or replaced by something that is no file.

After each, every command ends with a documented exit code, without a traceback and without hanging; a run gives the
very results and verdict of an undisturbed one, or names what was altered.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from ptpipe.errors import IntegrityError
from ptpipe.store.documents import read_document
from ptpipe.store.store import Store

from .workplace import REFUSED, Ended, Workplace, differences, flip, workplace

THOROUGH = os.environ.get("PTPIPE_THOROUGH", "0") != "0"
NUM_FLIPS = 150 if THOROUGH else 1
"""Of each kind of file, through the command line."""
NUM_DAMAGES = None if THOROUGH else 1
"""Other damages to each kind of file; None for all."""
HANGS = "it hangs"
ORDERS = (("views", "run", "gc", "run"), ("gc", "views", "run"))
CODES = (0, 1, 2, REFUSED, 5)

Damage: TypeAlias = Callable[[Path, Path, Path], None]
"""`damage(path, other, outside)`: `other` is another file of that kind, `outside` a path that nothing has yet."""


def rewritten(change: Callable[[bytes], bytes]) -> Damage:
    """Change a file's content in place; its mode and hard links stay."""

    def damage(path: Path, other: Path, outside: Path) -> None:
        mode = path.stat().st_mode
        content = change(path.read_bytes())
        path.chmod(0o644)
        path.write_bytes(content)
        path.chmod(mode)

    return damage


def swapped(path: Path, other: Path, outside: Path) -> None:
    """Exchange it with another of its kind."""
    path.rename(outside)
    other.rename(path)
    outside.rename(other)


def replaced(put: Callable[[Path, Path, Path], None]) -> Damage:
    """Move it outside, and put something else in its place."""

    def damage(path: Path, other: Path, outside: Path) -> None:
        shutil.move(path, outside)
        put(path, other, outside)

    return damage


TO_FILES: dict[str, Damage] = {
    "emptied": rewritten(lambda content: b""),
    "cut in half": rewritten(lambda content: content[: len(content) // 2]),
    "one byte shorter": rewritten(lambda content: content[:-1]),
    "one byte longer": rewritten(lambda content: content + b"\n"),
    "zeros": rewritten(lambda content: bytes(len(content))),
    "noise": rewritten(lambda content: random.Random(0).randbytes(len(content))),
    "deep JSON": rewritten(lambda content: b"[" * 200_000),
    "other JSON": rewritten(lambda content: b'{"files": 1, "name": [], "keys": 2, "stages": {}, "outputs": null}\n'),
}
TO_PLACES: dict[str, Damage] = {
    "swapped": swapped,
    "lost": replaced(lambda path, other, outside: None),
    "a link to itself outside": replaced(lambda path, other, outside: path.symlink_to(outside)),
    "a dangling link": replaced(lambda path, other, outside: path.symlink_to(outside.with_name("nothing"))),
    "a link in a circle": replaced(lambda path, other, outside: path.symlink_to(path)),
    "a link to another": replaced(lambda path, other, outside: path.symlink_to(other)),
    "a folder": replaced(lambda path, other, outside: path.mkdir()),
    "a pipe": replaced(lambda path, other, outside: os.mkfifo(path)),
    "an empty file": replaced(lambda path, other, outside: path.touch()),
    "a hard link to another": replaced(
        lambda path, other, outside: shutil.copytree(other, path) if other.is_dir() else os.link(other, path)
    ),
}

FILES = (
    "index entry",
    "index entry of the gate",
    "object record",
    "object file",
    "object file of the gate",
    "deliverable",
    "run record",
    "record of an old run",
    "events.jsonl",
    "report.md",
    "log.txt",
    "attachment",
    "sources.cache",
    "lock of a stage",
    "lock of the store",
    "format",
    "checkpoint",
)
HARMLESS = {("object record", "one byte longer"), ("deliverables", "a link to itself outside")}
"""What `verify` need not find: white space in JSON whose members have the digest, the very bytes behind a link."""
DECISIVE = (*FILES[:8], "object", "object's files", "deliverables")
FOLDERS = ("object", "object's files", "objects", "index", "run", "runs", "locks", "scratch", "deliverables")


@pytest.fixture(scope="module")
def place() -> Iterator[Workplace]:
    with workplace() as found:
        yield found


class Stored:
    """Where each kind of file is in the template `old`: the newest run's, and another of the same kind."""

    def __init__(self, place: Workplace) -> None:
        root = place.artifacts
        records = sorted((json.loads(path.read_text()) for path in root.glob("runs/*/record.json")), key=_started)
        newest, oldest = records[-1], records[0]
        runs = [root / "runs" / record["run_id"] for record in (newest, oldest)]
        keys, digests = [], []
        for record in (newest, oldest):
            stages = {stage["stage_id"]: stage for stage in record["stages"]}
            keys.append({name: stage["key"] for name, stage in stages.items()})
            digests.append({name: stage["outputs"]["output"]["digest"] for name, stage in stages.items()})
        objects = [{n: root / "objects" / d[:2] / d for n, d in names.items()} for names in digests]
        scratch = sorted(root.glob("scratch/*/checkpoints/step.json"))
        self.places: dict[str, tuple[Path, Path]] = {
            "index entry": tuple(root / "index" / f"{key['export']}.json" for key in keys),
            "index entry of the gate": tuple(root / "index" / f"{key['gate']}.json" for key in keys),
            "object record": tuple(each["export"] / "record.json" for each in objects),
            "object file": tuple(each["train"] / "files" / "deep" / "numbers.json" for each in objects),
            "object file of the gate": tuple(each["gate"] / "files" / "verdict.json" for each in objects),
            "deliverable": tuple(run / "export" / "deep" / "numbers.json" for run in runs),
            "run record": tuple(run / "record.json" for run in runs),
            "record of an old run": tuple(run / "record.json" for run in runs[::-1]),
            "events.jsonl": tuple(run / "events.jsonl" for run in runs),
            "report.md": tuple(run / "report.md" for run in runs),
            "log.txt": tuple(run / "log.txt" for run in runs),
            "attachment": (runs[0] / "files" / "train" / "curve.txt", runs[0] / "report.md"),
            "sources.cache": (root / "index" / "sources.cache", runs[0] / "report.md"),
            "lock of a stage": tuple(root / "locks" / key["train"] for key in keys),
            "lock of the store": (root / "locks" / "in-use", runs[0] / "report.md"),
            "format": (root / "format", runs[0] / "report.md"),
            "checkpoint": (scratch[0], runs[0] / "report.md"),
            "object": tuple(each["export"] for each in objects),
            "object's files": tuple(each["export"] / "files" for each in objects),
            "objects": (root / "objects", root / "index"),
            "index": (root / "index", root / "objects"),
            "run": tuple(runs),
            "runs": (root / "runs", root / "objects"),
            "locks": (root / "locks", root / "scratch"),
            "scratch": (root / "scratch", root / "locks"),
            "deliverables": tuple(run / "export" for run in runs),
        }


def _started(record: dict[str, Any]) -> str:
    return str(record["started_at"])


class Views:
    """What commands that only look printed before the damage."""

    def __init__(self, place: Workplace) -> None:
        self.place = place
        self.got = place.folder / "got"
        place.restore("old")
        self.expected = {name: self.look(name).out for name in ("plan", "show", "runs", "get")}
        self.files = contents(self.got)

    def look(self, name: str) -> Ended:
        shutil.rmtree(self.got, ignore_errors=True)
        arguments = {
            "plan": (self.place.folder / "m.yaml",),
            "show": ("last",),
            "runs": (),
            "get": ("last", "export", self.got),
        }
        return self.place.call(name, *arguments[name])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for statements, which tell the run's time."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(".intoto.json"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def views(place: Workplace) -> Views:
    return Views(place)


def unclear(ended: Ended, path: Path) -> str:
    """What is wrong with how a command ended that could not do its work; empty where it says what was altered."""
    if ended.code is None:
        return HANGS
    if ended.code not in CODES or "Traceback" in ended.err:
        return f"exit code {ended.code}, {ended.err[-700:]!r}"
    return "" if is_told(ended, path) else f"it says nothing: {ended.code}, {ended.out[-300:]!r}, {ended.err[-300:]!r}"


def is_told(ended: Ended, path: Path) -> bool:
    """Whether a command names the damaged file or its folder (a digest, a key or a run by its start)."""
    marks = {part[:12] for part in path.parts[-3:] if len(part) >= 12} | {path.name}
    if path.name in FOLDERS:  # a folder of the store itself
        marks.add(str(path.parent))
    words = ("altered", "unreadable", "missing", "is kept")
    is_named = str(path) in ended.out or any(mark in ended.err for mark in marks)
    return is_named or any(word in ended.out + ended.err for word in words)


def unverified(place: Workplace, kind: str, name: str, path: Path) -> Iterator[str]:
    """Yield a problem where `verify` does not find the damage to something that decides or carries a result."""
    if find_spec("ptpipe.cli.verify"):
        ended = place.call("verify")
        if ended.code == 0:
            yield from ["verify: it finds nothing"] if kind in DECISIVE and (kind, name) not in HARMLESS else []
        elif problem := unclear(ended, path):
            yield f"verify: {problem}"


def wrong_views(views: Views, path: Path) -> Iterator[str]:
    """Yield what the commands that only look get wrong."""
    for name, expected in views.expected.items():
        ended = views.look(name)
        if ended.out != expected and (problem := unclear(ended, path)):
            yield f"{name}: {problem}"
        if name == "get" and ended.code == 0 and contents(views.got) != views.files and not is_told(ended, path):
            yield "get: other bytes"


def wrong_runs(place: Workplace, views: Views, path: Path, must_heal: bool) -> Iterator[str]:
    """Run twice, yield what differs from an undisturbed run and isn't said; the second run may differ in nothing."""
    for attempt in ("run", "second run"):
        ended = place.run("m")
        if place.outcome(ended) == place.expected[7]:
            record = json.loads(ended.out)
            folder = place.artifacts / "runs" / record["run_id"]
            for name, content in views.files.items():
                if (folder / "export" / name).read_bytes() != content:
                    yield f"{attempt}: altered deliverable"
        elif ended.code in (0, REFUSED):
            changed = differences(place.outcome(ended), place.expected[7])
            yield f"{attempt}: other results: {changed}, {ended.err[-500:]!r}"
        elif problem := unclear(ended, path):
            yield f"{attempt}: {problem}"
        elif must_heal and attempt == "second run":
            yield f"{attempt}: not healed: {ended.err[-700:]!r}"


def attempt(place: Workplace, views: Views, kind: str, name: str, damage: Damage) -> Iterator[str]:
    """Damage a file and yield what is wrong afterwards."""
    must_heal = (
        kind in FILES and kind != "format" and not kind.startswith("lock")
    )  # these a user mends, who is told how
    is_one_enough = name.startswith("bit") or not THOROUGH
    for order in (random.Random(kind + name).choice(ORDERS),) if is_one_enough else ORDERS:
        place.restore("old")
        path, other = Stored(place).places[kind]
        outside = place.folder / "outside"
        shutil.rmtree(outside, ignore_errors=True)
        outside.unlink(missing_ok=True)
        damage(path, other, outside)
        for step in order:
            if step == "views":  # of a run whose folder is gone nothing can be known
                is_gone = kind == "runs" or (kind == "run" and name != "swapped")
                found = iter(()) if is_gone else wrong_views(views, path)
                found = itertools.chain(found, unverified(place, kind, name, path))
            elif step == "run":
                found = wrong_runs(place, views, path, must_heal)
            else:
                ended = place.call("gc", "--keep-runs", 5)
                problem = unclear(ended, path) if ended.code else ""
                found = iter([f"gc: {problem}"] if problem else [])
            for problem in found:
                yield f"{'-'.join(order)}: {problem}"
                if HANGS in problem:  # whatever comes next would, too
                    return


def check(place: Workplace, views: Views, kind: str, damages: dict[str, Damage]) -> None:
    """Try damages to a kind of file, and fail with a line for each that had consequences."""
    failed = [
        f"{name}: {problem}"
        for name, damage in damages.items()
        for problem in attempt(place, views, kind, name, damage)
    ]
    names = {line.partition(":")[0] for line in failed}
    print(f"{kind}: {len(damages)} damages, {len(names)} failed")
    if failed:
        pytest.fail(f"{len(names)} of {len(damages)} failed\n" + "\n".join(failed[:40]), pytrace=False)


def some(kind: str, damages: dict[str, Damage]) -> dict[str, Damage]:
    """All of them in the thorough mode, else a few."""
    names = sorted(damages) if NUM_DAMAGES is None else random.Random(kind).sample(sorted(damages), NUM_DAMAGES)
    return {name: damages[name] for name in names}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.timeout(3600)
def test_flipped_bits(place: Workplace, views: Views, kind: str) -> None:
    place.restore("old")
    path = Stored(place).places[kind][0]
    num_bits = 8 * path.stat().st_size if path.exists() else 0
    bits = random.Random(kind).sample(range(num_bits), min(NUM_FLIPS, num_bits))
    check(place, views, kind, {f"bit {bit}": lambda path, *_, bit=bit: flip(path, bit) for bit in bits})


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.timeout(3600)
def test_damaged_files(place: Workplace, views: Views, kind: str) -> None:
    check(place, views, kind, some(kind, TO_FILES | TO_PLACES))


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.timeout(3600)
def test_damaged_folders(place: Workplace, views: Views, kind: str) -> None:
    check(place, views, kind, some(kind, TO_PLACES))


@pytest.mark.parametrize("kind", ["index entry", "run record", "object record", "object file"])
def test_every_bit_is_noticed(place: Workplace, kind: str) -> None:
    """Every bit (in the thorough mode; else each byte's in turn) of a small file, read in this process."""
    place.restore("old")
    path = Stored(place).places[kind][0]
    original = path.read_bytes()
    key_or_digest = (
        path.stem
        if kind == "index entry"
        else next(part for part in path.parts if len(part) == 64)
        if (kind != "run record")
        else ""
    )

    def value() -> object:
        store = Store(place.artifacts)
        if kind == "index entry":
            return store.entry(key_or_digest)
        if kind == "run record":
            return read_document(path)
        store.verify(key_or_digest)
        return store.listing(key_or_digest)

    expected = value()
    bits = range(8 * len(original)) if THOROUGH else range(0, 8 * len(original), 67)
    unnoticed = []
    for bit in bits:
        flip(path, bit)
        try:
            found = value()
        except IntegrityError:
            found = None
        if found not in (None, expected):
            unnoticed.append(bit)
        flip(path, bit)
    assert path.read_bytes() == original
    print(f"{kind}: {len(bits)} bits, {len(unnoticed)} failed")
    assert not unnoticed
