"""Several tests at once. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for being several, in the given order.

    Rejecting where the adjusted one is below 5 % rejects any true hypothesis in at most 5 % of all cases: Holm, "A
    simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979).
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for num_before, position in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - num_before) * p_values[position]))
        adjusted[position] = largest
    return adjusted
