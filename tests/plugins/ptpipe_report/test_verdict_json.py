from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from importlib.resources import files

import pytest
from click.testing import CliRunner
from hypothesis import given
from jsonschema import Draft202012Validator, ValidationError

from ptpipe import Location, Outcome
from ptpipe.cli.schema import schema as schema_command
from ptpipe_report import VerdictReport
from ptpipe_report.verdict_json import verdict

from .conftest import delivering
from .strange_runs import runs

AT = datetime(2026, 7, 1, 12, 0, 3, tzinfo=UTC)
SCHEMA = json.loads((files("ptpipe_report") / "verdict.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def written(script, tmp_path, stages, **ending):
    script.play([VerdictReport()], stages, **ending)
    return json.loads((tmp_path / "verdict.json").read_text(), parse_constant=pytest.fail)


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@given(runs())
def test_whatever_a_run_has_in_it_fits_the_schema(run) -> None:
    content = json.loads(json.dumps(verdict(*run, AT), allow_nan=False))
    VALIDATOR.validate(content)
    assert content.keys() == SCHEMA["properties"].keys()
    for name, each in {
        "gates": SCHEMA["properties"]["gates"]["items"],
        "failed_stages": SCHEMA["$defs"]["stage_without_result"],
        "skipped_stages": SCHEMA["$defs"]["stage_without_result"],
    }.items():
        known = {*SCHEMA["$defs"]["stage"]["properties"], *each["properties"]}
        assert all(item.keys() == known for item in content[name])


def test_what_does_not_fit_is_found(script, tmp_path) -> None:
    content = written(script, tmp_path, script.mnist())
    VALIDATOR.validate(content)
    for wrong in ({"version": 2}, {"gates": [{}]}, {"exit_code": 3.5}, {"ending": "passed"}):
        with pytest.raises(ValidationError):
            VALIDATOR.validate(content | wrong)


def test_the_whole_file(script, tmp_path) -> None:
    stages = script.mnist()
    stages[-1].outputs["output"]["summary"] |= {"drop": 0.003, "ratio": float("nan")}
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain" / "model.onnx").write_bytes(b"model")
    statement = {"subject": [{"name": "model.onnx", "digest": {"sha256": "5" * 64}}]}
    (tmp_path / "pretrain" / "model.onnx.intoto.json").write_text(json.dumps(statement))
    stages[1] = delivering(stages[1], tmp_path / "pretrain" / "model.onnx")
    script.overrides = ("pretrain.epochs=3",)
    content = written(script, tmp_path, stages)
    assert content.pop("finished_at") > content.pop("started_at")
    assert content.pop("ptpipe_version")
    assert content == {
        "version": 1,
        "run_id": "run-1",
        "name": "mnist-qat",
        "manifest": "manifests/mnist_qat.yaml",
        "seed": 7,
        "overrides": ["pretrain.epochs=3"],
        "seconds": 187.3,
        "exit_code": 0,
        "ending": "done",
        "gates": [
            {
                "stage_id": "gate",
                "kind": "gate.accuracy",
                "key": "ab" * 32,
                "seconds": 0.004,
                "location": {"path": "manifests/mnist_qat.yaml", "line": 13, "column": 3},
                "output": "output",
                "decision": "passed",
                "reason": "onnx loses 0.30 points (at most 0.30)",
                "fails_run": False,
                "facts": {"drop": 0.003, "ratio": "NaN"},
            }
        ],
        "failed_stages": [],
        "skipped_stages": [],
        "deliverables": [
            {
                "stage_id": "pretrain",
                "path": "pretrain/model.onnx",
                "sha256": "5" * 64,
                "size_bytes": 5,
            }
        ],
    }


DELIVERS = """
    @classmethod
    def deliverables(cls, folder):
        return ("number.json",)

    def summary(self) -> dict[str, object]:"""


def test_digests_and_sizes_are_those_of_the_files(project) -> None:
    project.edit("\n    def summary(self) -> dict[str, object]:", DELIVERS)
    project.write("one: {uses: toy.make, with: {value: 3}}\nhalf: {uses: toy.split}")
    for _ in range(2):  # the second time from the store
        folder = project.run(reporters=[VerdictReport()]).folder
        content = json.loads((folder / "verdict.json").read_text())
        VALIDATOR.validate(content)
        files = {each["path"]: (folder / each["path"]).read_bytes() for each in content["deliverables"]}
        assert list(files) == ["one/number.json", "half/low/number.json", "half/high/number.json"]
        for each in content["deliverables"]:
            expected = (hashlib.sha256(files[each["path"]]).hexdigest(), len(files[each["path"]]))
            assert (each["sha256"], each["size_bytes"]) == expected


def test_a_failed_and_an_interrupted_run_have_one_too(script, tmp_path) -> None:
    stages = [
        script.stage("pretrain", "train.supervised", Outcome.FAILED, message="loss is NaN at step 31"),
        script.stage("gate", "gate.size", Outcome.SKIPPED, message="needs pretrain"),
    ]
    content = written(script, tmp_path, stages, exit_code=1)
    assert (content["exit_code"], content["ending"], content["gates"]) == (1, "failed", [])
    (failed,) = content["failed_stages"]
    assert (failed["stage_id"], failed["message"]) == ("pretrain", "loss is NaN at step 31")
    (skipped,) = content["skipped_stages"]
    assert (skipped["stage_id"], skipped["message"]) == ("gate", "needs pretrain")
    assert written(script, tmp_path, stages, exit_code=130, interrupted=True)["ending"] == "interrupted"


@pytest.mark.parametrize(
    ("decision", "fail_undecided", "fails"),
    [("refused", False, True), ("undecided", True, True), ("undecided", False, False), ("passed", True, False)],
)
def test_it_says_which_gates_fail_the_run(script, tmp_path, verdict, decision, fail_undecided, fails) -> None:
    outputs = verdict(decision, "why")
    outputs["output"]["summary"]["fail_undecided"] = fail_undecided
    (gate,) = written(script, tmp_path, [script.stage("gate", "gate.size", outputs=outputs)])["gates"]
    assert (gate["decision"], gate["fails_run"], gate["reason"]) == (decision, fails, "why")


def test_a_gate_whose_location_is_not_known_is_at_the_first_line(script) -> None:
    stages = script.mnist()
    started = script.started(stages, locations=())
    content = verdict(started, script.ended(stages), AT)
    assert content["gates"][0]["location"] == {"path": script.manifest_path, "line": 1, "column": 1}
    assert started.locations == () and script.started(stages).locations[0] == Location(script.manifest_path, 10, 3)


def test_the_schema_is_printed() -> None:
    printed = CliRunner().invoke(schema_command, ["verdict"])
    assert json.loads(printed.output) == SCHEMA
