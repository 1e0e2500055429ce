"""Scripts and configuration of CI: requirements derived from pyproject.toml, commit subjects, workflow, hooks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
REQUIREMENT = re.compile(r"^([\w.-]+)(?:\[\w+\])?([<>=!~].*)?$")


def script(name, *arguments, root=ROOT):
    command = [sys.executable, root / ".ci" / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def requirements(which):
    ended = script("requirements.py", which)
    assert ended.returncode == 0, ended.stderr
    return {match[1]: match[2] for line in ended.stdout.splitlines() if (match := REQUIREMENT.match(line))}


def test_the_oldest_dependencies_are_the_lower_bounds():
    bounds = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["table"]]
    pins = requirements("lowest")
    assert [f"{name}{version.replace('==', '>=')}" for name, version in pins.items()] == bounds


def test_dependencies_have_a_lower_bound_and_no_upper_bound():
    """Where a later version is known to break, the bound has its reason beside it, and this test an exception."""
    bounds = {line: REQUIREMENT.match(line)[2] for line in PROJECT["dependencies"]}
    assert [line for line, bound in bounds.items() if not re.fullmatch(r">=[\d.]+", bound or "")] == []


def test_the_core_is_tested_with_its_own_dependencies_only():
    names = requirements("core").keys()
    assert {"click", "pluggy", "pydantic", "ruamel.yaml", "pytest", "hypothesis"} <= names
    assert (
        names & {"torch", "torchvision", "numpy", "onnx", "onnxruntime", "onnxscript", "safetensors", "scikit-learn"}
        == set()
    )


def test_constraints_lie_within_what_the_package_allows():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = [line for line in lines if line and not line.startswith("#")]
    assert constraints
    assert [line for line in constraints if line.partition(",<")[0] not in PROJECT["dependencies"]] == []


def check_subjects(folder, *subjects):
    messages = [folder / str(number) for number, _ in enumerate(subjects)]
    for message, subject in zip(messages, subjects, strict=True):
        message.write_text(subject + "\n", encoding="utf-8")
    return script("commit_subject.py", *messages)


@pytest.mark.parametrize(
    "subject", ["Add a table", "Seed every worker", "Speed up the plan", 'Revert "x"', "fixup! y", "A" * 72]
)
def test_subjects_that_pass(subject, tmp_path):
    assert check_subjects(tmp_path, subject).returncode == 0


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("A" * 73, "73 characters, 72 are allowed"),
        ("add a table", "begin with a capital letter"),
        ("Add a table.", "no full stop at the end"),
        ("Added a table", "begin with an imperative"),
        ("Adding a table", "begin with an imperative"),
        ("Fixes a table", "begin with an imperative"),
        ("", "begin with a capital letter"),
    ],
)
def test_subjects_that_do_not(subject, problem, tmp_path):
    ended = check_subjects(tmp_path, "Add a test", subject)
    assert ended.returncode == 1
    assert problem in ended.stderr
    assert "Add a test" not in ended.stderr


def test_the_subject_of_a_message_is_its_first_line(tmp_path):
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("Add a table\n\nadded because it was missing.\n# a comment\n", encoding="utf-8")
    assert script("commit_subject.py", message).returncode == 0


@pytest.fixture
def clone(tmp_path):
    """A repository with the script and three commits; the first is older than the rule."""
    shutil.copytree(ROOT / ".ci", tmp_path / "clone" / ".ci")
    git(tmp_path / "clone", "init", "--quiet")
    for date, subject in [("2026-11-25T03:53", "o" * 73), ("2026-11-25T03:54", "n" * 73), ("2026-12-01T00:00", "Add")]:
        commit(tmp_path / "clone", subject, date)
    return tmp_path / "clone"


def git(folder, *arguments, **environment):
    settings = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgSign=false"]
    subprocess.run(["git", *settings, *arguments], cwd=folder, env=os.environ | environment, check=True)


def commit(folder, subject, date):
    git(folder, "commit", "--quiet", "--allow-empty", "-m", subject, GIT_COMMITTER_DATE=f"{date}:00Z")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_subjects_of_new_commits_are_checked(clone):
    ended = script("commit_subject.py", root=clone)
    assert (ended.returncode, "n" * 73 in ended.stderr, "o" * 73 in ended.stderr) == (1, True, False)
    assert ended.stderr.endswith("reword them: `git commit --amend`, or `git rebase -i` for older ones\n")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize(("subject", "code"), [("Add a table", 0), ("Added a table", 1)])
def test_subjects_are_checked_in_a_shallow_clone(clone, tmp_path, subject, code):
    git(tmp_path, "clone", "--quiet", "--depth=1", clone.as_uri(), "shallow")
    shutil.copytree(clone / ".ci", tmp_path / "shallow" / ".ci")
    commit(tmp_path / "shallow", subject, "2026-12-02T00:00")
    assert script("commit_subject.py", root=tmp_path / "shallow").returncode == code


def test_subjects_are_not_checked_where_there_is_no_history(tmp_path):
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    ended = script("commit_subject.py", root=tmp_path)
    assert (ended.returncode, "commit subjects are not checked" in ended.stderr) == (0, True)


def yaml(name):
    return YAML(typ="safe", pure=True).load((ROOT / name).read_text(encoding="utf-8"))


def steps():
    jobs = yaml(".github/workflows/ci.yml")["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_workflow_tests_every_supported_python_and_the_oldest_and_newest_dependencies():
    matrix = yaml(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["include"]
    names = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line.startswith("Programming Language")]
    assert {each["python"] for each in matrix} == set(names)
    assert {each["dependencies"] for each in matrix} == {"constrained", "oldest", "newest"}


def test_every_extra_is_installed_in_some_job():
    groups = PROJECT["optional-dependencies"]
    outside_dev = {name for name, group in groups.items() if name != "docs" and not set(group) <= set(groups["dev"])}
    installed = re.findall(r"'\.\[([\w,]+)\]'", "\n".join(step.get("run", "") for step in steps()))
    assert outside_dev <= {extra for names in installed for extra in names.split(",")}


def test_commands_of_the_workflow_exist():
    text = "\n".join(step.get("run", "") for step in steps())
    targets = set(re.findall(r"\bmake (\S+)", text))
    assert {"lint", "docs", "test-core", "coverage", "release"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)] == []
    scripts = set(re.findall(r"\.ci/\w+\.py", text))
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


def test_local_hooks_call_tools_that_are_installed():
    local = next(repo for repo in yaml(".pre-commit-config.yaml")["repos"] if repo["repo"] == "local")
    entries = [hook["entry"].split()[0] for hook in local["hooks"]]
    tools = [Path(entry).name for entry in entries if entry.startswith(".venv/bin/")]
    assert [tool for tool in tools if not Path(sys.executable).with_name(tool).exists()] == []
    assert {"ruff", "mypy", "lint-imports"} <= set(tools)


def test_what_has_passed_without_torch_is_not_run_again(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "tests/ptpipe/test_host.py"]
    listed = tmp_path / "passed.txt"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PTPIPE_", "PYTEST_"))}

    def ended(name):
        options = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
        return subprocess.run(command, env=environment | {name: str(listed)}, **options)

    first = ended("PTPIPE_PASSED_TO")
    passed = listed.read_text().splitlines()
    assert f"{len(passed)} passed" in first.stdout, first.stdout
    listed.write_text("\n".join(passed[1:]))
    assert re.search(r"^1 passed", ended("PTPIPE_PASSED_IN").stdout, re.MULTILINE)


TOOL = """\
#!/bin/sh
tool=$(basename "$(dirname "$(dirname "$0")")")/$(basename "$0")
case "$tool $*" in
*"-m venv "*)
    for folder; do :; done
    mkdir -p "$folder/bin"
    for name in python ruff mypy lint-imports mkdocs; do cp "$0" "$folder/bin/$name"; done
    exit ;;
