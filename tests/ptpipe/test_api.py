"""The same from Python."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

import ptpipe
from ptpipe import ExitCode, ManifestError, Nodes, Outcome, Reporter, RunOptions, RunResult, UsageError

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
    assert result.artifact("pair", "high", type=ptpipe.Artifact).value == 4
    with pytest.raises(TypeError, match=r"high of pair is a Number, not a Verdict$"):
        result.artifact("pair", "high", type=ptpipe.Verdict)


def test_a_result_has_the_figures_of_every_stage_and_what_gates_decided(project):
    project.write(STAGES + "\ngate: {uses: toy.gate, needs: {a: sum}, with: {least: 5}}\nbad: {uses: toy.fail}")
    project.run()
    result = project.run({"gate.least": 7})
    assert result.metrics["one"] == {"value": 3, "seed": 0}, "of a cached stage too"
    assert (result.metrics["sum"], result.metrics["bad"]) == ({}, {"before": 1})
    (verdict,) = result.verdicts("gate")
    assert (verdict.decision, verdict.reason) == (ptpipe.Decision.REFUSED, "6.0 against 7.0")
    with pytest.raises(ValueError, match=r"m.yaml has no gate 'gat', but gate \(did you mean 'gate'\?\)$"):
        result.verdicts("gat")


def test_a_result_is_shown_on_one_short_line(project):
    project.write(STAGES)
    assert re.fullmatch(r"RunResult\(run_id='[^']+', exit_code=<ExitCode.DONE: 0>, [^,]+, [^,]+\)", repr(project.run()))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"one.value": Fraction(3)}, r"-s one.value: the value, of type Fraction, is not JSON \(.*\)(; say .*)?"),
        ({3: 3}, "-s 3: it is no text"),
        (["one.value=3"], "overrides are a mapping, {'STAGE.OPTION': value}, not a list"),
    ],
)
def test_overrides_that_are_no_json(project, overrides, message):
    project.write(STAGES)
    with pytest.raises(ManifestError, match=f"^{message}$"):
        project.plan(overrides)


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


def test_a_plan_can_be_run_and_bound_again_with_overrides(project):
    project.write(STAGES)
    plan = ptpipe.load_plan(project.manifest, {"one.value": 4})
    assert ptpipe.load_plan(plan) is plan
    again = ptpipe.load_plan(plan, {"one.value": 5})
    assert (plan["one"].config.value, again["one"].config.value) == (4, 5)
    assert again.vocabulary is plan.vocabulary
    result = ptpipe.run(plan.subplan("one"), artifacts=project.artifacts)
    assert (list(result.stages), result.artifact("one").value) == (["one"], 4)
    assert ptpipe.run(plan, {"one.value": 6}, artifacts=project.artifacts).artifact("sum").value == 12
    with pytest.raises(ManifestError, match="unknown option"):
        ptpipe.load_plan(plan, {"one.valeu": 5})


def test_a_composed_manifest_is_run_and_can_be_run_again(project, monkeypatch):
    monkeypatch.chdir(project.folder)
    stages = {"one": {"uses": "toy.make", "with": {"value": 3}}, "pair": {"uses": "toy.split"}}
    content = {"version": 1, "name": "composed", "plugins": ["./toy.py"], "stages": stages}
    result = ptpipe.run(content, {"one.value": 4}, artifacts=project.artifacts)
    assert (result.artifact("one").value, result.run_id.split("-")[2]) == (4, "composed")
    kept = result.folder / "manifest.yaml"
    record = json.loads((result.folder / "record.json").read_text())
    assert record["manifest"] == str(kept)
    monkeypatch.chdir("/")
    again = ptpipe.run(kept, {"one.value": 4}, artifacts=project.artifacts)
    assert project.outcomes(again) == {"one": "cached", "pair": "cached"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"version": 1, "stages": {"one": {"uses": "toy.mkae"}}}, "one: unknown stage kind 'toy.mkae'"),
        ({"version": 1}, "stages: must be a mapping from stage ids to stages"),
        ({"version": 1, "stages": {1, 2}}, "the manifest's content is not JSON"),
        ({"version": 1, "seed": float("nan")}, "the manifest's content is not JSON"),
    ],
)
def test_problems_of_a_composed_manifest_have_no_place(project, content, problem):
    with pytest.raises(ManifestError) as raised:
        ptpipe.load_plan(content)
    assert raised.value.problems[0].message.startswith(problem)
    assert {found.location for found in raised.value.problems} == {None}


NODES_PLUGIN = """
from ptpipe import ExitCode, LogLine, Nodes, hookimpl

