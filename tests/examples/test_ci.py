"""The workflow files to copy: what they run is run on a tiny manifest, and what they carry over suffices."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from ptpipe import ExitCode

from ..conftest import TOY, environment

CI = Path(__file__).parents[2] / "examples" / "ci"
MANIFEST = """version: 1
plugins: [./toy.py]
stages:
  one: {uses: toy.make, with: {value: 3}}
  gate: {uses: toy.gate, with: {least: %s}}
"""


def workflow(name: str) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load((CI / name).read_text(encoding="utf-8"))


GITHUB, GITLAB = workflow("github-actions.yml"), workflow("gitlab-ci.yml")
GATES = GITHUB["jobs"]["gates"]
STEPS = [step for job in GITHUB["jobs"].values() for step in job["steps"]]
COMMANDS = [step["run"] for step in GATES["steps"] if "run" in step]
STORE = GITHUB["env"]["STORE"].split()


class Checkout:
    """A repository as a CI service checks it out, with the `ptpipe` of this environment on the path."""

    def __init__(self, folder: Path, least: int) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "ptpipe").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ptpipe "$@"\n')
        (folder / "bin" / "ptpipe").chmod(0o755)
        (folder / "manifests").mkdir()
        (folder / GITHUB["env"]["MANIFEST"]).write_text(MANIFEST % least)
        shutil.copy(TOY, folder / "manifests")

    def call(self, command: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        variables = environment(PATH=path, MANIFEST=GITHUB["env"]["MANIFEST"])
        return subprocess.run(
            ["bash", "-e", "-c", command], cwd=self.folder, env=variables, capture_output=True, text=True, check=False
        )

    @property
    def verdict(self) -> dict[str, Any]:
        (path,) = self.folder.glob("artifacts/runs/*/verdict.json")
        return json.loads(path.read_text())


def test_both_run_the_same_commands_with_the_same_store():
    assert [*GITLAB["gates"]["script"], *GITLAB["gates"]["after_script"]] == COMMANDS
    assert COMMANDS[0] == "python -m pip install -r requirements.txt"
    assert all(command.startswith("ptpipe ") for command in COMMANDS[1:])
    assert GITLAB["gates"]["variables"]["MANIFEST"] == GITHUB["env"]["MANIFEST"]
    assert GITLAB["gates"]["cache"][1]["paths"] == STORE


@pytest.mark.slow
def test_what_they_run_ends_with_the_gates_exit_code_and_the_next_run_has_the_results(tmp_path):
    validate, run, clean_up = COMMANDS[1:]
    first = Checkout(tmp_path / "first", least=5)
    assert first.call(validate).returncode == 0
    refused = first.call(run)
    assert refused.returncode == 3 and "1 done, 1 refused" in refused.stderr
    assert first.call(clean_up).returncode == 0
    assert first.verdict["ending"] == "refused"
    (junit,) = first.folder.glob(GITLAB["gates"]["artifacts"]["reports"]["junit"])
    assert 'failures="1"' in junit.read_text()
    reports = {path.name for path in (first.folder / GITLAB["gates"]["artifacts"]["paths"][0]).glob("*/*")}
    assert {"report.md", "report.sarif", "junit.xml", "verdict.json"} <= reports

    second = Checkout(tmp_path / "second", least=2)
    for name in STORE:
        source, target = first.folder / name, second.folder / name
        if source.is_dir():
            shutil.copytree(source, target)
        elif source.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    passed = second.call(run)
    assert passed.returncode == 0 and "1 done, 1 cached" in passed.stderr, passed.stderr
    assert second.verdict["gates"][0]["decision"] == "passed"


def test_the_exit_codes_are_explained_in_both_alike():
    explained = [
        re.findall(r"^#   (\d)  (.*)$", (CI / name).read_text(), re.MULTILINE)
        for name in ("github-actions.yml", "gitlab-ci.yml")
    ]
    assert explained[0] == explained[1] and [code for code, _ in explained[0]] == ["0", "1", "3", "4"]


def test_the_guide_names_every_exit_code_and_its_word():
    page = (CI.parents[1] / "docs" / "ci.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([\d, ]+) \| (.*?) \|", page.partition("## Exit codes")[2].partition("\n## ")[0], re.MULTILINE
    )
    named = {
        code: word.strip("`")
        for codes, words in rows
        for code, word in zip(codes.split(", "), words.split(", "), strict=True)
    }
    without_run = {ExitCode.USAGE, ExitCode.PLUGIN}
    assert named == {str(int(code)): "no run" if code in without_run else code.name.lower() for code in ExitCode}


def test_the_token_may_read_and_where_it_may_write_nothing_of_the_repository_runs():
    assert GITHUB["permissions"] == {"contents": "read"}
    writing = [job for job in GITHUB["jobs"].values() if "write" in job.get("permissions", {}).values()]
    assert [step for job in writing for step in job["steps"] if "run" in step or "checkout" in step["uses"]] == []
    assert all("fork" in job["if"] for job in writing)
    (checkout,) = (step for step in STEPS if step.get("uses", "").startswith("actions/checkout"))
    assert checkout["with"]["persist-credentials"] is False


def test_actions_are_pinned_to_a_major_version():
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert len(used) == 7
    assert [action for action in used if not re.fullmatch(r"(actions|github)/[\w/-]+@v\d+", action)] == []


def test_the_store_is_restored_and_saved_alike_and_saved_after_a_refusal_too():
    restore, save = (step for step in STEPS if step.get("uses", "").startswith("actions/cache/"))
    assert restore["with"]["path"] == save["with"]["path"] == "${{ env.STORE }}"
    assert restore["with"]["key"] == save["with"]["key"]
    assert restore["with"]["key"].startswith(restore["with"]["restore-keys"])
    after_run = GATES["steps"][[step.get("run") for step in GATES["steps"]].index(COMMANDS[2]) + 1 :]
    assert len(after_run) == 3 and all(step["if"] == "always()" for step in after_run)
    assert GITLAB["gates"]["artifacts"]["when"] == GITLAB["gates"]["cache"][1]["when"] == "always"
