"""Blocks of reports: what can't be drawn is refused where it is made."""

from __future__ import annotations

import dataclasses

import pytest

from ptpipe import Section
from ptpipe.sections import Dot, DotPlot, DotSeries, HeatMap, Mark, Table, Text


@pytest.mark.parametrize(
    "make",
    [
        lambda: Table(("a", "b"), ((1,),)),
        lambda: DotPlot("t", "x", ("a", "b"), (DotSeries("s", (Dot(1.0),)),)),
        lambda: HeatMap("t", "r", "c", ("a", "b"), ("a", "b"), ((1.0, 2.0),)),
        lambda: HeatMap("t", "r", "c", ("a",), ("a", "b"), ((1.0,),)),
        lambda: Mark("m", "z", 1.0),
    ],
)
def test_a_block_whose_parts_do_not_fit_is_refused(make):
    with pytest.raises(ValueError):
        make()


def test_sections_are_immutable_and_equal_by_value():
    section = Section("a", (Text("b"), Table(("x",), ((1,),)), HeatMap("t", "r", "c", (), (), ())))
    assert section == Section("a", (Text("b"), Table(("x",), ((1,),)), HeatMap("t", "r", "c", (), (), ())))
    with pytest.raises(dataclasses.FrozenInstanceError):
        section.title = "c"
