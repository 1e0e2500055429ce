"""The report as a file: safe, complete for every ending, readable without eyes, and small."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re

import pytest

from ptpipe import ExitCode, Outcome, Section, StageFinished
from ptpipe.sections import Facts, HeatMap, Image, ImageGrid, Plot, Point, Series, Table, Text, Topic
from ptpipe_report.html.artifacts import comparisons_of

ATTACK = "<script>alert(1)</script>\"'>&{{ 7 * 7 }}\u202e"
SHOWN = "<script>alert(1)</script>\"'>&{{ 7 * 7 }}\\u202e"
MAX_BYTES = 500_000
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "div", "span", "p", "a"),
    *("h1", "h2", "h3", "h4", "ul", "li", "dl", "dt", "dd", "pre", "code", "b", "small", "strong", "details"),
    *("summary", "table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "img"),
    *("svg", "g", "rect", "line", "circle", "polyline", "path", "text"),
}
PLAIN = str.maketrans({"\N{MINUS SIGN}": "-", "\N{MULTIPLICATION SIGN}": "x", "\N{RIGHT SINGLE QUOTATION MARK}": "'"})


def banner(page):
    return page.one("section", "verdict")


def words(element):
    """The text of an element, in ASCII and without repeated spaces."""
    return " ".join(element.text.translate(PLAIN).split())


def test_the_page_loads_and_runs_nothing(run, rendered):
    page = rendered(run, ["a notice"])
    (policy,) = (of.attributes["content"] for of in page.all("meta") if "http-equiv" in of.attributes)
    digest = base64.b64encode(hashlib.sha256(page.one("style").text.encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    for element in page.elements:
        assert element.tag in TAGS
        for name, value in element.attributes.items():
            assert not name.startswith("on")
            assert name != "style", "the policy forbids it"
            if name in ("href", "src"):
                assert value.startswith("data:image/png;base64,") or re.fullmatch(r"[\w./%-]+", value)
    assert "http:" not in page.one("style").text
    assert "url(" not in page.one("style").text


def attacked(run, kit):
    """The run with the attack wherever its text comes from somewhere else."""
    started, finished = run
    row = kit.model_row("pretrain", 10, 0.9, 0.3)
    rows = (row, kit.model_row(ATTACK, 5, 0.89, 0.2, format=ATTACK))
    stages = (
        dataclasses.replace(finished.stages[0], stage_id=ATTACK, kind=ATTACK, notices=(ATTACK,), message=ATTACK),
        dataclasses.replace(
            finished.stages[1],
            outcome=Outcome.FAILED,
            message=ATTACK,
            frames=(ATTACK,),
            metrics={ATTACK: [{ATTACK: ATTACK}]},
        ),
        dataclasses.replace(
            finished.stages[3], outputs=kit.output("Comparison", **kit.compared(*rows, data=ATTACK, split=ATTACK))
        ),
        dataclasses.replace(finished.stages[4], outputs=kit.verdict("passed", ATTACK, candidate=ATTACK)),
    )
    ids = (ATTACK, *(stage.stage_id for stage in stages[1:]))
    started = dataclasses.replace(
        started, name=ATTACK, manifest_path=ATTACK, overrides=(ATTACK,), stage_ids=ids, upstream={"pretrain": (ATTACK,)}
    )
    sections = (Section(ATTACK, kit.every_block(ATTACK)),)
    return started, dataclasses.replace(finished, name=ATTACK, run_id=ATTACK, stages=stages, sections=sections)


def test_nothing_from_outside_becomes_markup(run, rendered, kit):
    (run[0].folder / "manifest.yaml").write_text(ATTACK, encoding="utf-8")
    record = {
        "stages": [
            {"stage_id": ATTACK, "kind": ATTACK, "parts": {"packages": {ATTACK: ATTACK}, "config": {"a": ATTACK}}}
        ]
    }
    page = rendered(attacked(run, kit), [ATTACK], record)
    assert {of.tag for of in page.elements} <= TAGS
    names = "charset http-equiv content name lang class id scope tabindex role href src alt aria-label aria-labelledby "
    names += "viewbox width height x y x1 y1 x2 y2 cx cy r rx d points transform text-anchor font-size fill-opacity"
    assert {name for of in page.elements for name in of.attributes} <= {*names.split()}
    assert page.one("h1").text == SHOWN
    assert page.root.text.count(SHOWN) > 20
    assert "\u202e" not in page.root.text
    assert any(of.attributes["alt"] == SHOWN for of in page.all("img"))
    assert any(of.text == SHOWN for of in page.all("th"))


def test_every_picture_has_words_and_every_table_headings(run, rendered):
    page = rendered(run)
    pictures = page.all("svg")
    assert len(pictures) >= 2 + 2 * 3 + 1, "trade-offs, two sections, the stages"
    for of in pictures:
        assert of.attributes["role"] == "img"
        assert len(of.attributes["aria-label"]) > 10
    assert all(of.attributes["alt"] for of in page.all("img"))
    for table in page.all("table"):
        assert [child.tag for child in table.children] == ["caption", "thead", "tbody"]
        assert table.children[0].text.strip()
    assert {of.attributes["scope"] for of in page.all("th")} == {"col", "row"}


def test_headings_skip_no_level_and_ids_are_unique(run, rendered):
    page = rendered(run)
    levels = [int(of.tag[1]) for of in page.elements if re.fullmatch(r"h[1-6]", of.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    ids = [of.attributes["id"] for of in page.elements if "id" in of.attributes]
    assert len(ids) == len(set(ids))
    labels = [of.attributes["aria-labelledby"] for of in page.elements if "aria-labelledby" in of.attributes]
    assert set(labels) <= set(ids)


def test_a_passed_run_says_what_to_ship_and_why(run, rendered):
    page = rendered(run)
    text = words(banner(page))
    assert "Ship onnx: all 2 gates passed" in text
    assert "accuracy, points lost" in text
    assert "0.12" in text
    assert "95 % interval [-0.08, 0.32], 10,000 samples" in text
    assert "0.259x" in text
    assert "0.23x [0.21, 0.24]" in text
    assert page.all("a")[0].attributes["href"] == "onnx/model.onnx"


def test_a_model_that_learned_nothing_is_not_to_be_shipped(run, rendered):
    trivial = {"answer": "the mean", "value": 0.0, "no_better": ["net", "onnx"]}
    stages = [
        dataclasses.replace(
            stage,
            outputs={
                name: {**of, "summary": {**of["summary"], "trivial_answer": trivial}}
                for name, of in stage.outputs.items()
            },
        )
        if stage.kind == "eval.compare"
        else stage
        for stage in run[1].stages
    ]
    text = words(banner(rendered(run, stages=tuple(stages))))
    assert "All 2 gates passed, but onnx is no better than always answering the mean" in text
    assert "Ship" not in text


@pytest.mark.parametrize(
    ("decisions", "code", "state", "headline"),
    [
        (("refused", "passed"), ExitCode.REFUSED, "refused", "Don't ship onnx: refused by accuracy"),
        (("undecided", "passed"), ExitCode.UNDECIDED, "undecided", "Undecided on onnx: accuracy can't tell yet"),
        (("undecided", "passed"), ExitCode.DONE, "undecided", "Undecided on onnx: accuracy can't tell yet"),
        (("undecided", "refused"), ExitCode.REFUSED, "refused", "Don't ship onnx: refused by size"),
    ],
)
def test_a_gate_that_did_not_pass_is_the_headline(run, rendered, kit, decisions, code, state, headline):
    stages = list(run[1].stages)
    for number, decision in zip((4, 5), decisions, strict=True):
        stages[number] = dataclasses.replace(stages[number], outputs=kit.verdict(decision, f"because {number}"))
    page = rendered(run, stages=tuple(stages), exit_code=int(code))
    assert state in banner(page).attributes["class"].split()
    assert headline in words(banner(page))
    assert page.one("ul", "gates").children[0].children[0].text == decisions[0]
    assert "because 4" in banner(page).text
    assert "Ship" not in page.all("title")[0].text


def test_of_several_candidates_all_are_judged(run, rendered, kit):
    stages = list(run[1].stages)
    rows = [{"candidate": name, "decision": "passed"} for name in ("onnx", "dynamic", "static")]
    facts = {"candidate": None, "candidates": rows}
    for number in (4, 5):
        stages[number] = dataclasses.replace(stages[number], outputs=kit.verdict("passed", **facts))
    page = rendered(run, stages=tuple(stages))
    assert "Ship onnx, dynamic and static: all 2 gates passed" in words(banner(page))
    judged = [row for row in page.all("tr") if "judged" in row.attributes.get("class", "").split()]
    assert words(judged[0]).startswith("onnx")
    stages[5] = dataclasses.replace(stages[5], outputs={})
    assert "Ship onnx, dynamic and static: their gate passed" in words(banner(rendered(run, stages=tuple(stages))))


def test_the_headline_names_those_that_did_not_pass(run, rendered, kit):
    """Another gate, or the same, let others pass."""
    stages = list(run[1].stages)
    rows = [{"candidate": name, "decision": decision} for name, decision in (("onnx", "passed"), ("net", "refused"))]
    stages[4] = dataclasses.replace(stages[4], outputs=kit.verdict("refused", candidate=None, candidates=rows))
    stages[5] = dataclasses.replace(stages[5], outputs=kit.verdict("passed", candidate="dynamic"))
    page = rendered(run, stages=tuple(stages), exit_code=int(ExitCode.REFUSED))
    assert "Don't ship net: refused by accuracy" in words(banner(page))


def test_a_failed_run_says_where_why_and_how_to_resume(run, rendered):
    finished = run[1]
    failed = dataclasses.replace(
        finished.stages[1],
        outcome=Outcome.FAILED,
        message="the loss is nan",
        frames=("net.py:3 in forward: x / 0",),
        metrics={},
    )
    skipped = [dataclasses.replace(of, outcome=Outcome.SKIPPED, outputs={}) for of in finished.stages[2:]]
    page = rendered(run, stages=(finished.stages[0], failed, *skipped), exit_code=1, sections=())
    text = banner(page).text
    assert "Failed in pretrain" in text
    assert "the loss is nan" in text
    assert "net.py:3 in forward" in text
    assert "ptpipe run manifests/mnist_qat.yaml" in text
    assert "Models" not in [of.text for of in page.all("h2")]


def test_an_interrupted_run_and_one_without_gates_have_reports(run, rendered):
    page = rendered(run, exit_code=130, interrupted=True)
    assert "Interrupted: nothing is judged" in banner(page).text
    page = rendered(run, stages=run[1].stages[:2])
    assert "Done: 2 stages, and no gate that judges" in banner(page).text
    assert "Failed" not in rendered(run, stages=(), sections=()).root.text


def test_an_exit_without_a_failed_stage_is_no_success(run, rendered):
    page = rendered(run, exit_code=70)
    assert "Stopped by a bug in ptpipe" in banner(page).text


def test_the_table_has_intervals_and_marks(run, rendered):
    page = rendered(run)
    table = page.one("table", "models")
    rows = table.children[2].children
    names, cells = [row.children[0].text for row in rows], rows[2].children
    assert ["baseline" in name for name in names] == [True, False, False]
    assert ["judged" in name for name in names] == [False, False, True]
    assert words(cells[3]) == "0.12[-0.08, 0.32]"
    assert words(cells[5]) == "0.0700 ms0.23x [0.21, 0.24]faster"
    (cell,) = (of for of in page.all("small", "good") if of.parent.parent is rows[2])
    assert cell.text == "faster"


def test_only_a_drop_whose_interval_excludes_0_is_colored(run, rendered, kit):
    rows = [
        kit.rows[0],
        kit.model_row("worse", 10, 0.95, 0.1),
        kit.model_row("same", 10, 0.9912, 0.1),
        kit.model_row("better", 10, 0.9999, 0.1),
    ]
    stage = dataclasses.replace(run[1].stages[3], outputs=kit.output("Comparison", **kit.compared(*rows)))
    page = rendered(run, stages=(stage,))
    tones = [
        row.children[3].children[0].attributes.get("class", "")
        for row in page.one("table", "models").children[2].children
    ]
    assert tones == ["faint", "bad", "", "good"]


@pytest.mark.parametrize(("worse_by", "tone"), [(1.7e-9, ""), (-1.7e-9, ""), (5e-5, "bad"), (-5e-5, "good")])
def test_float_rounding_is_not_colored(run, rendered, kit, worse_by, tone):
    """Of all samples in one direction, so that the interval excludes 0: R2 of a float file against its network's."""
    base, row = ({"name": name, "size_bytes": 10, "r2": 0.9986} for name in ("pretrain", "onnx"))
    row |= {"worse_by": worse_by, "worse_by_low": worse_by - 1e-9, "worse_by_high": worse_by + 1e-9}
    metrics = [{"name": "r2", "higher_is_better": True, "is_fraction": False}]
    outputs = kit.output("Comparison", **kit.compared(base, row, metrics=metrics))
    page = rendered(run, stages=(dataclasses.replace(run[1].stages[3], outputs=outputs),))
    cell = page.one("table", "models").children[2].children[1].children[3]
    assert cell.children[0].attributes.get("class", "") == tone


