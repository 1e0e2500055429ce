"""Find the fewest of the ranked changes that meet the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ptpipe_quant.tuning.trials import Choice, Trial


def max_evaluations(chains: Sequence[Sequence[Choice]]) -> int:
    """Return how many trials `search` makes at most.

    The first two, a bisection of the others, one change alone, and one for each cheaper remedy.
    """
    if not chains:
        return 0
    num_choices = len(chains[-1])
    others = num_choices - 2
    found = min(num_choices, 2) + (math.ceil(math.log2(others + 1)) + 1 if others > 0 else 0)
    return found + (len(chains) - 1 if num_choices > 1 else 0)


def search(chains: Sequence[Sequence[Choice]], evaluate: Callable[[Choice], Trial | None]) -> None:
    """Find the fewest changes that meet the budget, and the cheapest remedy that does.

    `chains`: one for each remedy, the surest last, of equal length. Each choice of a chain is the one before and one
    change more, at the same layer in all chains. `evaluate` returns None where there is no time left.
    """
    found = _fewest(chains[-1], evaluate)
    if found is None:
        return
    position, is_alone = found
    surest = _choice_at(chains[-1], position, is_alone=is_alone)
    for chain in chains[:-1]:
        choice = _choice_at(chain, position, is_alone=is_alone)
        if choice != surest:
            trial = evaluate(choice)
            if trial is None or trial.is_met:
                return


def _fewest(choices: Sequence[Choice], evaluate: Callable[[Choice], Trial | None]) -> tuple[int, bool] | None:
    """Return the position of the first choice that meets the budget, and whether its change alone does.

    That needs no luck where the ranking is wrong: a bisection. None if no change is needed, or none is known to do.
    """
    for position, choice in enumerate(choices[:2]):
        trial = evaluate(choice)
        if trial is None or trial.is_met:
            return (position, False) if trial and position else None
    missed, met = min(1, len(choices) - 1), len(choices)
    while met - missed > 1:
        middle = (missed + met) // 2
        trial = evaluate(choices[middle])
        if trial is None:
            return None
        missed, met = (missed, middle) if trial.is_met else (middle, met)
    if not 1 < met < len(choices):
        return None
    trial = evaluate(alone(choices, met))
    return None if trial is None else (met, trial.is_met)


def _choice_at(choices: Sequence[Choice], position: int, *, is_alone: bool) -> Choice:
    return alone(choices, position) if is_alone else choices[position]


def alone(choices: Sequence[Choice], position: int) -> Choice:
    """Return the first choice with the change alone that a later one adds to the one before it."""
    first, before, after = choices[0], choices[position - 1], choices[position]
    added = tuple(name for name in after.skip if name not in before.skip)
    remedied = tuple(pair for pair in after.layers if pair not in before.layers)
    return Choice((*first.skip, *added), (*first.layers, *remedied))
