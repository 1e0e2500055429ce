from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe_eval.quality.holm import holm


def test_the_smallest_counts_for_all_and_each_further_for_one_less() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([]) == [] and holm([0.04]) == [0.04]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_between_none_and_the_correction_of_bonferroni(p_values) -> None:
    adjusted = holm(p_values)
    for own, other in zip(p_values, adjusted, strict=True):
        assert own <= other <= min(1, len(p_values) * own) + 1e-15
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    assert [adjusted[place] for place in order] == sorted(adjusted)
