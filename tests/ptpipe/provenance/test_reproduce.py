"""`ptpipe reproduce`: each stage compared, and the first cause of a difference named."""

from __future__ import annotations

import json
import shutil

import pytest

from ptpipe.errors import ExitCode, IntegrityError, ManifestError, UsageError
from ptpipe.execution.statement import statement_path
from ptpipe.provenance.reproduce import Status, past_run, past_statement, reproduce
from ptpipe.provenance.statement import Statement
from ptpipe.store.documents import read_document, write_document
from ptpipe.store.store import Store


def again(project, tmp_path, past=None, tolerance=None):
    past = past or past_run(Store(project.artifacts), "last")
    return reproduce(past, past.plan(), tmp_path / "again", tolerance)


def statuses(result):
    return {stage.stage_id: str(stage.status) for stage in result.stages}


def test_the_same_is_bit_equal(shop, tmp_path):
    shop.run({"one.value": 4})
    result = again(shop, tmp_path)
    assert statuses(result) == dict.fromkeys(["one", "two", "sum", "text"], "bit-equal")
    assert (result.is_complete, result.first_cause) == (True, None)
    assert not any(stage.changes for stage in result.stages)


def test_from_a_statement_alone_elsewhere(shop, tmp_path, monkeypatch):
    (path,) = shop.run({"one.value": 4}).stages["sum"].deliverables
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(statement_path(path), elsewhere)
    shutil.copy(shop.plugin, elsewhere)
    for each in (shop.artifacts, shop.manifest, shop.plugin):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    monkeypatch.chdir(elsewhere)
    statement = Statement.read(elsewhere / "number.json.intoto.json")
    result = again(shop, tmp_path, past_statement(statement, "number.json"))
    assert statuses(result) == dict.fromkeys(["one", "two", "sum"], "bit-equal"), "only what it depends on"
    assert result.is_complete


def test_a_changed_plugin_is_the_first_cause(shop, tmp_path):
    shop.run()
    shop.edit("return Number(a.value + b.value)", "return Number(a.value + b.value + 1)")
    result = again(shop, tmp_path)
    assert statuses(result) == {"one": "bit-equal", "two": "bit-equal", "sum": "different", "text": "different"}
    assert not result.is_complete
    assert (result.first_cause.stage_id, result.first_cause.changes) == ("sum", ("the plugin's code",))


def test_changed_data_are_the_first_cause(shop, tmp_path):
    data = shop.folder / "data.txt"
    data.write_text("3")
    fingerprint = f'fingerprint=lambda c: Path("{data}").read_text()'
    shop.edit('@stage("toy.make")', f'@stage("toy.make", {fingerprint})')
    shop.edit("return Number(config.value)", f'return Number(float(Path("{data}").read_text()))')
    shop.run()
    data.write_text("4")
    cause = again(shop, tmp_path).first_cause
    assert (cause.stage_id, cause.changes) == ("one", ("fingerprint: 3 -> 4",))


@pytest.mark.parametrize("is_of_statement", [False, True])
def test_a_file_that_a_stage_found_and_read_is_the_first_cause(shop, tmp_path, monkeypatch, is_of_statement):
    monkeypatch.chdir(shop.folder)
    data = shop.folder / "data.txt"
    data.write_text("3")
    shop.edit(
        "return Number(config.value)",
        f"""from ptpipe import ReadLog
    with ReadLog() as log:
        value = float(Path("{data}").read_text())
    ctx.reads(log)
    return Number(value)""",
    )
    (path,) = shop.run().stages["sum"].deliverables
    past = past_statement(Statement.read(statement_path(path)), "number.json") if is_of_statement else None
    assert again(shop, tmp_path, past).first_cause is None
    shutil.rmtree(tmp_path / "again")
    data.write_text("4")
    cause = again(shop, tmp_path, past).first_cause
    assert (cause.stage_id, cause.changes) == ("one", ("it read another data.txt",))


def test_another_package_python_or_machine_is_named(shop, tmp_path, monkeypatch):
    shop.edit('@stage("toy.make")', '@stage("toy.make", packages=("pluggy",))')
    shop.edit("return Number(config.value)", "import os; return Number(int.from_bytes(os.urandom(4), 'big'))")
    shop.run()
    monkeypatch.setattr("ptpipe.plan.keys._version", lambda name: "0.0.1")
    monkeypatch.setattr("ptpipe.execution.statement.platform.python_version", lambda: "3.99.0")
    monkeypatch.setattr("ptpipe.host.usable_cpus", lambda: 999)
    changes = " ".join(again(shop, tmp_path).first_cause.changes)
    assert all(word in changes for word in ("packages.pluggy: ", " -> 0.0.1", " -> 3.99.0", "num_cpus: ", " -> 999"))


def test_what_is_not_deterministic_has_no_known_cause(shop, tmp_path):
    shop.write("dice: {uses: toy.dice}\nsum: {uses: toy.add, needs: {a: dice, b: dice}}")
    shop.run()
    result = again(shop, tmp_path)
    assert statuses(result) == {"dice": "different", "sum": "different"}
    assert (result.first_cause.stage_id, result.first_cause.changes) == ("dice", ())


