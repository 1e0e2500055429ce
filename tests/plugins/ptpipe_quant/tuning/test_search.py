"""The number of trials, wherever the harmful layer is in the ranking."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ptpipe_quant.tuning.candidates import RankedLayer, chains_of
from ptpipe_quant.tuning.search import max_evaluations, search
from ptpipe_quant.tuning.trials import Choice, Trial

FIRST = Choice(("head",))


def outputs(*skips: tuple[str, ...]) -> list[RankedLayer]:
    return [RankedLayer(skip, skip[:1], is_output=True) for skip in skips]


def trial(choice: Choice, *, is_met: bool) -> Trial:
    fraction = 1 - len(choice.skip) / 1000
    return Trial(choice, 0.0 if is_met else 0.1, 0.0, 0.0, 100, is_met, True, fraction)


def searched(
    num_layers: int, harmful: set[str], remedies: Sequence[str] = ("float",), enough: str = "float"
) -> list[Trial]:
    """Return the trials of a network of layers 0, 1, ..., in this ranking. `enough`: the remedy that helps."""
    layers = outputs(*((str(number),) for number in range(num_layers)))
    chains = chains_of(FIRST, layers, remedies)
    trials: list[Trial] = []

    def evaluate(choice: Choice) -> Trial:
        remedied = {name for name, remedy in choice.layers if remedy == enough}
        trials.append(trial(choice, is_met=harmful <= {*choice.skip, *remedied}))
        return trials[-1]

    search(chains, evaluate)
    assert len(trials) <= max_evaluations(chains)
    return trials


@pytest.mark.parametrize("num_layers", [1, 2, 3, 8, 53, 100])
def test_one_harmful_layer_is_found_alone_wherever_it_is_ranked(num_layers: int) -> None:
    for place in range(num_layers):
        trials = searched(num_layers, {str(place)})
        best = max(trials, key=lambda trial: trial.rank)
        assert best.choice == Choice(("head", str(place)))
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


def test_no_layer_is_added_twice() -> None:
    layers = outputs(("a", "b"), ("b",), ("c", "a"))
    (choices,) = chains_of(Choice(()), layers, ["float"])
    assert [choice.skip for choice in choices] == [(), ("a", "b"), ("a", "b", "c")]


@pytest.mark.parametrize("num_layers", [1, 2, 8, 53])
@pytest.mark.parametrize("enough", ["percentile", "mse", "float"])
def test_remedies_are_tried_in_order_for_a_layer(num_layers: int, enough: str) -> None:
    remedies = ["percentile", "mse", "float"]
    for place in range(num_layers):
        trials = searched(num_layers, {str(place)}, remedies, enough)
        best = max(trials, key=lambda trial: trial.rank).choice
        assert best.skip == (("head", str(place)) if enough == "float" else ("head",))
        assert best.layers == (() if enough == "float" else ((str(place), enough),))
        assert len(trials) <= math.ceil(math.log2(num_layers)) + 3 + 2


def test_the_cheapest_remedy_is_tried_first_and_the_worst_layer_takes_three_trials() -> None:
    trials = searched(100, {"0"}, ["percentile", "mse", "float"], "percentile")
    assert [trial.choice.layers for trial in trials] == [(), (), (("0", "percentile"),)]


def test_layers_ranked_before_a_harmful_pair_become_int8_again() -> None:
    best = max(searched(10, {"1", "3"}, ["mse", "float"], "mse"), key=lambda trial: trial.rank).choice
    assert best == Choice(("head",), (("0", "mse"), ("1", "mse"), ("2", "mse"), ("3", "mse")))


def test_observers_are_for_outputs_and_scales_per_channel_for_weights() -> None:
    layers = [RankedLayer(("a", "b"), ("a",), is_output=True), RankedLayer(("b",), ("b",), is_output=False)]
    first = Choice(())
    per_channel, mse, surest = chains_of(first, layers, ["per_channel", "mse", "entropy"])
    assert per_channel == surest
    assert [choice.layers for choice in mse] == [(), (("a", "mse"),), (("a", "mse"), ("b", "per_channel"))]
    assert [choice.layers for choice in surest] == [(), (("a", "entropy"),), (("a", "entropy"), ("b", "per_channel"))]
    mse, surest = chains_of(first, layers, ["mse", "float"])
    assert [(choice.layers, choice.skip) for choice in surest] == [((), ()), ((), ("a", "b"))]
    assert [(choice.layers, choice.skip) for choice in mse] == [((), ()), ((("a", "mse"),), ())]


def test_without_a_remedy_for_any_layer_there_is_one_trial() -> None:
    chains = chains_of(FIRST, outputs(("a",)), ["per_channel"])
    assert chains == [[FIRST]]
    assert len(searched(1, {"0"}, ["per_channel"])) == 1
