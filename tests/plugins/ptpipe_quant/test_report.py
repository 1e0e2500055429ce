"""What calibrations add to reports: the ranges that they recorded."""

from __future__ import annotations

from types import SimpleNamespace

from ptpipe import Outcome, RunFinished, Section, StageFinished
from ptpipe.sections import DotPlot, Text, Topic
from ptpipe_quant import calibrate
from ptpipe_quant.report import report_sections
from ptpipe_torch import Ranges


def sections(ranges: Ranges, outcome: Outcome = Outcome.DONE) -> list[Section]:
    stages = (StageFinished("calibrated", "quant.calibrate", outcome, 1.0, "k"),)
    plan = {"calibrated": SimpleNamespace(stage=calibrate)}
    run = RunFinished("r", "n", None, 0, 1.0, stages)
    return list(report_sections(plan, run, lambda stage_id, output: {"ranges": ranges}[output]))


def test_every_tensor_has_its_range():
    (section,) = sections(Ranges({"input": (-0.5, 2.0), "head": (-9.0, 8.0)}, 1234))
    assert (section.title, section.topic) == ("Calibration ranges: calibrated", Topic.QUANTIZATION)
    (plot,) = section.blocks
    assert isinstance(plot, DotPlot)
    assert "1,234 samples" in plot.title
    assert plot.names == ("input", "head")
    assert [(dot.low, dot.high, dot.value) for dot in plot.series[0].dots] == [(-0.5, 2.0, None), (-9.0, 8.0, None)]


def test_of_many_tensors_the_widest_are_shown_in_the_networks_order():
    (section,) = sections(Ranges({f"layer_{n}": (0.0, float(n)) for n in range(100)}, 1))
    text, plot = section.blocks
    assert text == Text("The 40 widest of 100 tensors.")
    assert plot.names == tuple(f"layer_{n}" for n in range(60, 100))


def test_a_calibration_that_failed_has_none():
    assert sections(Ranges({"a": (0.0, 1.0)}, 1), Outcome.FAILED) == []
    assert sections(Ranges({}, 1)) == []
