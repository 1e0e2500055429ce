"""Find the fewest of the ranked changes that meet the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ptpipe_quant.tuning.trials import Choice, Trial


def max_evaluations(num_choices: int) -> int:
    """Return how many trials `search` makes at most: the first two, a bisection of the others, and one change alone."""
    others = num_choices - 2
    return min(num_choices, 2) + (math.ceil(math.log2(others + 1)) + 1 if others > 0 else 0)


def search(choices: Sequence[Choice], evaluate: Callable[[Choice], Trial | None]) -> None:
    """Try choices, each of which is the one before and one change more, until the first that meets the budget is known.

    That needs no luck where the ranking is wrong: a bisection. With the changes before it, the last one may be enough
    alone; that is tried too. `evaluate` returns None where there is no time left.
    """
    for choice in choices[:2]:
        trial = evaluate(choice)
        if trial is None or trial.is_met:
            return
    missed, met = min(1, len(choices) - 1), len(choices)
    while met - missed > 1:
        middle = (missed + met) // 2
        trial = evaluate(choices[middle])
        if trial is None:
            return
        missed, met = (missed, middle) if trial.is_met else (middle, met)
    if 1 < met < len(choices):
        evaluate(alone(choices, met))


def alone(choices: Sequence[Choice], position: int) -> Choice:
    """Return the first choice with the change alone that a later one adds to the one before it."""
    first, before, after = choices[0], choices[position - 1], choices[position]
    added = tuple(name for name in after.skip if name not in before.skip)
    remedied = tuple(pair for pair in after.layers if pair not in before.layers)
    return Choice(after.weights, (*first.skip, *added), (*first.layers, *remedied))