@hookimpl
def ptpipe_nodes():
    return Nodes(num=3, rank=RANK, started=True)

@hookimpl
def ptpipe_run_on_nodes(plan, store, run):
    print("first node of", plan.manifest.name, store.root.name)
    return run()

@hookimpl
def ptpipe_join_run(nodes, tell):
    tell(LogLine("", f"node {nodes.rank} of {nodes.num} joined"))
    tell(LogLine("one", "a stage's own line"))
    return ExitCode.REFUSED
"""


def write_nodes_plugin(project, rank):
    (project.folder / "nodes.py").write_text(NODES_PLUGIN.replace("RANK", str(rank)), encoding="utf-8")
    project.write(STAGES, head="name: toy\nplugins: [./toy.py, ./nodes.py]")


def test_a_plugin_runs_a_manifest_on_the_nodes_that_it_finds(project, run_cli):
    write_nodes_plugin(project, rank=0)
    ended = run_cli("run", "m.yaml", "--json", alone=True)
    assert ended.code == 0, ended.err
    assert "first node of toy artifacts\n" in ended.err and ended.out.startswith("{")
    options = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "localhost:1"]
    assert "node 1 of 2 joined" in run_cli("run", "m.yaml", *options, alone=True).err, (
        "options come before what it finds"
    )


def test_a_plugin_joins_the_run_of_node_0(project, run_cli):
    write_nodes_plugin(project, rank=2)
    ended = run_cli("run", "m.yaml", alone=True)
    assert (ended.code, ended.out, ended.err) == (ExitCode.REFUSED, "", "node 2 of 3 joined\n")
    with pytest.raises(UsageError, match="node 2 joins the run of node 0"):
        project.run(options=RunOptions(nodes=Nodes(3, 2)))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_nodes_need_a_plugin(project, run_cli, rank):
    project.write(STAGES)
    options = ["--nnodes", "2", "--node-rank", rank, "--rdzv-endpoint", "localhost:1"]
    ended = run_cli("run", "m.yaml", *options, alone=True)
    assert (ended.code, ended.err) == (2, "ptpipe: no loaded plugin runs a manifest on several nodes\n")


def test_failing_raises_nothing(project):
    project.write("bad: {uses: toy.fail, with: {how: bug}}")
    result = project.run()
    assert result.exit_code is ExitCode.FAILED
    assert result.stages["bad"].outcome is Outcome.FAILED


def test_reporters_and_options_can_be_given(project):
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


def test_what_a_run_would_find_cached(project):
    project.write(STAGES)
    before = ptpipe.cache_status(project.plan(), artifacts=project.artifacts)
    assert [(status.stage_id, status.is_cached, status.reasons) for status in before] == [
        (stage_id, False, ("no earlier result",)) for stage_id in ("one", "pair", "sum")
    ]
    assert not project.artifacts.exists(), "looking writes nothing"
    ended = project.run()
    after = ptpipe.cache_status(project.plan(), artifacts=project.artifacts, fresh=["pair"])
    assert [status.is_cached for status in after] == [True, False, True]
    assert [status.key.digest for status in after] == [event.key for event in ended.stages.values()]
    with pytest.raises(ManifestError, match="there is no stage 'pear'"):
        ptpipe.cache_status(project.plan(), artifacts=project.artifacts, fresh=["pear"])
