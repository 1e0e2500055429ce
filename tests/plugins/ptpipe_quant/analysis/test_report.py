"""The section that an analysis adds to a report."""

from __future__ import annotations

from dataclasses import replace

from ptpipe.sections import DotPlot, Table, Text
from ptpipe_quant.analysis.report import section

from .test_layer_errors import ERRORS


def test_table_and_plots_show_the_worst_first() -> None:
    text, table, effects, noise = section("why", ERRORS).blocks
    assert isinstance(text, Text) and "512 samples of val" in text.text
    assert text.text.endswith("All layers together: 1 (-1 to 3) points of accuracy lost, from 90.00 %.")
    (text, *_) = section("why", replace(ERRORS, metric="r2", is_fraction=False)).blocks
    assert text.text.endswith("All layers together: r2 worse by 0.01 (-0.01 to 0.03), from 0.9.")
    assert isinstance(table, Table)
    assert [row[:4] for row in table.rows] == [
        ("conv2", 20.0, 10.0, 30.0),
        ("conv1", 0.0, -2.0, 2.0),
        ("conv0", 1.0, -1.0, 3.0),
    ]
    assert isinstance(effects, DotPlot) and effects.x_label == "points of accuracy lost"
    assert isinstance(noise, DotPlot) and [dot.value for dot in noise.series[0].dots] == [40.0] * 3


def test_a_deep_network_is_cut() -> None:
    deep = replace(ERRORS, layers=ERRORS.layers * 20)
    text, table, *_ = section("why", deep).blocks
    assert "40 worst of 60" in text.text
    assert len(table.rows) == 40
