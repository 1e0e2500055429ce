"""The stored form of a search, and its section in a report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ptpipe import IntegrityError
from ptpipe.events import Metric, Notice
from ptpipe.sections import DotPlot, Table, Text
from ptpipe_quant.tuning.config import TuneConfig
from ptpipe_quant.tuning.report import section
from ptpipe_quant.tuning.stage import _report
from ptpipe_quant.tuning.trials import Choice, Trial, Trials
from ptpipe_report.formatting import figure

TRIALS = Trials(
    (
        Trial(Choice(()), 0.2, 0.1, 0.3, 75, False, True, 0.99),
        Trial(Choice(("a", "b")), 0.001, -0.01, 0.01, 75, True, True, 0.5),
        Trial(
            Choice(("a",), (("b", "mse"), ("b", "per_channel"))),
            0.002,
            -0.01,
            0.03,
            597,
            True,
            False,
            0.8,
        ),
    ),
    "accuracy",
    True,
    0.02,
    "val",
)


@pytest.mark.parametrize(("num", "text"), [(1, "after 1 trial;"), (2, "after 2 trials;")])
def test_their_number_is_told(num: int, text: str, ctx, events) -> None:
    trials = replace(TRIALS, trials=TRIALS.trials[2:] * num)
    _report(TuneConfig(max_drop=0.02), ctx, trials)
    assert text in next(event.text for event in events if isinstance(event, Notice))


@pytest.mark.parametrize(("is_fraction", "name"), [(True, "max_drop"), (False, "max_worse_by")])
def test_a_limit_that_is_no_fraction_is_not_shown_in_points(is_fraction: bool, name: str, ctx, events) -> None:
    _report(TuneConfig(max_drop=0.02), ctx, replace(TRIALS, is_fraction=is_fraction))
    metrics = {event.name: event.value for event in events if isinstance(event, Metric)}
    assert metrics[name] == 0.02 and len({"max_drop", "max_worse_by"} & metrics.keys()) == 1
    assert ("points" in str(figure(name, metrics[name]))) == is_fraction


def test_they_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    TRIALS.save(tmp_path)
    assert Trials.load(tmp_path) == TRIALS


@pytest.mark.parametrize("content", ["", "{}", '{"trials": [1]}'])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "trials.json").write_text(content, encoding="utf-8")
    with pytest.raises(IntegrityError, match="not a file of trials"):
        Trials.load(tmp_path)


def test_the_best_meets_the_budget_with_most_in_int8() -> None:
    assert TRIALS.best.choice.skip == ("a",)
    assert TRIALS.summary()["skip"] == ["a"]
    assert TRIALS.summary()["layers"] == {"b": {"observer": "mse", "weights": "per_channel"}}


def test_trials_of_before_there_were_remedies_are_read(tmp_path: Path) -> None:
    TRIALS.save(tmp_path)
    content = json.loads((tmp_path / "trials.json").read_text(encoding="utf-8"))
    for trial in content["trials"]:
        del trial["choice"]["layers"]
    (tmp_path / "trials.json").write_text(json.dumps(content), encoding="utf-8")
    assert [trial.choice.layers for trial in Trials.load(tmp_path).trials] == [(), (), ()]


def test_the_section_has_a_row_for_each_trial() -> None:
    text, table, plot = section("tuned", TRIALS).blocks
    assert isinstance(text, Text) and "trial 3 was returned: met on these samples, not sure" in text.text
    assert isinstance(table, Table) and [row[2] for row in table.rows] == ["nothing", "a, b", "a"]
    assert [row[1] for row in table.rows] == ["nothing", "nothing", "b: mse, b: per_channel"]
    assert isinstance(plot, DotPlot) and plot.marks[0].value == 2.0
