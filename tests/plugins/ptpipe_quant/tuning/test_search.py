"""The number of trials, wherever the harmful layer is in the ranking."""

from __future__ import annotations

import math

import pytest

from ptpipe_quant.tuning.candidates import choices_of
from ptpipe_quant.tuning.search import max_evaluations, search
from ptpipe_quant.tuning.trials import Choice, Trial

FIRST = Choice("per_channel", ("head",))


def trial(choice: Choice, *, is_met: bool) -> Trial:
    fraction = 1 - len(choice.skip) / 1000
    return Trial(choice, 0.0 if is_met else 0.1, 0.0, 0.0, 100, is_met, True, fraction)


def searched(num_layers: int, harmful: set[str]) -> list[Trial]:
    """Return the trials of a network of layers 0, 1, ..., in this ranking."""
    choices = choices_of(FIRST, [(str(number),) for number in range(num_layers)], is_per_channel_next=False)
    trials: list[Trial] = []

    def evaluate(choice: Choice) -> Trial:
        trials.append(trial(choice, is_met=harmful <= set(choice.skip)))
        return trials[-1]

    search(choices, evaluate)
    assert len(trials) <= max_evaluations(len(choices))
    return trials


@pytest.mark.parametrize("num_layers", [1, 2, 3, 8, 53, 100])
def test_one_harmful_layer_is_found_alone_wherever_it_is_ranked(num_layers: int) -> None:
    for place in range(num_layers):
        trials = searched(num_layers, {str(place)})
        best = max(trials, key=lambda trial: trial.rank)
        assert best.choice == Choice("per_channel", ("head", str(place)))
        assert len(trials) <= math.ceil(math.log2(num_layers)) + 3


def test_the_worst_layer_takes_two_trials() -> None:
    assert len(searched(100, {"0"})) == 2


def test_two_harmful_layers_are_kept_float_with_those_ranked_between_them() -> None:
    best = max(searched(10, {"1", "3"}), key=lambda trial: trial.rank)
    assert best.choice.skip == ("head", "0", "1", "2", "3")


def test_nothing_harmful_takes_one_trial() -> None:
    assert len(searched(10, set())) == 1


def test_a_budget_that_no_choice_meets_ends() -> None:
    trials = searched(10, {"another"})
    assert not any(trial.is_met for trial in trials)
    assert len(trials) <= max_evaluations(11)


def test_no_layer_is_added_twice_and_scales_per_channel_come_first() -> None:
    choices = choices_of(Choice("per_tensor", ()), [("a", "b"), ("b",), ("c", "a")], is_per_channel_next=True)
    assert [choice.weights for choice in choices] == ["per_tensor"] + ["per_channel"] * 3
    assert [choice.skip for choice in choices] == [(), (), ("a", "b"), ("a", "b", "c")]
