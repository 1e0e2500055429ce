"""`ptpipe doctor` without the built-in plugins: the core's own checks, and how plugins' answers are told."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from ptpipe import Check
from ptpipe.check import _requirements, in_range, installed, supported_python
from ptpipe.doctor import check_free_space, diagnose
from ptpipe.plan.vocabulary import load_vocabulary

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
PLUGIN = """
from ptpipe import Check, hookimpl

@hookimpl
def ptpipe_doctor(workers):
    print("a banner")
    {body}
"""
EACH_STATE = """yield Check.ok("engine", f"runs with {workers}")
    yield Check.warn("fan", "is loud", "oil it")
    yield Check.fail("wheel", "is gone", "buy one")"""


@pytest.fixture
def write(tmp_path):
    """Write a plugin with that body of `ptpipe_doctor`; its name for --plugin."""

    def write(body, name="mine.py"):
        (tmp_path / name).write_text(PLUGIN.format(body=body))
        return f"./{name}"

    return write


def doctor(run_cli, *arguments):
    return run_cli("doctor", *arguments, alone=True)


def by_subject(ended):
    return {check["subject"]: check for check in ended.json}


def test_all_is_well_without_plugins(run_cli, tmp_path):
    ended = doctor(run_cli)
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["ok", "python"], ["ok", "ptpipe"], ["ok", "artifacts"]]
    assert lines[-1].endswith(" warnings, 0 failed")
    assert list(tmp_path.iterdir()) == []  # looking makes nothing


def test_each_state_is_printed_counted_and_told_by_the_exit_code(run_cli, write):
    ended = doctor(run_cli, "--plugin", write(EACH_STATE), "--workers", 3)
    assert ended.code == 1
    assert ended.err == "a banner\n"
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert "ok engine runs with 3" in lines
    warn, fail = lines.index("warn fan is loud"), lines.index("fail wheel is gone")
    assert (lines[warn + 1], lines[fail + 1]) == ("-> oil it", "-> buy one")
    assert ended.out.splitlines()[-1].endswith(", 1 failed")


def test_json_says_the_same(run_cli, write):
    ended = doctor(run_cli, "--plugin", write(EACH_STATE), "--json")
    assert ended.code == 1
    found = by_subject(ended)
    assert found["engine"] == {"subject": "engine", "state": "ok", "detail": "runs with 0", "remedy": ""}
    assert found["wheel"] == {"subject": "wheel", "state": "fail", "detail": "is gone", "remedy": "buy one"}
    assert found["plugin ./mine.py"]["detail"] == "manifest, no stage kinds"


def test_warnings_do_not_fail(run_cli, write):
    ended = doctor(run_cli, "--plugin", write('return [Check.warn("fan", "is loud")]'))
    assert ended.code == 0
    assert "warn  fan" in ended.out


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [1 / 0]", "its checks failed: ZeroDivisionError: division by zero (bad.py:7)"),
        ('raise SystemExit("gone")', "its checks failed: SystemExit: gone (bad.py:7)"),
        ('return ["fine"]', "its checks failed: it returned 'fine', which is not a Check"),
        ('yield Check.ok("a", "b"); raise OSError("lib")', "its checks failed: OSError: lib (bad.py:7)"),
    ],
)
def test_a_plugin_that_fails_is_named_and_spoils_no_other(run_cli, write, body, words):
    ended = doctor(run_cli, "--plugin", write(body, "bad.py"), "--plugin", write(EACH_STATE), "--json")
    assert ended.code == 1
    assert "Traceback" not in ended.err
    found = [check for check in ended.json if check["subject"] == "plugin ./bad.py"]
    assert (found[1]["state"], found[1]["detail"]) == ("fail", words)
    assert found[1]["remedy"]
    assert by_subject(ended)["engine"]["state"] == "ok"


def test_a_plugin_that_does_not_load_is_found(run_cli, write, tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    ended = doctor(run_cli, "--plugin", "./broken.py", "--plugin", write(EACH_STATE), "--json")
    assert ended.code == 1
    found = by_subject(ended)
    assert (
        "plugin ./broken.py failed to load: ModuleNotFoundError: No module named 'no_such_library'"
        in (found["plugins"]["detail"])
    )
    assert found["engine"]["state"] == "ok"


def test_a_broken_plugin_nobody_named_is_found(tmp_path, monkeypatch):
    (tmp_path / "sick_plugin.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("ptpipe.plan.vocabulary.BUILT_IN", ("sick_plugin",))
    found = {check.subject: check for check in diagnose(load_vocabulary(), tmp_path)}
    assert found["plugin sick_plugin"].state == "fail"
    assert "ZeroDivisionError" in found["plugin sick_plugin"].detail
    assert found["plugin sick_plugin"].remedy


@pytest.mark.parametrize("workers", ["1", "-1", "65", "two"])
def test_wrong_numbers_of_workers_are_usage_errors(run_cli, workers):
    ended = doctor(run_cli, "--workers", workers)
    assert (ended.code, ended.out) == (2, "")
    assert "--workers" in ended.err


# The artifacts folder


def test_a_folder_that_cannot_be_written_to(run_cli, tmp_path):
    (tmp_path / "file").write_text("")  # root may write to any folder; nobody can to one below a file
    ended = doctor(run_cli, "--artifacts", tmp_path / "file" / "artifacts", "--json")
    assert ended.code == 1
    found = by_subject(ended)["artifacts folder"]
    assert found["state"] == "fail"
    assert "can't be written to" in found["detail"]
    assert "--artifacts" in found["remedy"]


def test_a_folder_that_is_there(run_cli, tmp_path):
    (tmp_path / "artifacts").mkdir()
    found = by_subject(doctor(run_cli, "--json"))["artifacts folder"]
    assert (found["state"], found["detail"]) == ("ok", str(tmp_path / "artifacts"))
    assert list((tmp_path / "artifacts").iterdir()) == []


@pytest.mark.parametrize(
    ("free_bytes", "state"),
    [(5_000_000_000, "ok"), (4_999_999_999, "warn"), (500_000_000, "warn"), (499_999_999, "fail"), (0, "fail")],
)
def test_free_space(free_bytes, state):
    assert check_free_space(free_bytes).state == state


# Versions


def test_bounds_are_those_of_the_installed_distribution():
    with PROJECT.open("rb") as file:
        project = tomllib.load(file)["project"]
    assert SpecifierSet(supported_python()) == SpecifierSet(project["requires-python"])
    (bounds,) = (text.removeprefix("click") for text in project["dependencies"] if text.startswith("click"))
    assert SpecifierSet(_requirements()["click"]) == SpecifierSet(bounds)
    assert "hypothesis" not in _requirements(), "an extra is no requirement"


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.11", "ok"),
        ("2.11.0", "ok"),
        ("2.13.0+cpu", "ok"),
        ("2.14.0", "fail"),
        ("2.14.0.dev20260101+cu130", "fail"),
        ("2.9.1", "fail"),
        ("10.0", "fail"),
        ("unknown", "fail"),
    ],
)
def test_versions_are_compared_by_number(version, state):
    found = in_range("torch", version, ">=2.11,<2.14", "other")
    assert (found.state, version in found.detail) == (state, True)
    assert found.remedy == ("" if state == "ok" else "other")


numbers = st.tuples(*[st.integers(0, 40)] * 3)


@given(numbers, numbers, numbers, st.sampled_from(["", "+cpu", "rc1", ".post2"]))
def test_the_range_is_half_open(version, least, below, suffix):
    text = [".".join(map(str, part)) for part in (version, least, below)]
    found = in_range("x", text[0] + suffix, f">={text[1]},<{text[2]}", "r")
    assert (found.state == "ok") == (least <= version < below)


def test_what_is_installed(monkeypatch):
    bounds = {"pluggy": ">=1.5,<2", "no-such-distribution": ">=1,<2"}
    monkeypatch.setattr("ptpipe.check._requirements", lambda: bounds)
    assert installed("pluggy").state == "ok"
    assert installed("Pluggy", bounds_of="PLUGGY").state == "ok"
    assert installed("pytest").state == "ok", "what ptpipe does not require may have any version"
    bounds["pluggy"] = ">=100"
    old = installed("pluggy")
    assert (old.state, old.remedy) == ("fail", "pip install 'pluggy>=100'")
    assert old.detail.endswith(" is too old: ptpipe requires >=100")
    bounds["pluggy"] = "<1"
    assert installed("pluggy").detail.endswith(" is too new: ptpipe requires <1")
    none = installed("no-such-distribution")
    assert none == Check.fail("no-such-distribution", "is not installed", "pip install 'no-such-distribution>=1,<2'")


def test_ptpipe_on_the_path_but_not_installed(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", absent)
    monkeypatch.setattr("importlib.metadata.metadata", absent)
    assert (supported_python(), _requirements()) == ("", {})
    assert installed("pluggy").state == "ok"
