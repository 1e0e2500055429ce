from __future__ import annotations

import re
import subprocess
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ptpipe import Outcome, host, one_line
from ptpipe.events import Notice, RunFinished, RunStarted, StageFinished
from ptpipe_report import MarkdownReport
from ptpipe_report.markdown import escape, report, write_report

AT = datetime(2026, 7, 1, 12, 0, 3, tzinfo=UTC)
LIVE = re.compile(r"@|#\d|://|www\.|GH-\d")
READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
NASTY = st.text(st.sampled_from("|\\`*_~<>[]()#+-=.!&$:1a \n\r\t\u2028\x1b\x00é"), max_size=24) | st.text(
    st.characters(categories=None), max_size=24
)
LINKS = [
    "@name",
    "@org/team",
    "#1",
    "owner/repo#12",
    "GH-7",
    "https://a.example/x_y",
    "www.a.example",
    "a@b.example",
    "0123456789ab",
]
NASTY |= st.lists(st.sampled_from([*LINKS, "|", "`", "\\", " ", "*", "$", ",", "("]), max_size=8).map("".join)


def cells_of(markdown: str) -> list[list[str]]:
    """Every row of every table, as a reader of Markdown shows it."""
    rows: list[list[str]] = []
    for token in (tokens := READER.parse(markdown)):
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows and tokens[tokens.index(token) - 1].type in {"td_open", "th_open"}:
            rows[-1].append("".join(child.content for child in token.children or []))
    return rows


def written(script, stages, **ending) -> str:
    started = script.started(stages)
    return report(started, script.ended(stages, **ending), [], AT)


@given(NASTY)
def test_escaped_text_reads_as_itself_in_a_paragraph_and_in_a_list(text) -> None:
    for start in ("", "- "):
        tokens = READER.parse(start + "x " + escape(text) + " x")
        inline = [token for token in tokens if token.type == "inline"]
        assert len(inline) == 1
        assert "".join(child.content for child in inline[0].children) == f"x {one_line(text).strip()} x".rstrip()
        assert {child.type for child in inline[0].children} <= {"text", "code_inline"}
        assert not [child for child in inline[0].children if child.type == "text" and LIVE.search(child.content)]


@given(NASTY.filter(lambda text: one_line(text).strip()))
@example("0 \xad")
def test_escaped_text_begins_no_block(text) -> None:
    tokens = READER.parse(escape(text))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert "".join(child.content for child in tokens[1].children) == one_line(text).strip()


@given(st.lists(NASTY, min_size=5, max_size=5))
def test_a_row_always_has_the_same_number_of_cells_and_shows_what_it_was_given(words) -> None:
    stage_id, kind, message, metric, decision = words
    summary = {"decision": decision, "reason": message, "fail_undecided": False}
    outputs = {"output": {"type": "Verdict", "summary": summary}}
    stages = [
        StageFinished(stage_id, kind, Outcome.SKIPPED, 0.0, "k" * 64, message=message),
        StageFinished(stage_id, kind, Outcome.DONE, 1.0, "k" * 64, metrics={"note": metric}),
        StageFinished(stage_id, kind, Outcome.DONE, 1.0, "k" * 64, outputs=outputs),
    ]
    started = RunStarted("r", stage_id, message, Path(), (stage_id,), 7, (metric,))
    text = report(started, RunFinished("r", kind, Path(), 0, 1.0, tuple(stages)), [Notice(stage_id, message)], AT)
    tables: list[list[str]] = [[]]
    for line in text.splitlines():
        tables[-1].append(line) if line.startswith("|") else tables.append([])
    for table in filter(None, tables):
        assert len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in table}) == 1
    shown = cells_of(text)
    as_shown = [one_line(word).strip() for word in words]
    assert shown[1][::2] == [as_shown[0], as_shown[2]]
    start = shown.index(["", "stage", "kind", "outcome", "seconds", "key figures", "key"])
    assert shown[start + 1] == ["1", *as_shown[:2], "skipped", "", as_shown[2], "k" * 12]
    assert {len(row) for row in shown[start : start + 4]} == {7}