.venv-core/*pytest*) [ -z "$FAILS" ] || exit 1 ;;
*/mypy*)  # is slow
    for _ in $(seq 100); do grep -q "$SLOWER_THAN" "$LOG" && break; sleep 0.1; done ;;
esac
echo "$tool $* to=$PTPIPE_PASSED_TO in=$PTPIPE_PASSED_IN site=$PTPIPE_SITE" >> "$LOG"
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("fails", ["", "1"])
def test_other_tests_wait_for_those_of_the_core_and_not_for_mypy(tmp_path, fails):
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run", ".ci/requirements.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    tool, log = tmp_path / "tool", tmp_path / "log"
    tool.write_text(TOOL, encoding="utf-8")
    tool.chmod(0o755)
    awaited = "" if fails else "^.venv/python -m pytest"
    own = {"PYTHON": str(tool), "LOG": str(log), "FAILS": fails, "SLOWER_THAN": awaited}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PTPIPE_", "MAKE"))} | own
    ended = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode == 0) == (not fails), ended.stderr
    lines = log.read_text(encoding="utf-8").splitlines()
    passed, site = tmp_path / "build" / "passed-without-torch.txt", tmp_path / "build" / "site"
    others = [number for number, line in enumerate(lines) if line.startswith(".venv/python -m pytest")]
    if fails:
        assert others == []
        return
    of_core = next(number for number, line in enumerate(lines) if line.startswith(".venv-core/python -m pytest"))
    assert lines[of_core].endswith(f" to={passed} in= site=")
    assert [lines[number].partition(" to=")[2] for number in others] == [f" in={passed} site={site}"]
    docs, types = (next(number for number, line in enumerate(lines) if tool in line) for tool in ("/mkdocs", "/mypy"))
    assert max(of_core, docs) < others[0] < types
