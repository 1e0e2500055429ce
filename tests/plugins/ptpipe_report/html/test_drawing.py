"""Axes, labels, fronts and graphs: what the figures of the report are made of."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe.sections import HeatMap, Plot, Point, Series
from ptpipe_report.html.artifacts import comparisons_of
from ptpipe_report.html.heat_map import draw_heat_map
from ptpipe_report.html.labels import Box, place_labels
from ptpipe_report.html.plot import describe, draw_plot
from ptpipe_report.html.scale import horizontal_scale, scale
from ptpipe_report.html.stage_graph import draw_stage_graph
from ptpipe_report.html.svg import CHARACTER_PX, element, shortened_names
from ptpipe_report.html.trade_offs import trade_off_plots
from ptpipe_report.run_summary import Gate


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20))
def test_every_value_is_on_the_axis_and_ticks_are_round(values):
    own = scale(values, 100, 400)
    places = [own(value) for value in values]
    assert all(100 <= place <= 400 for place in places)
    assert 1 <= len(own.ticks) <= 14
    assert [*own.ticks] == sorted(set(own.ticks))
    assert len({own.label(tick) for tick in own.ticks}) == len(own.ticks), "labels tell ticks apart"


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1, 2, 3], ["1", "2", "3"]),
        ([1, 25], ["0", "5", "10", "15", "20", "25"]),
        ([0.25, 0.5], ["0.25", "0.30", "0.35", "0.40", "0.45", "0.50"]),
        ([-0.5, 0.5], ["\N{MINUS SIGN}0.4", "\N{MINUS SIGN}0.2", "0.0", "0.2", "0.4"]),
        ([0.998731, 0.998741], ["0.998732", "0.998734", "0.998736", "0.998738", "0.99874"]),
        ([1e8, 1e8 + 4], ["100000000", "100000001", "100000002", "100000003", "100000004"]),
        ([0, 4e-6], ["0", *(f"{number}e\N{MINUS SIGN}06" for number in (1, 2, 3, 4))]),
        ([-4e6, 0], [*(f"\N{MINUS SIGN}{number}e+06" for number in (4, 3, 2, 1)), "0"]),
    ],
)
def test_ticks_are_those_that_a_person_would_choose(values, labels):
    own = scale(values, 0, 100)
    assert [own.label(tick) for tick in own.ticks] == labels


@given(st.one_of(st.sampled_from([0.693, 2.303, 0.003, 1e16, 5e-324, 1e-310, 1e300, 1.7e308]), st.floats(0, 1.7e308)),
       st.integers(0, 40), st.booleans())  # fmt: skip
def test_values_that_hardly_differ_or_are_extreme_are_drawn(value, num_ulps, is_symmetric):
    other = -value if is_symmetric else value + num_ulps * math.ulp(value)
    own = scale([value, other], 100, 400)
    assert all(100 <= own(each) <= 400 for each in (value, other))
    assert 1 <= len(own.ticks) <= 14
    assert len({own.label(tick) for tick in own.ticks}) == len(own.ticks)


@given(st.floats(-8, 9), st.floats(-12, 0), st.booleans(), st.booleans(), st.floats(200, 412))
def test_labels_of_a_horizontal_axis_have_room(magnitude, part, is_negative, is_log, width_px):
    low = 10**magnitude * (-1 if is_negative and not is_log else 1)
    own = horizontal_scale([low, low + 10 ** (magnitude + part)], 50, 50 + width_px, num_ticks=6, is_log=is_log)
    middles, halves = [own(tick) for tick in own.ticks], [len(own.label(tick)) * CHARACTER_PX / 2 for tick in own.ticks]
    ends = [(middle - half, middle + half) for middle, half in zip(middles, halves, strict=True)]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors():
    own = scale([0.1, 1, 10], 0, 300, is_log=True)
    assert own(1) - own(0.1) == pytest.approx(own(10) - own(1))
    assert {0.1, 1.0, 10.0} <= {round(tick, 6) for tick in own.ticks}
    assert not scale([1.0, 1.5], 0, 300, is_log=True).is_log, "too short for powers of ten"


@given(
    st.lists(
        st.tuples(st.floats(60, 460), st.floats(20, 250), st.sampled_from(["a", "onnx_dynamic", "qat"])), max_size=12
    )
)
def test_labels_cover_neither_each_other_nor_a_point(points):
    room = Box(56, 10, 478, 256)
    placed = [of.box for of in place_labels(points, room, [Box(300, 100, 470, 114)]) if of]
    for number, box in enumerate(placed):
        assert room.contains(box)
        assert not box.overlaps(Box(300, 100, 470, 114))
        assert not any(box.overlaps(other) for other in placed[number + 1 :])


def test_the_front_is_what_no_other_beats_in_both(kit, script):
    rows = [
        kit.model_row("pretrain", 1000, 0.99, 0.3),
        kit.model_row("small", 200, 0.97, 0.3),
        kit.model_row("middle", 500, 0.985, 0.2),
        kit.model_row("beaten", 600, 0.98, 0.25),
    ]
    (artifacts,) = comparisons_of(
        [script.stage("compare", "x", outputs=kit.output("Comparison", **kit.compared(*rows)))]
    )
    gate = Gate(script.stage("accuracy", "gate"), "output", "passed", "", {"max_drop": 0.003, "accuracy": 0.97}, False)
    size, latency = trade_off_plots(artifacts, ["small"], [gate])
    (front,) = [series for series in size.series if series.name == "Pareto front"]
    assert [point.x for point in front.points] == [200 / 1e6, 500 / 1e6, 1000 / 1e6]
    (judged,) = [series for series in size.series if series.name == "judged by a gate"]
    (point,) = judged.points
    assert (point.label, point.y) == ("small", pytest.approx(-2.13))
    assert (point.y_low, point.y_high) == (pytest.approx(-2.33), pytest.approx(-1.93))
    assert [(mark.label, mark.value) for mark in size.marks] == [("allowed by accuracy", pytest.approx(-0.3))]
    (point,) = [point for series in latency.series for point in series.points if point.label == "middle"]
    assert (point.x_low, point.x, point.x_high) == (0.19, 0.2, pytest.approx(0.208))


def test_only_latency_is_a_table_without_plots(kit, script):
    rows = [{"name": name, "size_bytes": 10, "latency": kit.rows[0]["latency"]} for name in ("a", "b")]
    summary = {"rows": rows, "metrics": [], "baseline": "a"}
    (artifacts,) = comparisons_of([script.stage("speed", "eval.latency", outputs=kit.output("Comparison", **summary))])
    assert trade_off_plots(artifacts, [], []) == []
    assert [cell.text for cell in artifacts.rows[1].latencies] == ["0.310 ms"]


def test_models_whose_drop_is_unknown_are_in_no_plot(kit, script):
    rows = [{"name": name, "size_bytes": 10, "accuracy": 0.9} for name in ("pretrain", "b")]
    (artifacts,) = comparisons_of(
        [script.stage("compare", "x", outputs=kit.output("Comparison", **kit.compared(*rows)))]
    )
    assert trade_off_plots(artifacts, [], []) == []
    assert [row.metric for row in artifacts.rows] == ["90.00 %", "90.00 %"]


def test_a_confusion_colors_what_is_wrong_and_a_difference_what_got_worse():
    names, values = ("a", "b"), ((5.0, 2.0), (0.0, 7.0))
    drawn = draw_heat_map(HeatMap("m", "r", "c", names, names, values, is_confusion=True))
    assert drawn.count('class="diagonal"') == 2
    assert drawn.count('class="warm"') == 1
    values = ((-2.0, 2.0), (-1.0, 1.0))
    drawn = draw_heat_map(HeatMap("m", "r", "c", names, names, values, is_difference=True, is_confusion=True))
    assert [drawn.count(f'class="{color}"') for color in ("warm", "cool")] == [2, 2]
    assert "a, b: +2" in drawn


def test_of_many_points_those_on_a_line_and_the_only_one_of_a_series_are_labelled():
    points = [Point(float(number), float(-number), label=f"n{number}") for number in range(13)]
    front = Series("front", (Point(0.0, 0.0), Point(1.0, -1.0)), is_line=True)
    few, many = (
        str(
            draw_plot(
                Plot("t", "x", "y", (Series("base", (points[5],), False), Series("others", tuple(of), False), front))
            )
        )
        for of in (points[:4], [*points[:5], *points[6:]])
    )
    assert [f">n{number}<" in few for number in range(6)] == [True, True, True, True, False, True]
    assert [f">n{number}<" in many for number in range(13)] == [number in (0, 1, 5) for number in range(13)]
    assert "n7 (7, -7)" in many, "the title of its point"


def test_a_plot_in_words():
    points = (Point(1, 2.0), Point(3, 0.5))
    plot = Plot("Loss", "epoch", "loss", (Series("val", points), Series("dots", points[:1], is_line=False)))
    assert describe(plot) == "Loss: loss over epoch. val: from 2 at 1 to 0.5 at 3. dots: (1, 2)."


@pytest.mark.parametrize("values", [(0.00094, 0.00108), (0.998731, 0.998741), (-0.0001, 0.0002), (2e7, 2e7 + 4)])
def test_ticks_lie_between_the_label_of_their_axis_and_the_plot(values):
    points = tuple(Point(float(number), value) for number, value in enumerate(values))
    drawn = str(draw_plot(Plot("p", "epoch", "val r2", (Series("s", points),))))
    ticks = re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="tick" text-anchor="end">([^<]+)<', drawn)
    assert len(ticks) >= 3
    assert all(float(right) - len(label) * CHARACTER_PX >= 18 for right, label in ticks), "12 px, turned, at x = 12"
    (track,) = re.findall(r'points="([^"]+)"', drawn)
    assert float(track.split(",")[0]) > float(ticks[0][0]), "and the plot begins right of them"


def test_long_series_are_thinned_and_keep_their_ends():
    points = tuple(Point(float(n), math.sin(n)) for n in range(10_000))
    drawn = str(draw_plot(Plot("p", "x", "y", (Series("s", points),))))
    (track,) = [part.partition('"')[0] for part in drawn.split('points="')[1:]]
    assert len(track.split()) == 400


def test_the_graph_leaves_out_edges_that_a_longer_way_goes_beside(script):
    stages = [script.stage(name, "x") for name in ("data", "net", "train", "compare")]
    upstream = {"net": ("data",), "train": ("net", "data"), "compare": ("train", "data")}
    drawn = draw_stage_graph(stages, upstream, {stage.stage_id: "done" for stage in stages})
    assert drawn.count('class="edge"') == 3
    assert "compare (done) from train, data" in drawn


def test_elements_escape_whatever_they_get():
    drawn = element("text", "<b>&\u202e", class_='"><script>')
    assert drawn == '<text class="&#34;&gt;&lt;script&gt;">&lt;b&gt;&amp;\\u202e</text>'


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["conv1", "conv2"], ["conv1", "conv2"]),
        (["first_of_two_layers", "second_of_two_layers"], ["first_of_…", "second_of…"]),
        (["encoder.layers.0.conv1", "encoder.layers.0.conv2", "short"], ["enc….conv1", "enc….conv2", "short"]),
        (["down.0.convolution", "down.1.convolution"], ["down.0.co…", "down.1.co…"]),
        (["unet.down.0.conv1", "unet.down.1.conv1"], ["…n.0.conv1", "…n.1.conv1"]),
    ],
)
def test_names_are_cut_where_they_stay_different(names, shown):
    assert shortened_names(names, 10 * CHARACTER_PX + 1) == shown
