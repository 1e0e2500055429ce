"""A project whose numbers are deliverables, and a copy of its store after one run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import Project

from ptpipe import RunResult

STAGES = """
one: {uses: toy.make, with: {value: 3}}
two: {uses: toy.make, with: {value: 2}}
sum: {uses: toy.add, needs: {a: one, b: two}}
text: {uses: toy.total, needs: {numbers: [one, sum]}}
"""
DELIVERS = """
    @classmethod
    def deliverables(cls, folder):
        return ("number.json",)

    def summary(self) -> dict[str, object]:"""


def deliver(project: Project) -> Project:
    """Make the toy's numbers deliverables, and write a manifest."""
    project.edit("\n    def summary(self) -> dict[str, object]:", DELIVERS)
    project.write(STAGES, head="name: toy\nseed: 5\nplugins: [./toy.py]  # na\u00efve")
    return project


@pytest.fixture
def shop(project: Project) -> Project:
    """The toy project with deliverables and a manifest, not run yet."""
    return deliver(project)


@dataclass(frozen=True)
class Stored:
    """An artifacts folder after one run, free to be damaged: no file in it is a hard link."""

    artifacts: Path
    result: RunResult
    """Of the run, in another folder."""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.artifacts / "runs" / self.result.run_id

    def object(self, stage_id: str) -> Path:
        """The folder of a stage's only output."""
        digest = str(self.result.stages[stage_id].outputs["output"]["digest"])
        return self.artifacts / "objects" / digest[:2] / digest


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunResult]:
    """One run, for all tests of a module to copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", list(__import__("sys").path))
        patch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ())
        yield deliver(Project(tmp_path_factory.mktemp("finished"))).run()


@pytest.fixture
def stored(finished: RunResult, tmp_path: Path) -> Stored:
    """A copy of the store of that run."""
    shutil.copytree(finished.store.root, tmp_path / "artifacts")
    return Stored(tmp_path / "artifacts", finished)
