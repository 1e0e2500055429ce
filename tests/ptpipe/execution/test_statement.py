"""The statement beside each deliverable: what it says, that it repeats, that it betrays nothing."""

from __future__ import annotations

import getpass
import hashlib
import json
import platform
import shutil

import pytest

from ptpipe import ExitCode, __version__, load_plan, run
from ptpipe.execution.engine import RunOptions
from ptpipe.execution.statement import statement_path
from ptpipe.store.documents import read_document

DELIVERS = """
    @classmethod
    def deliverables(cls, folder):
        return {names!r}

    def summary(self) -> dict[str, object]:"""
STAGES = """
one: {uses: toy.make, with: {value: 3}}
two: {uses: toy.make, with: {value: 2}}
sum: {uses: toy.add, needs: {a: one, b: two}}
text: {uses: toy.total, needs: {numbers: [one, sum]}}
"""


def deliver(project, *names):
    project.edit("\n    def summary(self) -> dict[str, object]:", DELIVERS.format(names=names))
    project.write(STAGES, head="name: toy\nseed: 5\nplugins: [./toy.py]  # naïve")


def statement_of(result, stage_id):
    (path,) = result.stages[stage_id].deliverables
    return read_document(statement_path(path))


def test_it_says_what_a_deliverable_was_made_of(project):
    deliver(project, "number.json")
    result = project.run({"two.value": 2.5})
    statement = statement_of(result, "sum")
    content = (result.folder / "sum" / "number.json").read_bytes()
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"] == [{"name": "number.json", "digest": {"sha256": hashlib.sha256(content).hexdigest()}}]
    definition, details = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    assert definition["externalParameters"] == {
        "manifest": {"name": "m.yaml", "text": project.manifest.read_text(encoding="utf-8")},
        "overrides": {"two.value": 2.5},
        "stage": "sum",
        "output": "output",
    }
    assert definition["internalParameters"]["seed"] == 5
    chain = definition["internalParameters"]["stages"]
    assert [stage["id"] for stage in chain] == ["one", "two", "sum"], "what it depends on, and nothing else"
    assert [stage["key"] for stage in chain] == [result.stages[stage["id"]].key for stage in chain]
    assert chain[1]["parts"]["config"]["value"] == 2.5
    names = [entry.get("name") or entry["uri"] for entry in definition["resolvedDependencies"]]
    assert names == ["m.yaml", "plugin ./toy.py", f"pkg:pypi/ptpipe@{__version__}"]
    assert details["builder"]["version"] == {"ptpipe": __version__, "python": platform.python_version()}
    assert details["metadata"]["invocationId"] == result.run_id
    made = {stage["id"]: stage["outputs"]["output"]["digest"] for stage in details["metadata"]["ptpipe_results"]}
    assert made == {name: result.stages[name].outputs["output"]["digest"] for name in ("one", "two", "sum")}
    assert details["metadata"]["ptpipe_results"][2]["inputs"] == {"a": [made["one"]], "b": [made["two"]]}


def test_packages_and_files_outside_the_store_are_dependencies(project):
    deliver(project, "number.json")
    project.edit(
        '@stage("toy.make")', '@stage("toy.make", packages=("pluggy", "No_Such"), fingerprint=lambda c: {"a": 1})'
    )
    dependencies = statement_of(project.run(), "one")["predicate"]["buildDefinition"]["resolvedDependencies"]
    uris = [entry["uri"].partition("@")[0] for entry in dependencies if "uri" in entry]
    assert uris == ["pkg:pypi/no-such", "pkg:pypi/pluggy", "pkg:pypi/ptpipe"]
    digest = hashlib.sha256(b'{"a":1}').hexdigest()
    assert dependencies[-1] == {"name": "files read by one", "digest": {"ptpipeFingerprint": digest}}


def test_the_same_gives_the_same_definition_elsewhere(project, tmp_path):
    deliver(project, "number.json")
    first = statement_of(project.run(), "sum")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("m.yaml", "toy.py"):
        shutil.copy(project.folder / name, elsewhere)
    second = statement_of(run(elsewhere / "m.yaml", artifacts=elsewhere / "store"), "sum")
    details = [statement["predicate"].pop("runDetails")["metadata"] for statement in (first, second)]
    assert first == second
    assert details[0]["startedOn"] != details[1]["startedOn"]
    results = [{**result, "made_at": ""} for metadata in details for result in metadata["ptpipe_results"]]
    assert results[:3] == results[3:]


def test_a_cached_result_keeps_its_own_environment(project, monkeypatch):
    deliver(project, "number.json")
    first = project.run()
    monkeypatch.setattr("ptpipe.execution.statement.platform.python_version", lambda: "3.99.0")
    second = project.run()
    assert project.outcomes(second)["sum"] == "cached"
    details = statement_of(second, "sum")["predicate"]["runDetails"]
    results = {stage["id"]: stage for stage in details["metadata"]["ptpipe_results"]}
    assert details["builder"]["version"]["python"] == "3.99.0"
    assert results["sum"]["environment"] == first.stages["sum"].environment
    assert results["sum"]["environment"]["python"] != "3.99.0"
    assert results["sum"]["made_at"] == first.stages["sum"].made_at
    assert second.stages["sum"].environment == first.stages["sum"].environment


def test_it_holds_no_environment_variables_host_or_user(project, monkeypatch):
    monkeypatch.setenv("PTPIPE_TEST_TOKEN", "s3cret")
    monkeypatch.setattr("ptpipe.host.platform.node", lambda: "host-of-mine")
    deliver(project, "number.json")
    (path,) = project.run().stages["sum"].deliverables
    text = statement_path(path).read_text()
    assert [word for word in ("s3cret", "host-of-mine", str(project.folder), "/home/") if word in text] == []
    assert f'"{getpass.getuser()}"' not in text


def test_a_deliverable_may_not_have_the_name_of_anothers_statement(project):
    names = ("number.json", "number.json.intoto.json")
    deliver(project, *names)
    project.edit(
        '(folder / "number.json").write_text',
        f'(folder / "{names[1]}").write_text("x"); (folder / "number.json").write_text',
    )
    result = project.run()
    assert result.exit_code == ExitCode.DONE
    assert "are both deliverables: rename one" in result.stages["sum"].notices[0]
    assert result.stages["sum"].deliverables == ()


def test_the_run_keeps_the_manifest_as_it_was_read(project):
    deliver(project, "number.json")
    text = project.manifest.read_bytes()
    plan = load_plan(project.manifest)
    project.manifest.write_text("changed meanwhile")
    result = run(plan, artifacts=project.artifacts, options=RunOptions())
    assert (result.folder / "manifest.yaml").read_bytes() == text
    record = json.loads((result.folder / "record.json").read_text())
    assert record["manifest_sha256"] == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize("name", ["statement", "manifest"])
def test_a_full_disk_is_named(project, monkeypatch, name):
    def full(*_):
        raise OSError(28, "No space left on device")

    deliver(project, "number.json")
    if name == "manifest":
        monkeypatch.setattr("ptpipe.execution.record.write_atomically", full)
        with pytest.raises(Exception, match=r"cannot write to .*No space left"):
            project.run()
        return
    monkeypatch.setattr("ptpipe.execution.statement.write_document", full)
    result = project.run()
    assert "the disk is full" in result.stages["sum"].notices[0]
    assert result.stages["sum"].deliverables == ()