def test_sections_are_ordered_by_topic_and_show_every_block(run, rendered):
    page = rendered(run)
    titles = [of.text for of in page.all("h2")]
    assert titles.index("Curves") < titles.index("Also this") < titles.index("Stages")
    assert "about cat" in page.root.text
    assert "1.50 ms" in page.root.text, "the unit is in the name"
    assert "1.50 kB" in page.root.text
    assert "1.5" in page.root.text
    assert len(page.all("img")) == 2


def test_a_comparison_of_another_shape_is_shown_as_a_table(run, rendered, kit):
    stage = dataclasses.replace(run[1].stages[3], outputs=kit.output("Comparison", rows=[{"name": "a", "speed": 3}]))
    page = rendered(run, stages=(stage,))
    assert ["a", "3"] in [[cell.text for cell in row.children] for row in page.all("tr")]


def test_provenance_is_complete(run, rendered):
    record = {
        "manifest_sha256": "ab" * 32,
        "started_at": "2026-07-01T10:00:00.123+00:00",
        "stages": [
            {
                "stage_id": "pretrain",
                "kind": "train.supervised",
                "parts": {"packages": {"torch": "2.13.0"}, "config": {"lr": 0.1}},
            }
        ],
    }
    text = rendered(run, record=record).root.text
    for fact in ("ab" * 32, "2026-07-01 10:00:00 UTC", "torch 2.13.0", '{"lr": 0.1}', "5e" * 32, "1.23 kB"):
        assert fact in text
    for fact in ("ptpipe 0.1.0, Python 3.11.7; a processor, 2 CPUs, 1 threads; Linux x86_64", "name: mnist-qat"):
        assert fact in text
    assert "ab" * 32 in text, "the keys"


