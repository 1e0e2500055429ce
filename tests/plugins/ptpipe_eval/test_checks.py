"""Gates and baselines that name nothing are found when the manifest is bound, by the real binder."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ptpipe import ExitCode, ManifestError, Plan, load_plan
from ptpipe_eval import ptpipe_check_results

PARTS = '''
from __future__ import annotations
from typing import NamedTuple
from ptpipe import Context, StageConfig, hookimpl, stage
from ptpipe_torch import Data, Deployable, Ranges

class None_(StageConfig):
    """No options."""

class Both(NamedTuple):
    model: Deployable
    ranges: Ranges
    twin: Deployable

@stage("toy.data")
def data(config: None_, ctx: Context) -> Data: ...

@stage("toy.model")
def model(config: None_, ctx: Context, data: Data) -> Deployable: ...

@stage("toy.both")
def both(config: None_, ctx: Context, data: Data) -> Both: ...

@hookimpl
def ptpipe_stages():
    return [data, model, both]
'''

HEAD = """\
version: 1
name: toy
plugins: [./parts.py]
stages:
  data: {uses: toy.data}
  float: {uses: toy.model}
  int8: {uses: toy.model}
  both: {uses: toy.both}
"""
COMPARE = "compare: {uses: eval.compare, needs: {models: [float, int8, both.twin]}}"


@pytest.fixture
def bound(tmp_path: Path):
    """The plan of a manifest with these stages below the toy ones; line 9 is the first of them."""

    def bind(*lines: str) -> Plan:
        (tmp_path / "parts.py").write_text(PARTS)
        path = tmp_path / "toy.yaml"
        path.write_text(HEAD + textwrap.indent("\n".join(lines), "  ") + "\n")
        return load_plan(path)

    return bind


def problems(bound, *lines: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        bound(*lines)
    assert caught.value.exit_code is ExitCode.USAGE
    return [str(problem).rpartition("toy.yaml:")[2] for problem in caught.value.problems]


def test_compared_models_may_be_judged(bound) -> None:
    plan = bound(
        "compare: {uses: eval.compare, needs: {models: [float, int8, both.twin]}, with: {baseline: int8}}",
        "accuracy: {uses: gate.accuracy, with: {candidate: int8, max_drop: 0.003}}",
        "quality: {uses: gate.quality, with: {candidate: int8, metric: loss, max_drop: 0.1}}",
        "size: {uses: gate.size, with: {candidate: both.twin, max_ratio: 0.27}}",
        "latency: {uses: gate.latency, with: {candidate: float, max_ms: 1, batch_size: 32, threads: all}}",
    )
    assert [stage.kind for stage in plan.stages][-1] == "gate.latency"


def test_a_baseline_that_is_not_compared(bound) -> None:
    line = "compare: {uses: eval.compare, needs: {models: [float, int8]}, with: {baseline: flaot}}"
    (problem,) = problems(bound, line)
    assert problem == (
        f"9:{line.index('flaot') + 3}: compare: baseline 'flaot' is not among its models: float, int8 "
        "(did you mean 'float'?)"
    )


@pytest.mark.parametrize(
    "gate",
    [
        "gate: {uses: gate.accuracy, with: {max_drop: 0.003, candidate: intt8}}",
        "gate: {uses: gate.quality, with: {metric: loss, max_drop: 0.1, candidate: intt8}}",
        "gate: {uses: gate.size, with: {max_ratio: 0.27, candidate: intt8}}",
        "gate: {uses: gate.latency, with: {max_ms: 1, candidate: intt8}}",
    ],
)
def test_a_candidate_that_is_not_compared(bound, gate) -> None:
    (problem,) = problems(bound, COMPARE, gate)
    assert problem == (
        f"10:{gate.index('intt8') + 3}: gate: candidate 'intt8' is not among the models of compare: "
        "float, int8, both.twin (did you mean 'int8'?)"
    )


@pytest.mark.parametrize(
    ("option", "cell"), [("batch_size: 8", "batch 8, one thread"), ("threads: all", "batch 1, all threads")]
)
def test_a_latency_that_is_not_measured(bound, option, cell) -> None:
    compare = "compare: {uses: eval.compare, needs: {models: [float, int8]}, with: {threads: [one]}}"
    gate = f"gate: {{uses: gate.latency, with: {{candidate: int8, max_ms: 1, {option}}}}}"
    (problem,) = problems(bound, compare, gate)
    value = option.rpartition(" ")[2]
    assert problem == (
        f"10:{gate.rindex(value) + 3}: gate: compare does not measure {cell}; "
        "it measures: batch 1, one thread; batch 32, one thread"
    )


def test_a_default_that_is_not_measured(bound) -> None:
    compare = "compare: {uses: eval.compare, needs: {models: [float, int8]}, with: {batch_sizes: []}}"
    (problem,) = problems(bound, compare, "gate: {uses: gate.latency, with: {candidate: int8, max_ms: 1}}")
    assert problem.startswith("10:") and problem.endswith(
        "gate: compare does not measure batch 1, one thread; it measures: no latency"
    )


def test_all_mistakes_at_once(bound) -> None:
    found = problems(
        bound,
        "compare: {uses: eval.compare, needs: {models: [float, int8]}, with: {baseline: x}}",
        "a: {uses: gate.accuracy, with: {candidate: y, max_drop: 0}}",
        "b: {uses: gate.latency, with: {candidate: z, max_ms: 1, batch_size: 2}}",
    )
    assert [problem.split(":")[0] for problem in found] == ["9", "10", "11", "11"]


def test_a_gate_without_a_limit(bound) -> None:
    (problem,) = problems(bound, COMPARE, "gate: {uses: gate.accuracy, with: {candidate: int8}}")
    assert problem.endswith("gate: give max_drop or min_accuracy (or both)")


def test_a_gate_without_any_of_three_limits(bound) -> None:
    (problem,) = problems(bound, COMPARE, "gate: {uses: gate.quality, with: {candidate: int8, metric: loss}}")
    assert problem.endswith("gate: give max_drop or min_value or max_value (or several)")


def test_the_former_name_of_eval_predict_is_explained(bound) -> None:
    line = "predict: {uses: eval.classify, needs: {model: float}}"
    (problem,) = problems(bound, line)
    assert problem == f"9:{line.index('eval') + 3}: predict: eval.classify was renamed to eval.predict"


@pytest.mark.parametrize("kind", ["gate.size", "gate.latency"])
def test_the_former_name_of_max_ratio_is_explained(bound, kind) -> None:
    (problem,) = problems(bound, COMPARE, f"gate: {{uses: {kind}, with: {{candidate: int8, max_share: 0.27}}}}")
    assert problem.startswith("10:") and problem.endswith("max_share: renamed to max_ratio")


def test_the_former_option_of_an_undecided_latency_is_explained(bound) -> None:
    gate = "gate: {uses: gate.latency, with: {candidate: int8, max_ms: 1, fail_undecided: true}}"
    (problem,) = problems(bound, COMPARE, gate)
    place = f"10:{gate.index('fail_undecided') + 3}"
    assert problem == f"{place}: gate: fail_undecided: renamed to on_inconclusive (true is now fail, false is warn)"


def test_several_candidates_are_all_compared(bound) -> None:
    gate = "gate: {uses: gate.size, with: {max_ratio: 0.27, candidates: [float, intt8]}}"
    (problem,) = problems(bound, COMPARE, gate)
    assert problem == (
        f"10:{gate.index('[float') + 3}: gate: candidate 'intt8' is not among the models of compare: "
        "float, int8, both.twin (did you mean 'int8'?)"
    )


def test_what_is_selected_from_is_compared(bound) -> None:
    compare = "compare: {uses: eval.compare, needs: {models: [float, int8]}}"
    best = "best: {uses: select.best, needs: {models: [int8, both.twin]}, with: {max_drop: 0.01}}"
    (problem,) = problems(bound, compare, best)
    assert problem == "10:9: best: candidate 'both.twin' is not among the models of compare: float, int8"


def test_a_selection_by_a_latency_that_is_not_measured(bound) -> None:
    best = "best: {uses: select.best, needs: {models: [int8]}, with: {max_drop: 0.01, by: latency, batch_size: 8}}"
    (problem,) = problems(bound, COMPARE, best)
    assert "compare does not measure batch 8, one thread; it measures:" in problem
    assert bound(COMPARE, best.replace("latency", "size"))


def test_a_torch_model_from_a_selection_of_others(bound) -> None:
    best = "best: {uses: select.best, needs: {models: [int8]}, with: {max_drop: 0.01}}"
    (problem,) = problems(bound, COMPARE, best, "model: {uses: select.model}")
    assert problem == "11:10: model: best may select int8, which is a Deployable and no torch model"


@pytest.mark.parametrize(
    ("gate", "limit"),
    [
        ("gate: {uses: gate.accuracy, with: {max_drop: 0.003, candidate: float}}", "max_drop"),
        ("gate: {uses: gate.size, with: {max_ratio: 0.27, candidate: float}}", "max_ratio"),
        ("gate: {uses: gate.accuracy, with: {max_drop: 0.003, candidate: float, min_accuracy: 0.9}}", ""),
        ("gate: {uses: gate.accuracy, with: {max_drop: 0.003, candidate: float, baseline_file: b.json}}", ""),
        ("gate: {uses: gate.accuracy, with: {max_drop: 0.003, candidates: [float, int8]}}", ""),
        ("gate: {uses: gate.latency, with: {max_ms: 1, candidate: float}}", ""),
    ],
)
def test_a_gate_on_the_baseline_itself_is_a_warning(bound, gate, limit) -> None:
    found = [str(problem) for problem in bound(COMPARE, gate).warnings]
    assert len(found) == bool(limit)
    message = f"warning: gate: candidate 'float' is the baseline of compare: {limit} compares it with itself"
    assert all(problem.endswith(message) for problem in found)


def test_a_quality_that_is_not_measured(bound) -> None:
    speed = "speed: {uses: eval.latency, needs: {models: [float, int8]}}"
    found = problems(
        bound,
        speed,
        "gate: {uses: gate.accuracy, with: {candidate: int8, max_drop: 0.003}}",
        "best: {uses: select.best, needs: {models: [int8]}, with: {max_drop: 0.01}}",
    )
    message = "speed (eval.latency) measures no quality: take a comparison of eval.compare"
    assert [problem.partition(": ")[2] for problem in found] == [f"gate: {message}", f"best: {message}"]
    assert bound(speed, "gate: {uses: gate.size, with: {candidate: int8, max_ratio: 0.27}}")


@pytest.mark.parametrize(
    ("gate", "found"),
    [
        ("gate: {uses: gate.quality, with: {candidate: int8, metric: rr2, max_drop: 0.1}}", "'rr2', but r2, mae"),
        ("gate: {uses: gate.accuracy, with: {candidate: int8, max_drop: 0.003}}", "'accuracy', but r2, mae"),
        ("gate: {uses: select.best, needs: {models: [int8]}, with: {metric: f1, max_drop: 1}}", "'f1', but r2, mae"),
        ("gate: {uses: gate.quality, with: {candidate: int8, metric: mae, max_drop: 0.1}}", ""),
        ("gate: {uses: gate.quality, with: {candidate: int8, max_drop: 0.1}}", ""),
        ("gate: {uses: gate.size, with: {candidate: int8, max_ratio: 0.27}}", ""),
    ],
)
def test_a_metric_that_the_stored_data_set_does_not_have(bound, gate, found) -> None:
    plan = bound(COMPARE, gate)
    summary = {"metrics": ["r2", "mae"]}
    problems_found = [str(problem) for problem in ptpipe_check_results(plan, {"data": {"output": summary}})]
    hint = " (did you mean 'r2'?)" if "rr2" in gate else ""
    assert [problem.rpartition("toy.yaml:")[2].partition(" ")[2] for problem in problems_found] == (
        [f"gate: data has no metric {found}{hint}"] if found else []
    )
    assert not hint or f":10:{gate.index('rr2') + 3}: " in problems_found[0]
    assert not list(ptpipe_check_results(plan, {})), "nothing is known of the data yet"