def test_measured_values_are_expected_to_differ_but_decisions_are_not(shop, tmp_path):
    gate = "gate: {uses: toy.gate, needs: {a: clock}, with: {least: %s}}"
    shop.write("one: {uses: toy.make}\nclock: {uses: toy.clock, needs: {a: one}}\n" + gate % 5)
    shop.run()
    result = again(shop, tmp_path)
    assert statuses(result) == {"one": "bit-equal", "clock": "measured", "gate": "measured"}
    assert (result.is_complete, result.first_cause) == (True, None)
    shop.edit("return Number(time.time_ns())", "return Number(1)")
    past = past_run(Store(shop.artifacts), "last")
    result = reproduce(past, past.plan(), tmp_path / "more", None)
    assert statuses(result) == {"one": "bit-equal", "clock": "measured", "gate": "different"}
    assert not result.is_complete


def test_an_undecided_gate_that_was_recorded_as_refused_is_no_other_decision(shop, tmp_path):
    gate = "{least: 3, unsure_at: 1, fail_undecided: true}"
    shop.write(
        "one: {uses: toy.make}\nclock: {uses: toy.clock, needs: {a: one}}\n"
        f"gate: {{uses: toy.gate, needs: {{a: clock}}, with: {gate}}}"
    )
    shop.edit("return Number(time.time_ns())", "ctx.metric(at=time.time_ns()); return Number(a.value)")
    record_path = shop.run().folder / "record.json"
    record = read_document(record_path)
    assert record["stages"][-1]["outcome"] == "undecided"
    record["stages"][-1] |= {"outcome": "refused", "message": "undecided: 1.0 against 3"}  # by a former version
    write_document(record_path, json.dumps(record))
    assert past_run(Store(shop.artifacts), "last").stages["gate"].is_failing_gate
    assert again(shop, tmp_path).is_complete


@pytest.mark.parametrize(
    ("tolerance", "status"),
    [(None, "different"), (0.0, "different"), (0.001, "different"), (0.02, "within tolerance")],
)
def test_a_tolerance_is_of_metrics_absolute_or_relative(shop, tmp_path, tolerance, status):
    shop.edit("return Number(config.value)", "ctx.metric(loss=0.5, rate_s=1.0, steps=3); return Number(config.value)")
    shop.run()
    shop.edit("loss=0.5, rate_s=1.0, steps=3); return Number(config.value)",
              "loss=0.51, rate_s=9.0, steps=4); return Number(config.value + 1e-6)")  # fmt: skip
    result = again(shop, tmp_path, tolerance=tolerance)
    assert statuses(result)["one"] == status
    assert statuses(result)["sum"] == "different", "it has no metrics"
    assert result.first_cause.stage_id == "one"


def test_what_fails_now_is_named_with_its_reason(shop, tmp_path):
    shop.run()
    shop.edit("return Number(config.value)", 'raise StageError("no such luck")')
    result = again(shop, tmp_path)
    assert statuses(result) == dict.fromkeys(["one", "two", "sum", "text"], "not run")
    assert (result.first_cause.stage_id, result.first_cause.changes) == ("one", ("no such luck",))
    assert result.exit_code == ExitCode.FAILED


def test_what_failed_then_is_not_compared(shop, tmp_path):
    shop.write("bad: {uses: toy.fail}\none: {uses: toy.make}")
    from ptpipe.execution.engine import RunOptions

    shop.run(options=RunOptions(keep_going=True))
    result = again(shop, tmp_path)
    assert (statuses(result), result.is_complete) == ({"one": "bit-equal"}, True)


def test_what_cannot_be_run_again(shop, tmp_path):
    result = shop.run()
    store = Store(shop.artifacts)
    with pytest.raises(UsageError, match="there is no run"):
        past_run(store, "zebra")
    (result.folder / "manifest.yaml").write_text("version: 2")
    with pytest.raises(IntegrityError, match=r"manifest\.yaml was altered"):
        past_run(store, "last")
    (result.folder / "manifest.yaml").unlink()
    with pytest.raises(UsageError, match=r"manifest\.yaml cannot be read"):
        past_run(store, "last")
    record = read_document(result.folder / "record.json")
    del record["manifest_sha256"]
    write_document(result.folder / "record.json", json.dumps(record))
    with pytest.raises(UsageError, match="another version"):
        past_run(store, "last")
    shop.write("bad: {uses: toy.fail}")
    shop.run()
    with pytest.raises(UsageError, match="has no result"):
        past_run(store, "last")


def test_a_missing_plugin_is_named(shop):
    shop.run()
    shop.plugin.unlink()
    with pytest.raises(ManifestError, match="there is no file") as raised:
        past_run(Store(shop.artifacts), "last").plan()
    assert raised.value.exit_code == ExitCode.PLUGIN


def test_a_statement_whose_manifest_lacks_its_stages_is_refused(stored):
    path = statement_path(stored.run / "sum" / "number.json")
    content = read_document(path)
    manifest = content["predicate"]["buildDefinition"]["externalParameters"]["manifest"]
    manifest["text"] = "version: 1\nplugins: [./toy.py]\nstages:\n  one: {uses: toy.make}\n"
    write_document(path, json.dumps(content))
    past = past_statement(Statement.read(path), "x")
    past = type(past)(**{**vars(past), "path": stored.result.plan.manifest.path})
    with pytest.raises(IntegrityError, match="no stage of its manifest"):
        past.plan()


def test_statuses_are_words_for_people():
    assert [str(status) for status in Status][:2] == ["bit-equal", "within tolerance"]
