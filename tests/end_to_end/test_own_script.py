"""A training script that knows nothing of ptpipe, through the command line: as accurate, then int8 and ONNX."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ..forks import run_forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "own_script" / "train_digits.py"


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    finished = [sys.executable, *map(str, command)]
    return subprocess.run(finished, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


class Project:
    """A folder with the script, the digits it reads and the manifest, as a user has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / SCRIPT.relative_to(ROOT)
        self.manifest = folder / "own_script.yaml"
        for path in (SCRIPT, ROOT / "plugins" / "ptpipe_data" / "digits.npz"):
            (folder / path.relative_to(ROOT)).parent.mkdir(parents=True)
            shutil.copy(path, folder / path.relative_to(ROOT))
        text = (ROOT / "manifests" / "own_script.yaml").read_text(encoding="utf-8")
        self.manifest.write_text(text.replace("budget_s: 10", "budget_s: 1"), encoding="utf-8")

    def ptpipe(self, *arguments: str) -> Mapping[str, Any]:
        """Run the manifest; return its stages by id."""
        finished = run_forked(self.folder, "run", self.manifest, "--json", *arguments)
        assert finished.returncode == 0, finished.stderr
        return {stage["stage_id"]: stage for stage in json.loads(finished.stdout)["stages"]}

    def plan(self, *arguments: str) -> dict[str, list[str]]:
        finished = run(self.folder, "-m", "ptpipe", "plan", self.manifest, "--json", *arguments)
        assert finished.returncode == 0, finished.stderr
        stages = json.loads(finished.stdout)["stages"]
        return {stage["id"]: stage["reasons"] for stage in stages if not stage["cached"]}

    def edit(self, old: str, new: str) -> None:
        text = self.script.read_text(encoding="utf-8")
        assert text.count(old) == 1
        self.script.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> Project:
    return Project(tmp_path_factory.mktemp("own_script"))


@pytest.fixture(scope="module")
def stages(project: Project) -> Mapping[str, Any]:
    return project.ptpipe()


def rows(stages: Mapping[str, Any]) -> Mapping[str, Any]:
    (output,) = stages["compare"]["outputs"].values()
    return {row["name"]: row for row in output["summary"]["rows"]}


@pytest.mark.thorough
def test_it_is_as_accurate_as_the_script(project: Project, stages: Mapping[str, Any]) -> None:
    ours = rows(stages)["pretrain"]["accuracy"]
    finished = run(project.folder, project.script, "--save", project.folder / "digits.pt")
    assert finished.returncode == 0, finished.stderr
    match = re.search(r"test accuracy ([\d.]+)", finished.stdout)
    assert match is not None
    # One seed of either: over twelve, the means are 0.01 points apart, and the standard deviations are 0.45 points.
    assert ours == pytest.approx(float(match[1]), abs=0.015) and ours > 0.96


@pytest.mark.thorough
def test_its_int8_models_are_as_accurate_as_float(stages: Mapping[str, Any]) -> None:
    compared = rows(stages)
    assert list(compared) == ["pretrain", "dynamic", "static", "onnx"]
    assert all(abs(row["accuracy"] - compared["pretrain"]["accuracy"]) <= 0.01 for row in compared.values())
    assert compared["onnx"]["size_ratio"] < 0.4
    assert stages["onnx"]["metrics"]["num_float_nodes"] == 0
    assert stages["data"]["notices"] == []


def test_the_script_does_not_know(project: Project) -> None:
    text = project.script.read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) +ptpipe", text, re.MULTILINE)
    assert len(text.splitlines()) < 110


@pytest.mark.thorough
def test_comments_rerun_nothing_and_code_does(project: Project, stages: Mapping[str, Any]) -> None:
    assert project.plan() == {}
    project.edit("class Block(nn.Module):", "# two convolutions\n\n\nclass Block( nn.Module ):")
    assert project.plan() == {}
    project.edit("nn.Dropout(0.2)", "nn.Dropout(0.1)")
    reasons = project.plan()
    changed = "examples/own_script/train_digits.py, or what it imports, changed"
    assert reasons["data"] == [changed] and reasons["net"] == [changed, "upstream changed: data"]
    assert len(reasons) == len(stages)
    again = project.ptpipe("-s", "pretrain.epochs=1", "-s", "quality.max_drop=1")
    assert {stage["outcome"] for stage in again.values()} == {"done"}


def test_two_workers_train_it(project: Project) -> None:
    """Each worker makes the network from the script; then the manifest goes on to its end."""
    parallel = "pretrain.parallel={mode: ddp, workers: 2}"
    stages = project.ptpipe("-s", "pretrain.epochs=1", "-s", parallel, "-s", "quality.max_drop=1")
    # What is in front of the training is cached where a test before this one has run it.
    assert {name for name, stage in stages.items() if stage["outcome"] != "done"} <= {"data", "net"}
    metrics = stages["pretrain"]["metrics"]
    assert [row["worker"] for row in metrics["workers"]] == [0, 1]
    assert metrics["val_accuracy"] > 0.5
    assert stages["onnx"]["metrics"]["num_float_nodes"] == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("DigitNet", "DigitNett", "no function or class 'DigitNett' at its top level (did you mean 'DigitNet'?)"),
        ("width:", "widht:", "DigitNet() has no argument 'widht' (did you mean 'width'?)"),
        ("function: make", "arguments: {path: x, seed: 1}, function: make", "make_datasets() has no argument 'seed'"),
    ],
)
def test_mistakes_are_found_before_the_run(project: Project, old: str, new: str, message: str) -> None:
    manifest = project.folder / "mistaken.yaml"
    manifest.write_text(project.manifest.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    finished = run(project.folder, "-m", "ptpipe", "validate", manifest)
    assert finished.returncode == 2 and message in finished.stderr
