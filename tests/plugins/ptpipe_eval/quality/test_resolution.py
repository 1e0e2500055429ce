"""Warnings before a run: gates whose margin the samples can't show."""

from __future__ import annotations

import pytest

from ptpipe import Plan, load_plan
from ptpipe_eval import ptpipe_check_results
from ptpipe_eval.quality.resolution import smallest_margin
from ptpipe_torch.quality.proportions import num_samples_needed, one_sided_z, smallest_margin_of, tango_limits

MANIFEST = """\
version: 1
name: m
stages:
  data: {uses: data.digits}
  net: {uses: model.small_cnn}
  other: {uses: model.small_cnn}
  compare: {uses: eval.compare, needs: {models: [net, other]}}
  gate: {uses: KIND, with: {candidate: other, OPTIONS}}
"""


@pytest.fixture
def warnings(tmp_path):
    """The warnings of a gate, in view of these summaries of stored outputs."""

    def find(options: str, kind: str = "gate.accuracy", **summaries: dict[str, object]) -> list[str]:
        path = tmp_path / "m.yaml"
        path.write_text(MANIFEST.replace("KIND", kind).replace("OPTIONS", options))
        plan: Plan = load_plan(path)
        found = ptpipe_check_results(plan, {name: {"output": of} for name, of in summaries.items()})
        problems = [*plan.warnings, *found]
        assert {problem.severity for problem in problems} <= {"warning"}
        return [str(problem).rpartition("m.yaml:")[2] for problem in problems]

    return find


def data(num_test: int, task: str = "Classification") -> dict[str, object]:
    return {"name": "digits", "task": task, "num_test": num_test, "num_val": 9}


def table(num_samples: int, primary: str = "accuracy", **paired: dict[str, float]) -> dict[str, object]:
    metrics = [{"name": primary}]
    return {"num_samples": num_samples, "metrics": metrics, "rows": [{"name": "net"}, {"name": "o", "paired": paired}]}


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("total", [100, 360, 10_000])
def test_the_margin_without_a_discordant_sample_is_where_tangos_limit_is(total, confidence) -> None:
    limit = float(tango_limits(0, 0, total, one_sided_z(confidence))[1])
    assert smallest_margin(total, confidence) == pytest.approx(limit, rel=1e-9)


@pytest.mark.parametrize(("total", "discordance"), [(360, 0.01), (10_000, 0.004), (10_000, 0.04)])
def test_the_margin_at_a_discordance_takes_that_many_samples(total, discordance) -> None:
    margin = smallest_margin_of(total, discordance, 0.95)
    assert num_samples_needed(margin * 1.001, 0, discordance, 0.95) <= total
    assert num_samples_needed(margin * 0.999, 0, discordance, 0.95) >= total


def test_a_warning_has_the_numbers(warnings) -> None:
    assert warnings("max_drop: 0.003", data=data(360)) == [
        "8:66: warning: gate: max_drop 0.003 is less than 360 samples can show at 95 % confidence: 0.0075 where no "
        "sample is lost or gained, about 0.018 where 1 % are; it takes 900 samples, or 7,238"
    ]


@pytest.mark.parametrize(
    ("options", "num_test", "warned"),
    [
        ("max_drop: 0.003", 899, True),
        ("max_drop: 0.003", 900, False),
        ("max_drop: 0.003, confidence: 0.99", 900, True),
        ("max_drop: 0.01", 360, False),
        ("min_accuracy: 0.9", 10, False),
    ],
)
def test_it_is_given_where_no_model_that_is_as_good_can_pass(warnings, options, num_test, warned) -> None:
    assert bool(warnings(options, data=data(num_test))) == warned


def test_the_number_of_samples_comes_from_stored_results_alone(warnings) -> None:
    assert not warnings("max_drop: 0.003")
    counts = {"accuracy": {"num_lost": 0.0}}
    assert warnings("max_drop: 0.003", compare=table(360, **counts), data=data(10_000))
    assert not warnings("max_drop: 0.003", compare=table(10_000, **counts), data=data(360))
    assert not warnings("max_drop: 0.003", data={"task": "Classification"})


def test_a_metric_that_is_no_count_of_samples_has_no_such_limit(warnings) -> None:
    resampled = table(360, "f1", f1={"drop": 0.0})
    assert not warnings("max_drop: 0.003", "gate.quality", compare=resampled)
    assert not warnings("max_drop: 0.003", "gate.quality", data=data(360, "Segmentation"))
    assert not warnings("max_drop: 0.003, metric: loss", "gate.quality", data=data(360))
    assert warnings("max_drop: 0.003", "gate.quality", data=data(360))
    assert warnings("max_drop: 0.003", "gate.quality", compare=table(360, "top5", top5={"num_lost": 0.0}))


def test_a_selection_is_warned_of_too(tmp_path) -> None:
    (tmp_path / "m.yaml").write_text(
        MANIFEST.replace("uses: KIND, with: {candidate: other, OPTIONS}", "uses: select.best, SELECT").replace(
            "SELECT", "needs: {models: [other]}, with: {max_drop: 0.003}"
        )
    )
    plan = load_plan(tmp_path / "m.yaml")
    (warning,) = ptpipe_check_results(plan, {"data": {"output": data(360)}})
    assert "is less than 360 samples can show" in warning.message
    assert not list(ptpipe_check_results(plan, {"data": {"output": data(360, "Segmentation")}}))


def test_no_loss_at_all_is_a_margin_that_no_number_of_samples_shows(warnings) -> None:
    (warning,) = warnings("max_drop: 0")
    message = "max_drop 0 passes only a model that is better beyond chance: allow a small drop"
    assert warning == f"8:66: warning: gate: {message}"
