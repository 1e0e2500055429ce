"""The combinations of a sweep, and that all are checked before the first one runs."""

from __future__ import annotations

import math

import pytest

from ptpipe import ManifestError, Store, UsageError
from ptpipe_sweep.space import Axis, Range
from ptpipe_sweep.trials import bind, drawn, extremes, grid, rounded, shown

from .conftest import STAGES

VALUE = Axis("one.value", ("one.value",), (1, 2))
MODE = Axis("mode", ("one.mode", "other.mode"), ("plain", "loud"))
RANGE = Axis("other.value", ("other.value",), Range(1e-4, 1e-2, is_log=True))
WHOLE = Axis("seed", ("seed",), Range(1, 3, is_whole=True))


def test_a_grid_has_every_combination_once():
    found = grid([VALUE, MODE])
    assert found[0] == {"one.value": 1, "mode": "plain"}
    assert found[1] == {"one.value": 1, "mode": "loud"}
    assert len(found) == len({str(each) for each in found}) == 4


def test_a_grid_of_a_range_or_too_many_is_refused():
    with pytest.raises(UsageError, match=r"--over other.value=0.0001..0.01:log: a range has no grid"):
        grid([VALUE, RANGE])
    with pytest.raises(UsageError, match="a grid of 1,000,000 trials is too large"):
        grid([Axis(str(n), (), tuple(range(100))) for n in range(3)])


def test_draws_are_reproducible_different_and_inside():
    found = drawn([MODE, RANGE, WHOLE], 20, seed=3)
    assert found == drawn([MODE, RANGE, WHOLE], 20, seed=3)
    assert found != drawn([MODE, RANGE, WHOLE], 20, seed=4)
    assert len({str(each) for each in found}) == 20
    assert all(1e-4 <= each["other.value"] <= 1e-2 and each["seed"] in (1, 2, 3) for each in found)
    assert {each["mode"] for each in found} == {"plain", "loud"}


def test_a_logarithmic_range_has_its_middle_at_the_geometric_mean():
    values = sorted(each["other.value"] for each in drawn([RANGE], 400, seed=1))
    assert math.isclose(values[200], 1e-3, rel_tol=0.3), "in a linear range the median were 5e-3"
    linear = sorted(each["x"] for each in drawn([Axis("x", (), Range(0, 1.0))], 400, seed=1))
    assert math.isclose(linear[200], 0.5, rel_tol=0.15)


def test_no_more_draws_than_there_are_combinations():
    assert drawn([VALUE, MODE], 10, seed=0) == grid([VALUE, MODE])
    assert sorted(each["seed"] for each in drawn([WHOLE], 10, seed=0)) == [1, 2, 3]


def test_rounding_stays_inside():
    assert rounded(1.23456, Range(0, 2.0)) == 1.235
    assert rounded(0.99999, Range(0.5, 0.99998)) == 0.99998
    assert rounded(2.6, Range(1, 3, is_whole=True)) == 3


def test_values_are_shown_as_a_manifest_has_them():
    values = ["fbgemm", 1e8, 0.001, 1e-5, 0.1234567, 3, None, True, [1, 32]]
    texts = ["fbgemm", "1e+08", "0.001", "1e-05", "0.1234567", "3", "null", "true", "[1, 32]"]
    assert [shown(value) for value in values] == texts


def test_the_extremes_have_every_value_and_both_ends():
    assert extremes([VALUE, RANGE]) == [
        {"one.value": 1, "other.value": 1e-4},
        {"one.value": 2, "other.value": 1e-2},
    ]
    three = extremes([Axis("x", (), (1, 2, 3)), MODE])
    assert [each["x"] for each in three] == [1, 2, 3]


def test_trials_are_bound_with_all_overrides(project):
    project.write(STAGES)
    trials = bind(project.plan({"gate.least": 3}), [VALUE, MODE], grid([VALUE, MODE]))
    assert [trial.number for trial in trials] == [1, 2, 3, 4]
    assert str(trials[1]) == "one.value=1 mode=loud"
    assert trials[1].overrides == {"gate.least": 3, "one.value": 1, "one.mode": "loud", "other.mode": "loud"}
    assert trials[1].plan["other"].config.mode == "loud"


def test_every_wrong_trial_is_named_once(project):
    project.write(STAGES)
    axes = [Axis("one.value", ("one.value",), (1, -2)), Axis("mode", ("one.mode",), ("plain", "laut"))]
    with pytest.raises(ManifestError) as raised:
        bind(project.plan(), axes, grid(axes))
    problems = [str(problem) for problem in raised.value.problems]
    assert len(problems) == 2
    assert "--over one.mode" in problems[0] and "(in the trial one.value=1 mode=laut and 1 more)" in problems[0]
    assert "did you mean 'loud'" in str(raised.value) or "'plain' or 'loud'" in problems[0]
    assert problems[1].startswith("--over one.value: value: should be greater than or equal to 0, not -2")


def test_what_is_wrong_in_all_trials_names_none(project):
    project.write(STAGES)
    axes = [Axis("one.valeu", ("one.valeu",), (1, 2))]
    with pytest.raises(ManifestError) as raised:
        bind(project.plan(), axes, grid(axes))
    assert str(raised.value) == "--over one.valeu: unknown option 'valeu' of toy.make (did you mean 'value'?)"


def test_a_dry_run_counts_with_the_threads_of_the_trials(project, monkeypatch, tmp_path):
    from ptpipe import host
    from ptpipe_sweep.sweep import Search, Sweep, Workers

    project.write(STAGES)
    monkeypatch.setattr("ptpipe.host.usable_cpus", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    asked = []
    monkeypatch.setattr("ptpipe_sweep.sweep.cache_status", lambda plan, artifacts: asked.append(host.num_threads()))
    for workers in (1, 3, 20):
        sweep = Sweep(project.plan(), [VALUE], Search("grid", 0, 0, None, ""), tmp_path, Workers(workers))
        sweep.cache_status(sweep.first_trials[0])
    assert asked == [8, 2, 1]
    assert host.num_threads() == 8


def test_an_objective_that_no_trial_reported_is_named(project, tmp_path):
    from ptpipe_sweep.outcome import Ending, Objective, Quality
    from ptpipe_sweep.record import SweepRecord
    from ptpipe_sweep.sweep import Search, Sweep, Workers

    project.write(STAGES)
    search = Search("grid", 0, 0, Objective("sum", "valeu", True), "")
    sweep = Sweep(project.plan(), [VALUE], search, tmp_path, Workers(1))
    assert sweep.missing_objective() == "", "nothing has run"
    sweep.record = SweepRecord(Store(tmp_path), "m", {})
    sweep.record.add(Ending(1, {}, {}, 1, metrics={"one.value": 1.0}))
    assert sweep.missing_objective() == "", "that trial failed before its stage"
    sweep.record.add(Ending(1, {}, {}, 0, metrics={"one.value": 1.0, "sum.value": 2.0}))
    assert sweep.missing_objective() == "no trial reported sum.valeu (did you mean 'sum.value'?)"
    sweep.record.add(Ending(2, {}, {}, 0, quality=Quality("sum.valeu", 1.0, True), metrics={"sum.valeu": 1.0}))
    assert sweep.missing_objective() == ""