def test_a_damaged_record_or_statement_is_no_obstacle(run, rendered):
    (run[0].folder / "onnx" / "model.onnx.intoto.json").write_text("[", encoding="utf-8")
    (run[0].folder / "manifest.yaml").unlink()
    page = rendered(run, record={"stages": [None, {"parts": 3}]})
    assert "onnx/model.onnx" in page.root.text


def test_a_large_run_has_a_small_report(run, rendered, kit, script):
    rows = [kit.rows[0], *(kit.model_row(f"model_{n}", 1000 + n, 0.9, 0.1 + n) for n in range(40))]
    stages = [script.stage(f"stage_{n}", "train.supervised", metrics={"loss": 0.5}) for n in range(100)]
    stages.append(dataclasses.replace(run[1].stages[3], outputs=kit.output("Comparison", **kit.compared(*rows))))
    upstream = {f"stage_{n}": (f"stage_{n - 1}",) for n in range(1, 100)}
    started = dataclasses.replace(run[0], upstream=upstream)
    (run[0].folder / "manifest.yaml").write_text("x" * 1_000_000, encoding="utf-8")
    long = tuple(Series(f"s{n}", tuple(Point(float(x), float(x % 7)) for x in range(100_000))) for n in range(3))
    images = tuple(Image(kit.png(96, noisy=True), f"sample {n}") for n in range(200))
    matrix = tuple(tuple(float(x) for x in range(20)) for _ in range(20))
    names = tuple(map(str, range(20)))
    blocks = (
        Plot("long", "x", "y", long),
        ImageGrid(images),
        Table(("name", "value"), tuple((str(n), n) for n in range(10_000))),
        *(HeatMap(f"map {n}", "row", "column", names, names, matrix) for n in range(3)),
    )
    finished = dataclasses.replace(run[1], stages=tuple(stages), sections=(Section("Large", blocks),))
    page = rendered((started, finished))
    assert 0 < len(page.all("img")) < len(images)
    assert "9800 more rows are not shown." in page.root.text
    assert "the rest is in manifest.yaml" in page.root.text
    from ptpipe_report.html.report import render

    assert len(render(started, finished).encode()) < MAX_BYTES


