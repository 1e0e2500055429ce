"""A manifest, stores in known states, commands run in forks, and what must hold after every disturbance."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptpipe.errors import PtpipeError
from ptpipe.store.runs import run_records
from ptpipe.store.store import Store

HERE = Path(__file__).parent
MANIFEST = """
version: 1
name: {name}
seed: {seed}
plugins: [{plugin}]
stages:
  make: {{uses: faults.make}}
  train: {{uses: faults.train}}
  export: {{uses: faults.export, needs: {{numbers: train}}}}
  gate: {{uses: faults.gate}}
"""
REFUSED = 3
"""How an undisturbed run of the manifest ends: a gate that fails open would be noticed."""


@dataclass(frozen=True)
class Ended:
    """A finished command; `code` is None where it hung."""

    code: int | None
    out: str
    err: str
    trace: tuple[str, ...] = ()
    """Its calls below the artifacts folder: `name path`."""
    num_disturbed: int = 0


class Commands:
    """`commands("run", "m.yaml")`: the command line, in forks of one process (see `fork_server`)."""

    def __init__(self, manifest: Path, preload: Path | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PTPIPE_ARTIFACTS"}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1", "COLUMNS": "400"}
        environment |= {"LD_PRELOAD": str(preload)} if preload else {}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py"), str(manifest)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, *arguments: object, fault: Mapping[str, Any] | None = None, timeout_s: float = 10, **environment: str
    ) -> Ended:
        request = {
            "arguments": [str(argument) for argument in arguments],
            "fault": dict(fault or {}),
            "timeout_s": timeout_s,
            "environment": environment,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return Ended(**{**answer, "trace": tuple(answer["trace"].splitlines())})

    def close(self) -> None:
        self._process.communicate()


class Workplace:
    """The manifests `m.yaml` and `other.yaml`, stores to start from, and the store that is disturbed."""

    def __init__(self, folder: Path, preload: Path | None = None) -> None:
        self.folder, self.artifacts = folder, folder / "artifacts"
        self._templates = folder / "templates"
        self._templates.mkdir()
        plugin = shutil.copy(HERE / "stages.py", folder / "stages.py")
        for name, seed in (("m", 7), ("other", 1)):
            text = MANIFEST.format(name=name, seed=seed, plugin=plugin)
            (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
        self.commands = Commands(folder / "m.yaml", preload)
        for name in ("finished", "resumed", "altered", "old"):
            shutil.rmtree(self.artifacts, ignore_errors=True)
            getattr(self, f"_{name}")()
            self.artifacts.rename(self._templates / name)
        self.restore("old")
        self.expected = {seed: self.outcome(self.run("m", seed)) for seed in (1, 3, 7)}
        """Of undisturbed runs, by seed."""

    # Stores to start from

    def restore(self, template: str) -> None:
        """Put a store in the place that is disturbed; `empty` is none at all."""
        shutil.rmtree(self.artifacts, ignore_errors=True)
        if template != "empty":
            copy_with_links(self._templates / template, self.artifacts)

    def _finished(self) -> None:
        self.run("m")

    def _resumed(self) -> None:
        self.run("m", FAULTS_KILLED_AT="4")

    def _altered(self) -> None:
        """The input of a stage that must work has other bytes."""
        record = json.loads(self.run("m").out)
        facts = {stage["stage_id"]: stage for stage in record["stages"]}
        (self.artifacts / "index" / f"{facts['gate']['key']}.json").unlink()
        digest = facts["export"]["outputs"]["output"]["digest"]
        flip(self.artifacts / "objects" / digest[:2] / digest / "files" / "count.txt", 3)

    def _old(self) -> None:
        """Runs to delete, runs to keep (one shares its results with one that goes), and what killed processes left."""
        self.run("m", 1)
        self.run("m", 3)
        self.run("m", 2, FAULTS_KILLED_AT="4")
        self.run("other", 1)
        self.run("m")
        for name in (
            "objects/.new-0123/files/x",
            "index/.k.json-0123456789ab",
            "runs/.new-0123/.record.json-0123456789ab",
        ):
            (self.artifacts / name).parent.mkdir(parents=True, exist_ok=True)
            (self.artifacts / name).write_text("x")

    # Commands

    def run(self, manifest: str, seed: int = 7, **options: Any) -> Ended:
        """`ptpipe run`, with its record as JSON on stdout."""
        return self.call("run", self.folder / f"{manifest}.yaml", "-s", f"seed={seed}", "--json", **options)

    def call(self, *arguments: object, **options: Any) -> Ended:
        """Any command on the store that is disturbed."""
        return self.commands(*arguments, "--artifacts", self.artifacts, **options)

    def outcome(self, ended: Ended) -> dict[str, Any]:
        """What must be the same in every run: exit code, and each stage's outputs, metrics and deliverables."""
        try:
            record = json.loads(ended.out)
        except ValueError:
            return {"code": ended.code, "out": ended.out}
        stages = {stage["stage_id"]: stage for stage in record["stages"]}
        facts = ("outputs", "metrics", "deliverables", "message")
        return {"code": ended.code} | {name: {fact: stage[fact] for fact in facts} for name, stage in stages.items()}

    # What must hold

    def unlike_undisturbed(self, manifest: str = "m", seed: int = 7, may_be_gone: bool = False) -> Iterator[str]:
        """Run the manifest again; yield how it differs from a run that nothing ever disturbed.

        `may_be_gone`: results that were stored may have been deleted or quarantined rightly.
        """
        done = self.done_stages()
        ended = self.run(manifest, seed)
        if changed := differences(self.outcome(ended), self.expected[seed]):
            yield f"the next run differs: {changed}, {ended.err[-500:]!r}"
            return
        outcomes = {stage["key"]: stage["outcome"] for stage in json.loads(ended.out)["stages"]}
        if not may_be_gone:
            if lost := [key for key, outcome in outcomes.items() if outcome == "done" and key in done]:
                yield f"the next run did again what was done: {len(lost)} stages"
            if list(self.artifacts.glob("quarantine/*")):
                yield "sound bytes are in quarantine"

    def done_stages(self) -> set[str]:
        """The keys of the stages that some run has recorded as done."""
        records = run_records(Store(self.artifacts))
        stages = (stage for record in records for stage in record["stages"])
        return {stage["key"] for stage in stages if stage["outcome"] in ("done", "cached", "refused")}

    def unsound(self) -> Iterator[str]:
        """Yield what is half written, or missing, in the index, the objects and the deliverables."""
        store = Store(self.artifacts)
        for path in self.artifacts.glob("index/*.json"):
            entry = store.entry(path.stem)
            if entry is None:
                yield "an index entry names outputs that are not there"
                continue
            for stored in entry.outputs.values():
                try:
                    store.verify(stored.digest)
                except PtpipeError as error:
                    yield f"an index entry names altered outputs: {error}"
        for record in run_records(store):
            for stage in record["stages"]:
                for name in stage["deliverables"]:
                    if not (self.artifacts / "runs" / record["run_id"] / name).is_file():
                        yield f"a recorded deliverable is missing: {name}"

    def leftovers(self, of_killed: bool = False) -> Iterator[str]:
        """Collect garbage; yield what is still there and nobody needs, and what is gone and somebody needs.

        `of_killed`: the newest run may not have ended, and needs its checkpoints.
        """
        ended = self.call("gc", "--keep-runs", 1)
        is_store = (self.artifacts / "locks").is_dir()  # which a killed run made last
        if ended.code and is_store:
            yield f"the next gc fails: {ended.code}, {ended.err[-300:]!r}"
        for path in self.artifacts.rglob("*"):
            name = path.relative_to(self.artifacts).as_posix()
            is_temporary = path.name.startswith(".") or (path.parent.name == "locks" and path.name != "in-use")
            if is_temporary or (path.parent.name == "scratch" and not of_killed):
                yield f"gc leaves {name}"
        if not of_killed:
            yield from self.unsound()


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """What two outcomes don't share, as in the first."""
    return {name: found.get(name) for name in {**expected, **found} if found.get(name) != expected.get(name)}


def copy_with_links(source: Path, target: Path) -> None:
    """Copy a folder; files that are hard links to each other stay so."""
    copied: dict[int, Path] = {}
    for parent, _, files in os.walk(source):
        place = target / Path(parent).relative_to(source)
        place.mkdir()
        for name in files:
            path = Path(parent) / name
            inode = path.stat().st_ino
            if inode in copied:
                os.link(copied[inode], place / name)
            else:
                copied[inode] = Path(shutil.copy2(path, place / name))


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file, in place; read-only files too."""
    mode = path.stat().st_mode
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    with path.open("r+b") as file:
        file.write(content)
    path.chmod(mode)


@contextmanager
def workplace(preload: Path | None = None) -> Iterator[Workplace]:
    """A workplace in memory where that is possible: thousands of stores are written."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        place = Workplace(Path(folder), preload)
        try:
            yield place
        finally:
            place.commands.close()
