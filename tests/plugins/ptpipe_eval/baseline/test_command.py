"""`ptpipe baseline accept` and `ptpipe gate`, on runs of a manifest whose comparison is made up."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from ptpipe import Decision, IntegrityError, ManifestError, RunOptions, RunResult, UsageError, run
from ptpipe_eval.baseline.command import baseline, gate
from ptpipe_eval.baseline.file import Baseline, packed_scores

PLUGIN = Path(__file__).parents[1] / "made_up_runs.py"
MANIFEST = f"""\
version: 1
name: toy
plugins: [{PLUGIN}]
stages:
  data: {{uses: toy.text}}
  float: {{uses: toy.text}}
  int8: {{uses: toy.text}}
  other: {{uses: toy.text}}
  compare: {{uses: toy.compare, needs: {{models: [float, int8, other], data: data}}}}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with artifacts that all tests share."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture
def made(project, tmp_path, monkeypatch):
    """Run a manifest, with these options of its comparison, and return the result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PTPIPE_ARTIFACTS", str(project / "artifacts"))

    def make(manifest: str = MANIFEST, exit_code: int = 0, **options: object) -> RunResult:
        (project / "m.yaml").write_text(manifest)
        overrides = {name.replace("__", "."): value for name, value in options.items() if "__" in name}
        overrides |= {f"compare.{name}": value for name, value in options.items() if "__" not in name}
        quiet = RunOptions(verbosity=-2)
        ended = run(project / "m.yaml", overrides, artifacts=project / "artifacts", options=quiet)
        assert ended.exit_code == exit_code
        return ended

    return make


@pytest.fixture
def accepted(made):
    """The file of `int8` of a first run, which has 12 wrong beside the 20 of `float`."""
    made()
    assert call(baseline, "accept", "last", "--model", "int8").return_value == 0
    return Path("baselines/int8.json")


def call(command, *arguments: str):
    return CliRunner().invoke(command, arguments, standalone_mode=False)


def judge(file: Path, *options: str):
    """The exit code and the JSON of `ptpipe gate last`."""
    ended = call(gate, "last", "--baseline", str(file), "--max-drop", "0.01", "--json", *options)
    if ended.exception:
        raise ended.exception
    return ended.return_value, json.loads(ended.stdout)


class TestAccept:
    def test_the_file_is_small_and_has_the_facts(self, accepted, made) -> None:
        assert accepted.stat().st_size < 6000
        found = Baseline.read(accepted)
        assert (found.model.name, found.model.format, found.model.size_bytes) == ("int8", "onnx int8", 100)
        assert (found.data.name, found.data.split, found.data.num_samples) == ("mnist", "test", 1000)
        assert len({found.model.digest, found.data.digest, found.data.ids_sha256}) == 2, "the toy's model is its data"
        assert [(metric.name, metric.value) for metric in found.metrics] == [
            ("accuracy", 0.968),
            ("loss", pytest.approx(0.1658)),
        ]
        assert int((~found.right["accuracy"]).sum()) == 32
        assert found.scores["loss"].mean() == pytest.approx(0.1658, rel=1e-3)
        assert (found.run.manifest, found.run.stage, found.run.measured_at) == ("toy", "compare", "2026-01-02")
        assert found.environment["machine"]["processor"] and found.accepted_at.startswith("20")

    def test_the_order_of_the_samples_does_not_matter(self, accepted, made) -> None:
        first = Baseline.read(accepted)
        made(reverse=True)
        call(baseline, "accept", "last", "--model", "int8", "-o", "other.json")
        second = Baseline.read(Path("other.json"))
        assert (second.data, second.metrics) == (first.data, first.metrics)

    def test_what_is_there_is_replaced_by_force_alone(self, accepted, made) -> None:
        before = accepted.read_bytes()
        ended = call(baseline, "accept", "last", "--model", "int8", "--json")
        assert json.loads(ended.stdout)["written"] is False and accepted.read_bytes() == before
        made(lost=[15, 0], int8__text="y")
        ended = call(baseline, "accept", "last", "--model", "int8")
        assert isinstance(ended.exception, UsageError)
        assert str(ended.exception) == "baselines/int8.json has another baseline (--force replaces it)"
        assert [line.split(":")[0] for line in ended.stderr.splitlines()] == ["model", "accuracy", "loss"]
        assert "accuracy: 96.800 % -> 96.500 %" in ended.stderr
        assert accepted.read_bytes() == before
        ended = call(baseline, "accept", "last", "--model", "int8", "--force")
        assert ended.stdout.startswith("wrote baselines/int8.json: int8 (onnx int8, 100 bytes, ")
        assert Baseline.read(accepted).metrics[0].value == 0.965

    def test_a_file_of_something_else_is_not_replaced(self, made) -> None:
        made()
        Path("notes.json").write_text("{}")
        ended = call(baseline, "accept", "last", "--model", "int8", "-o", "notes.json")
        assert isinstance(ended.exception, UsageError) and Path("notes.json").read_text() == "{}"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ((), "the comparison has several models: choose one by --model, int8 or other"),
            (("--model", "itn8"), "'itn8' is not in the comparison, which has float, int8, other .*'int8'"),
            (("--model", "int8", "--stage", "compar"), "'compar' is no comparison in run .*, which has compare .*mean"),
        ],
    )
    def test_which_model_must_be_clear(self, made, options, message) -> None:
        made()
        with pytest.raises(UsageError, match=message):
            raise call(baseline, "accept", "last", *options).exception
        assert not Path("baselines").exists()

    def test_the_only_model_of_a_comparison(self, made) -> None:
        made(MANIFEST.replace("[float, int8, other]", "[float]"), lost=[])
        assert call(baseline, "accept", "last").return_value == 0
        assert Baseline.read(Path("baselines/float.json")).model.name == "float"

    def test_a_run_without_a_comparison(self, made) -> None:
        made(MANIFEST[: MANIFEST.index("  compare")])
        with pytest.raises(UsageError, match=r"^run .* has no comparison of quality: eval.compare makes one$"):
            raise call(baseline, "accept", "last").exception

    def test_samples_that_are_not_known(self, made) -> None:
        made(is_known=False)
        with pytest.raises(UsageError, match=r"is not known for accuracy, loss: these can't be a baseline"):
            raise call(baseline, "accept", "last", "--model", "int8").exception

    def test_no_samples(self, made) -> None:
        made(total=0, is_known=False)
        with pytest.raises(UsageError, match="the comparison has no samples"):
            raise call(baseline, "accept", "last", "--model", "int8").exception


class TestGate:
    def test_the_same_run_passes(self, accepted) -> None:
        code, found = judge(accepted)
        assert (code, found["decision"], found["notes"]) == (0, "passed", [])
        assert found["reason"] == (
            "int8 loses 0.00 points of accuracy against the accepted int8 (drop at most 0.27 with 95 % confidence), "
            "allowed 1.00: 96.80 % vs 96.80 %, 0 lost and 0 gained of 1,000 samples"
        )
        assert (found["candidate"], found["baseline"], found["baseline_file"]) == (
            "int8",
            "the accepted int8",
            str(accepted),
        )

    @pytest.mark.parametrize(
        ("lost", "options", "code", "decision"),
        [
            (13, (), 0, Decision.PASSED),
            (60, (), 3, Decision.REFUSED),
            (20, (), 0, Decision.UNDECIDED),
            (25, (), 4, Decision.UNDECIDED),
            (25, ("--on-inconclusive", "warn"), 0, Decision.UNDECIDED),
            (20, ("--on-inconclusive", "fail"), 4, Decision.UNDECIDED),
            (20, ("--confidence", "0.6"), 0, Decision.PASSED),
        ],
    )
    def test_exit_codes(self, accepted, made, lost, options, code, decision) -> None:
        made(lost=[lost, 0])
        ended, found = judge(accepted, *options)
        assert (ended, found["decision"]) == (code, decision)
        assert f"{lost - 12} lost and 0 gained of 1,000 samples" in found["reason"]

    def test_samples_are_paired_by_id(self, accepted, made) -> None:
        made(lost=[13, 0], reverse=True)
        assert "1 lost and 0 gained" in judge(accepted)[1]["reason"]

    def test_several_models_must_all_pass(self, accepted, made) -> None:
        made(lost=[13, 60])
        code, found = judge(accepted, "--model", "int8", "--model", "other")
        assert code == 3 and found["reason"].startswith("1 of 2 candidates refused: other loses 4.80 points")
        assert [row["decision"] for row in found["candidates"]] == ["passed", "refused"]

    def test_a_model_that_is_named_twice(self, accepted, made) -> None:
        made(lost=[13, 60])
        code, found = judge(accepted, "--model", "int8", "--model", "int8")
        assert (code, found["candidate"]) == (0, "int8")

    @pytest.mark.parametrize("drop", ["nan", "inf"])
    def test_a_drop_is_a_finite_number(self, accepted, drop) -> None:
        ended = call(gate, "last", "--baseline", str(accepted), "--max-drop", drop)
        assert isinstance(ended.exception, click.UsageError)
        assert ended.exception.format_message() == f"Invalid value for '--max-drop': {drop} is not a finite number"

    def test_a_metric_that_is_a_mean(self, accepted, made) -> None:
        assert judge(accepted, "--metric", "loss")[1]["drop_high"] < 0.01
        made(extra_loss=0.05)
        code, found = judge(accepted, "--metric", "loss")
        assert code == 3 and found["worse_by"] == pytest.approx(0.05)
        assert found["drop_low"] == pytest.approx(0.05, rel=0.01) == found["drop_high"]

    def test_another_data_set_of_the_same_ids_is_noted(self, accepted, made) -> None:
        made(data__text="new")
        (note,) = judge(accepted)[1]["notes"]
        assert note.startswith("the data set differs from the baseline's, with the same ids")
        shown = call(gate, "last", "--baseline", str(accepted), "--max-drop", "0.01")
        assert shown.stderr == f"note: {note}\n" and shown.stdout.startswith("passed: int8 loses 0.00 points")

    @pytest.mark.parametrize("change", [{"prefix": "b"}, {"total": 999}])
    def test_other_samples_are_refused(self, accepted, made, change) -> None:
        made(**change)
        message = (
            "the baseline was accepted on 1,000 samples of mnist, split test, and the comparison has [0-9,]+ of mnist, "
            "split test, with other ids: they must be the same samples"
        )
        with pytest.raises(UsageError, match=message):
            judge(accepted)

    def test_other_targets_of_the_same_ids_are_refused(self, made) -> None:
        made(targets_sha256="a" * 64)
        call(baseline, "accept", "last", "--model", "int8")
        file = Path("baselines/int8.json")
        made()
        assert judge(file)[0] == 0, "a former comparison, of whose targets nothing is known"
        made(targets_sha256="a" * 64, data__text="new")
        assert judge(file)[1]["notes"] == [
            "the data set differs from the baseline's, with the same ids: inputs may have changed"
        ]
        made(targets_sha256="b" * 64)
        with pytest.raises(UsageError, match="the targets of mnist, split test, are others than when the baseline was"):
            judge(file)
        ended = call(baseline, "accept", "last", "--model", "int8")
        assert "targets: those of 1,000 samples of mnist, test" in ended.stderr

    def test_what_cannot_be_compared(self, accepted, made) -> None:
        with pytest.raises(UsageError, match=r"has no f1, but accuracy, loss"):
            judge(accepted, "--metric", "f1")
        with pytest.raises(UsageError, match=r"'x' is not in the comparison"):
            judge(accepted, "--model", "x")
        made(has_loss=False)
        code, found = judge(accepted, "--metric", "loss", "--on-inconclusive", "fail")
        assert (code, found["decision"]) == (4, "undecided") and "its interval is not known" in found["reason"]
        made(is_known=False)
        with pytest.raises(UsageError, match=r"the baseline's accuracy, loss can't be compared"):
            judge(accepted)

    def test_a_metric_without_values_of_samples(self, made) -> None:
        made(has_loss=False)
        ended = call(baseline, "accept", "last", "--model", "int8")
        assert "note: no drop in loss can be judged against it; choose the metric accuracy" in ended.stderr
        file = Path("baselines/int8.json")
        assert judge(file)[0] == 0
        message = "no drop in loss can be judged against an accepted model: .* choose the metric accuracy"
        with pytest.raises(UsageError, match=message):
            judge(file, "--metric", "loss")
        gate = "  gate: {uses: gate.quality, with: {candidate: int8, metric: loss, max_drop: 0.1, baseline_file: %s}}"
        failed = made(MANIFEST + gate % file, exit_code=1)
        assert "no drop in loss can be judged" in failed.stages["gate"].message


class TestFile:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "cannot read the baseline b.json: No such file"),
            ("{", "is no baseline"),
            ("[1]", "is no baseline"),
            ('{"a": 1}', "is no baseline"),
            ('{"ptpipe_baseline": 2}', "another version of ptpipe"),
        ],
    )
    def test_what_is_no_baseline(self, tmp_path, monkeypatch, content, message) -> None:
        monkeypatch.chdir(tmp_path)
        if content is not None:
            Path("b.json").write_text(content)
        with pytest.raises(UsageError, match=message):
            judge(Path("b.json"))

    def test_what_was_edited(self, accepted) -> None:
        text = accepted.read_text()
        accepted.write_text(text.replace("0.968", "0.868"))
        with pytest.raises(IntegrityError, match=r"^baselines/int8.json was altered: accept a model again"):
            judge(accepted)
        accepted.write_bytes(text.replace("\n", "\r\n").encode())
        assert judge(accepted)[0] == 0, "version control may change the ends of lines"

    def test_values_of_another_number_of_samples(self, accepted) -> None:
        found = Baseline.read(accepted)
        other = found.model_copy(update={"data": found.data.model_copy(update={"num_samples": 10})})
        other.write(accepted)
        with pytest.raises(IntegrityError, match="accuracy: not the values of 10 samples"):
            judge(accepted)

    def test_scores_that_are_no_numbers(self, accepted) -> None:
        found = Baseline.read(accepted)
        accuracy, loss = found.metrics
        loss = loss.model_copy(update={"scores": packed_scores(np.full(1000, np.nan, np.float16))})
        found.model_copy(update={"metrics": (accuracy, loss)}).write(accepted)
        with pytest.raises(IntegrityError, match="a score is not finite"):
            judge(accepted)


def test_a_gate_in_a_manifest(accepted, made) -> None:
    options = "{candidate: other, max_drop: 0.01, baseline_file: baselines/int8.json}"
    manifest = f"{MANIFEST}  gate: {{uses: gate.accuracy, with: {options}}}\n"
    verdict = made(manifest).stages["gate"].outputs["output"]["summary"]
    assert (verdict["decision"], verdict["baseline"]) == ("passed", "the accepted int8")
    assert verdict["reason"].startswith("other gains 1.20 points of accuracy against the accepted int8 (gain at least")
    assert made(manifest).stages["gate"].outcome == "cached"
    call(baseline, "accept", "last", "--model", "other", "-o", str(accepted), "--force")
    again = made(manifest).stages["gate"]
    assert again.outcome == "done" and again.outputs["output"]["summary"]["baseline"] == "the accepted other"
    accepted.unlink()
    with pytest.raises(ManifestError, match=r"gate: there is no file baselines/int8.json: `ptpipe baseline accept` "):
        made(manifest)