@pytest.mark.parametrize("text", LINKS)
def test_a_mention_or_a_link_is_shown_as_code(text) -> None:
    assert escape(f"see {text} (*)") == f"see `{text}` (\\*)"


def test_a_metric_that_is_rows_is_a_table_of_its_own(script) -> None:
    workers = [
        {"worker": 0, "samples_per_s": 4147.2, "device_utilization": 0.988, "num_steps": 469, "forward_ms": 4.99},
        {"worker": 1, "samples_per_s": 4146.0, "device_utilization": None, "forward_ms": 5.3712, "odd|name": "a|b"},
    ]
    long = [{"epoch": number} for number in range(101)]
    metrics = {"workers": workers, "history": long, "words": ["a", "b"], "none": []}
    text = written(script, [StageFinished("train", "k", Outcome.DONE, 1.0, "k" * 64, metrics=metrics)])
    assert "## train: workers" in text
    assert "train: history" not in text
    assert cells_of(text)[-3:] == [
        ["worker", "samples/s", "device utilization", "steps", "forward (ms)", "odd|name"],
        ["0", "4,147", "98.8 %", "469", "4.99", "-"],
        ["1", "4,146", "-", "-", "5.37", "a|b"],
    ]


@pytest.mark.parametrize(
    ("candidate", "heading"),
    [
        ("onnx", "# mnist-qat: done, but onnx is no better than always answering the mean"),
        ("int8", "# mnist-qat: done"),
    ],
)
def test_a_gate_that_a_useless_model_passes_is_no_success(script, verdict, candidate, heading) -> None:
    trivial = {"answer": "the mean", "value": 0.0, "no_better": ["pretrain", "onnx"]}
    passed = verdict("passed", "no drop")
    passed["output"]["summary"]["candidate"] = candidate
    compare = {"output": {"type": "Comparison", "summary": {"trivial_answer": trivial}}}
    stages = [
        script.stage("compare", "eval.compare", outputs=compare),
        script.stage("gate", "gate.size", outputs=passed),
    ]
    assert written(script, stages).splitlines()[0] == heading


def test_the_whole_report(script) -> None:
    script.overrides = ("pretrain.epochs=3", 'data.root="a b"')
    stages = script.mnist()
    text = report(
        script.started(stages),
        script.ended(stages),
        [Notice("data", "digits in place of mnist"), Notice("", "odd")],
        AT,
    )
    lines = text.splitlines()
    assert lines[:8] == [
        "# mnist-qat: done",
        "",
        "| gate | verdict | reason |",
        "| :--- | :--- | :--- |",
        "| gate | ✓ **passed** | onnx loses 0.30 points (at most 0.30) |",
        "",
        "> [!WARNING]",
        "> **data: digits in place of mnist**",
    ]
    headings = [line for line in lines if line.startswith("#")]
    assert headings[1:] == ["## Comparison: compare", "## Stages", "## Run", "## Reproduce"]
    rows = cells_of(text)
    assert ["outcome", "done (exit code 0)"] in rows
    assert ["stages", "3 done, 1 cached"] in rows
    assert ["finished", "2026-07-01 12:00:03 UTC"] in rows
    assert ["wall time", "3 min 07 s"] in rows
    assert ["seed", "7"] in rows
    assert ["measured on", "machine 000000000000"] in rows
    assert next(row[:6] for row in rows if row[0] == "int8") == [
        "int8",
        "torch int8 fbgemm",
        "434 kB (434,197 bytes)",
        "25.6 %",
        "99.28 %",
        "-0.15",
    ]
    assert ["pretrain (baseline)", "torch float32", "1.69 MB (1,692,915 bytes)"] in [row[:3] for row in rows]
    pretrain = "val accuracy 99.02 % · val loss 0.0313 · size 1.69 MB · torch float32 · epochs 3"
    assert ["2", "pretrain", "train.supervised", "done", "41.32", pretrain, "abababababab"] in rows
    assert ["1", "data", "data.mnist", "cached", "", "", "abababababab"] in rows
    command = "ptpipe run manifests/mnist_qat.yaml -s pretrain.epochs=3 -s 'data.root=\"a b\"'"
    assert lines[-3:] == ["```sh", command, "```"]


