"""`ptpipe seeds`, on a manifest whose comparison is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ptpipe import UsageError
from ptpipe_eval.seeds.command import seeds

PLUGIN = Path(__file__).parents[1] / "made_up_runs.py"
STAGES = f"""\
version: 1
name: toy
seed: 3
plugins: [{PLUGIN}]
stages:
  data: {{uses: toy.text}}
  float: {{uses: toy.text}}
  int8: {{uses: toy.text}}
  other: {{uses: toy.text}}
  compare: {{uses: toy.compare, needs: {{models: [float, int8, other], data: data}}, with: OPTIONS}}
  gate: {{uses: gate.accuracy, with: GATE}}
  size: {{uses: gate.size, with: {{candidate: int8, max_bytes: 1}}}}
"""
SEVERAL = {"lost": [12, 0], "lost_by_seed": [0, 2, 4], "total": 20_000, "has_loss": False}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture
def called(tmp_path, artifacts):
    """The command, with these options of the comparison and the gate."""

    def call(gate: str, *rest: str, name: str = "gate", **options: object):
        (tmp_path / "m.yaml").write_text(STAGES.replace("OPTIONS", json.dumps(options)).replace("GATE", gate))
        arguments = [str(tmp_path / "m.yaml"), name, "--artifacts", str(artifacts), *rest]
        return CliRunner().invoke(seeds, arguments, standalone_mode=False)

    return call


def test_the_mean_over_seeds_is_judged(called) -> None:
    ended = called("{candidate: int8, max_drop: 0.003}", "--num-seeds", "3", "--json", **SEVERAL)
    assert ended.return_value == 0
    found = json.loads(ended.stdout)
    assert [(row["seed"], row["drop"]) for row in found["runs"]] == [(3, 0.0006), (4, 0.0007), (5, 0.0008)]
    assert len({row["run"] for row in found["runs"]}) == 3
    assert (found["decision"], found["seeds"], found["drop"]) == ("passed", [3, 4, 5], pytest.approx(0.0007))
    low, high = (f"{100 * found[name]:.3f}" for name in ("drop_low", "drop_high"))
    assert found["reason"] == (
        "over all seeds, of which 3 were run, int8 is on average 0.070 points worse in accuracy than float (between "
        f"{low} and {high} with 95 % confidence; by seed, 0.060 to 0.080), allowed 0.30"
    )


def test_what_is_shown(called) -> None:
    ended = called("{candidate: int8, max_drop: 0.003}", "--num-seeds", "3", **SEVERAL)
    lines = ended.stdout.splitlines()
    assert lines[0].split()[:3] == ["seed", "run", "candidate"]
    assert [line.split()[0] for line in lines[1:4]] == ["3", "4", "5"]
    assert lines[4].startswith("passed: over all seeds, of which 3 were run, int8 is on average 0.070 points worse")
    assert ended.stderr.count("seed 4") == 1


@pytest.mark.parametrize(
    ("gate", "by_seed", "code", "decision"),
    [
        ("{candidate: int8, max_drop: 0.003}", [0, 300, 600], 4, "undecided"),
        ("{candidate: int8, max_drop: 0.003, on_inconclusive: warn}", [0, 300, 600], 0, "undecided"),
        ("{candidate: int8, max_drop: 0.003}", [290, 300, 310], 3, "refused"),
        ("{candidates: [int8, other], max_drop: 0.003}", [290, 300, 310], 3, "refused"),
    ],
)
def test_exit_codes(called, gate, by_seed, code, decision) -> None:
    ended = called(gate, "--num-seeds", "3", "--json", **SEVERAL | {"lost_by_seed": by_seed})
    assert (ended.return_value, json.loads(ended.stdout)["decision"]) == (code, decision)


@pytest.mark.parametrize(
    ("gate", "name", "message"),
    [
        ("{candidate: int8, max_drop: 0.003}", "gat", r"'gat' is no gate.accuracy or gate.quality; .* mean 'gate'"),
        ("{candidate: int8, max_drop: 0.003}", "size", "'size' is no gate.accuracy"),
        ("{candidate: int8, min_accuracy: 0.9}", "gate", "gate has no max_drop to judge by"),
        ("{candidate: int8, max_drop: 0.1, baseline_file: x}", "gate", "there are no other seeds"),
    ],
)
def test_gates_that_speak_of_no_drop(called, gate, name, message) -> None:
    with pytest.raises(UsageError, match=message):
        raise called(gate, name=name).exception


def test_a_run_that_fails_ends_it(called) -> None:
    ended = called("{candidate: int8, max_drop: 0.003}", lost=[12])
    assert (ended.return_value, ended.stdout) == (1, "")


def test_samples_that_are_not_known(called) -> None:
    with pytest.raises(UsageError, match="gate: the drop of int8 in accuracy has no interval"):
        raise called("{candidate: int8, max_drop: 0.003}", "--num-seeds", "2", is_known=False).exception