def test_what_is_no_png_is_not_embedded(run, rendered):
    section = Section("Pictures", (ImageGrid((Image(b"<svg onload=alert(1)>", "a picture"),)),))
    assert rendered(run, sections=(section,)).all("img") == []


def test_values_that_are_not_finite_leave_their_plot_whole(run, rendered):
    points = (Point(1.0, float("nan")), Point(2.0, float("inf")), Point(3.0, 1.0), Point(0.0, 2.0))
    plots = (Plot("p", "x", "y", (Series("s", points),), is_log_x=True, is_log_y=True), Plot("empty", "x", "y", ()))
    text = rendered(run, sections=(Section("Odd", (*plots, Facts(()), Text(""))),))
    for of in text.elements:
        if of.tag in ("line", "circle", "text", "polyline"):
            assert "nan" not in str(of.attributes)
            assert "inf" not in str(of.attributes)


def test_a_block_that_cannot_be_drawn_is_named_and_the_rest_is_there(run, rendered):
    strange = Plot("Odd one", "x", "y", (Series("s", (Point("<b>", None),)),))
    page = rendered(run, sections=(Section("Odd", (strange, Text("still here"))),))
    assert "It can't be drawn: " in words(page.root)
    assert "still here" in page.root.text


def test_topics_are_those_that_the_report_orders():
    assert [*Topic] == ["training", "quality", "samples", "quantization", "latency", "other"]


def test_each_length_of_a_latency_is_a_column() -> None:
    cells = [{"batch_size": 1, "length": length, "threads": "one", "median_ms": length} for length in (32, 128)]
    rows = [{"name": name, "size_bytes": 10, "latency": cells} for name in ("float", "int8")]
    outputs = {"output": {"type": "x.Comparison", "summary": {"baseline": "float", "rows": rows}}}
    stage = StageFinished("compare", "eval.latency", Outcome.DONE, 1.0, "k", outputs=outputs)
    (comparison,) = comparisons_of([stage])
    assert comparison.latency_labels == ["batch 1, length 32, 1 thread", "batch 1, length 128, 1 thread"]
    assert [cell.text for cell in comparison.rows[1].latencies] == ["32.0 ms", "128 ms"]