def test_intervals_and_marks_are_explained_below_the_table(script) -> None:
    assert "in brackets" not in written(script, script.mnist())
    stages = deepcopy(script.mnist())
    row = stages[2].outputs["output"]["summary"]["rows"][1]
    row |= {"drop_low": -0.0031, "drop_high": 0.0001}
    row["latency"][0] |= {"speed": "faster", "ratio": 0.45}
    row["latency"][1] |= {"speed": "unmeasurable"}
    text = written(script, stages)
    shown = next(row for row in cells_of(text) if row[0] == "int8")
    assert shown[5:8] == ["-0.15 [-0.31, 0.01]", "0.139 0.45x", "0.083 ?"]
    legend = "in brackets: the interval, 95 %; 0.5x: times the baseline's latency; ?: not measurable here and now"
    assert f"\n\n{legend}\n\nmnist · test · 10,000 samples" in text


def test_a_failure_comes_before_the_figures(script) -> None:
    stages = [script.stage("pretrain", "train.supervised", Outcome.FAILED, message="loss is NaN at step 31")]
    text = written(script, stages, exit_code=1)
    assert text.startswith("# mnist-qat: failed\n\n> [!CAUTION]\n> **pretrain** failed: loss is NaN at step 31\n")
    assert written(script, stages, exit_code=130, interrupted=True).startswith("# mnist-qat: interrupted\n")


def test_deliverables_are_listed_relative_to_the_run_folder(script, delivered) -> None:
    assert "Deliverables" not in written(script, script.mnist())
    expected = "## Deliverables\n\n- pretrain/model.onnx\n- pretrain/odd\\*name.data\n\n## Run"
    assert expected in written(script, delivered)


def test_the_command_is_fenced_even_around_backticks(script) -> None:
    script.manifest_path = "odd```name.yaml"
    assert "````sh\nptpipe run 'odd```name.yaml'\n````" in written(script, script.mnist())


@pytest.mark.parametrize("name", ["a\x1b]0;x\x07", "\u202eb", "it's\nnew", "\udcff", "a\\\x9b", "é\u200b"])
def test_the_command_is_printable_and_means_the_same_to_a_shell(script, name) -> None:
    script.manifest_path = name
    (line,) = re.findall("^ptpipe run .*", written(script, script.mnist()), re.MULTILINE)
    assert line.isprintable()
    given = subprocess.check_output(["bash", "-c", f"printf %s {line.removeprefix('ptpipe run ')}"])
    assert given == name.encode("utf-8", "surrogateescape")


def test_this_machine_is_described(script) -> None:
    stages = [script.stage("compare", "eval.compare", machine=host.fingerprint())]
    rows = cells_of(written(script, stages))
    about = next(row[1] for row in rows if row[0] == "measured on")
    assert str(host.describe()["processor"]) in about and host.fingerprint() in about


def test_every_notice_is_in_the_file_once(script, tmp_path) -> None:
    reporter = MarkdownReport()
    stages = script.mnist()
    notices = [Notice("data", "digits in place of mnist"), Notice("", "a reporter was switched off")]
    script.play([reporter], stages, {"data": notices})
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.count("digits in place of mnist") == 1
    assert text.count("a reporter was switched off") == 1


def test_what_several_stages_say_is_one_notice(script, tmp_path) -> None:
    stages = [script.stage(name, "export.onnx", notices=("may saturate",)) for name in ("static", "qat")]
    script.play([MarkdownReport()], stages)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.count("may saturate") == 1 and "static, qat: may saturate" in text


def test_an_unwritable_folder_leaves_the_old_report(script, tmp_path) -> None:
    (tmp_path / "report.md").write_text("old")
    script.folder = tmp_path / "gone"
    with pytest.raises(OSError):
        write_report(script.started([]), script.ended([]), [])
    assert (tmp_path / "report.md").read_text() == "old"
