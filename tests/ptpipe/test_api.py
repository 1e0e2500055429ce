"""The same from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import ptpipe
from ptpipe import ExitCode, ManifestError, Outcome, Reporter, RunResult
from ptpipe.execution.engine import RunOptions

STAGES = (
    "one: {uses: toy.make, with: {value: 3}}\npair: {uses: toy.split}\nsum: {uses: toy.add, needs: {a: one, b: one}}"
)


def test_a_run_gives_a_typed_result(project):
    path = project.write(STAGES)
    result = ptpipe.run(str(path), {"one.value": 8}, artifacts=str(project.artifacts))
    assert isinstance(result, RunResult)
    assert result.exit_code is ExitCode.DONE
    assert result.seconds > 0
    assert (result.folder / "record.json").is_file()
    assert result.folder.name == result.run_id
    assert list(result.stages) == ["one", "pair", "sum"]
    assert result.stages["sum"].outcome is Outcome.DONE
    assert result.artifact("sum").value == 16
    assert result.artifact("pair", "low").value == 2
    assert result.artifact("pair", "high").value == 4


def test_an_artifact_that_is_not_there(project):
    project.write(STAGES + "\nbad: {uses: toy.fail, with: {how: error}}")
    result = project.run()
    for arguments in (("nothing",), ("one", "nothing"), ("pair",), ("bad",)):
        with pytest.raises(KeyError):
            result.artifact(*arguments)
    with pytest.raises(KeyError, match="pair has outputs low, high: name one"):
        result.artifact("pair")
    with pytest.raises(KeyError, match="bad has outputs none"):
        result.artifact("bad")


def test_a_plan_can_be_looked_at(project):
    plan = ptpipe.load_plan(project.write(STAGES), {"seed": 5})
    assert isinstance(plan, ptpipe.Plan)
    assert [stage.id for stage in plan.stages] == ["one", "pair", "sum"]
    assert plan["pair"].kind == "toy.split"
    assert plan["one"].config.value == 3
    assert plan.manifest.seed == 5
    with pytest.raises(KeyError):
        plan["nothing"]
    assert not project.artifacts.exists(), "looking writes nothing"


def test_mistakes_are_raised_with_every_problem(project):
    project.write("one: {uses: toy.mkae}\ntwo: {uses: toy.make, with: {valeu: 1}}")
    with pytest.raises(ManifestError) as raised:
        ptpipe.run(project.manifest, artifacts=project.artifacts)
    assert len(raised.value.problems) == 2
    assert raised.value.exit_code is ExitCode.USAGE
    with pytest.raises(ManifestError, match="cannot read"):
        ptpipe.run("absent.yaml")
    assert not Path("artifacts").exists() or not project.artifacts.exists()


def test_failing_raises_nothing(project):
    project.write("bad: {uses: toy.fail, with: {how: bug}}")
    result = project.run()
    assert result.exit_code is ExitCode.FAILED
    assert result.stages["bad"].outcome is Outcome.FAILED


def test_observers_and_options_can_be_given(project):
    class Ear(Reporter):
        heard = ()

        def stage_finished(self, event):
            self.heard = (*self.heard, (event.stage_id, str(event.outcome)))

    project.write(STAGES)
    project.run()
    ear = Ear()
    ptpipe.run(project.manifest, artifacts=project.artifacts, options=RunOptions(fresh=("pair",)), reporters=[ear])
    assert ear.heard == (("one", "cached"), ("pair", "done"), ("sum", "cached"))


def test_a_plan_can_be_run_again_in_the_same_process(project):
    project.write(STAGES)
    assert [project.run({"one.value": value}).artifact("sum").value for value in (1, 2, 1)] == [2, 4, 2]
