from __future__ import annotations

import errno
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from ptpipe import Outcome
from ptpipe.events import LogLine, Notice, Progress, StageStarted
from ptpipe_report import ConsoleReporter
from ptpipe_report.comparison_table import fitting_columns
from ptpipe_report.console import PipeSafeConsole, TerminalWriter
from ptpipe_report.run_summary import grouped_by_folder
from ptpipe_report.screen import Screen

from .conftest import output


class Latin1(io.StringIO):
    encoding = "latin-1"


class Gone(io.StringIO):
    """A stream that nothing can be written to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, "gone")


def on(width: int | None, file: io.StringIO | None = None, **more: Any) -> Console:
    """A terminal of that many columns, or a log file."""
    is_terminal = width is not None
    return Console(
        file=io.StringIO() if file is None else file,
        width=width or 80,
        force_terminal=is_terminal,
        color_system=None,
        _environ={},
        **more,
    )


def shown_lines(console: Console, script, stages, events=None, **ending: Any) -> list[str]:
    script.play([ConsoleReporter(console)], stages, events, **ending)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_data_set_has_the_samples_of_each_split(script) -> None:
    sizes = {"num_train": 570, "num_val": 30, "num_test": 2000, "num_calibration": 99}
    data = script.stage("d", "data.csv", outputs=output("Data", name="mine", num_classes=2, **sizes))
    line = next(line for line in shown_lines(on(None), script, [data]) if "data.csv" in line)
    assert line.endswith("mine · 2 classes · 570 train · 30 val · 2,000 test")


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE])
def test_a_run_goes_on_without_the_terminal_that_was_closed(script, number) -> None:
    console = PipeSafeConsole(file=Gone(number), force_terminal=True)
    script.play([ConsoleReporter(console)], script.mnist(), {"pretrain": script.training()})
    assert console.quiet
    with pytest.raises(OSError, match="gone"):
        PipeSafeConsole(file=Gone(errno.ENOSPC)).print("a full disk is no reader that left")


def test_a_run_in_a_log_file(script) -> None:
    shown = shown_lines(on(None), script, script.mnist(), {"pretrain": script.training()})
    assert shown == [
        "mnist-qat  manifests/mnist_qat.yaml · 4 stages · seed 7",
        "",
        "✓ 1/4 data      data.mnist         cached",
        "▲ data: digits in place of mnist",
        "▲ pretrain: fell back to float32",
        "✓ 2/4 pretrain  train.supervised   done        41.3 s   val accuracy 99.02 % · val loss 0.0313 · size 1.69 MB",
        "✓ 3/4 compare   eval.compare       done         1.0 s   3 models",
        "✓ 4/4 gate      gate.accuracy      done        0.00 s   onnx loses 0.30 points (at most 0.30)",
        "",
        "  compare  mnist · test · 10,000 samples",
        "                                                                      batch 1      batch 1  batch 32",
        "                                           size                drop  1 thread  all threads  1 thread",
        "  model     format                size    ratio  accuracy    points        ms           ms        ms",
        "  pretrain  torch float32      1.69 MB  100.0 %   99.13 %  baseline     0.312        0.187      9.98",
        "  int8      torch int8 fbgemm   434 kB   25.6 %   99.28 %     -0.15     0.139        0.083      4.45",
        "  onnx      onnx int8           439 kB   25.9 %   98.83 %      0.30     0.041        0.025      1.32",
        "",
        "✓ gate  passed     onnx loses 0.30 points (at most 0.30)",
        "",
        "▲ data: digits in place of mnist",
        "▲ pretrain: fell back to float32",
        "",
        "✓ mnist-qat done in 3 min 07 s  3 done, 1 cached",
        f"  run folder:    {script.folder}",
    ]


def test_outcomes_are_aligned_whatever_the_kinds_are_called(script) -> None:
    stages = [script.stage("data", "data.text"), script.stage("net", "model.text_transformer")]
    first, second = (line for line in shown_lines(on(None), script, stages) if " done  " in line and "/2" in line)
    assert first.index("done") == second.index("done") == second.index("model") + len("model.text_transformer  ")


def test_sixty_columns_get_less_and_no_line_runs_over(script) -> None:
    console = on(60)
    long = Notice("data", "MNIST could not be had: this run uses scikit-learn's 1,797 handwritten digits in its place")
    shown = shown_lines(console, script, script.mnist(), {"data": [long]})
    assert max(map(len, shown[:-1])) <= 60, "all but the folder, which is to be copied"
    assert shown[2:5] == [
        "▲ data: MNIST could not be had: this run uses scikit-learn's",
        "        1,797 handwritten digits in its place",
        "✓ 1/4 data      cached",
    ]
    assert "✓ 2/4 pretrain  done        41.3 s   val accuracy 99.02 %" in shown
    start = shown.index("  compare  mnist · test · 10,000 samples")
    assert shown[start + 3 : start + 9] == [
        "  model        size    ratio  accuracy    points        ms",
        "  pretrain  1.69 MB  100.0 %   99.13 %  baseline     0.312",
        "  int8       434 kB   25.6 %   99.28 %     -0.15     0.139",
        "  onnx       439 kB   25.9 %   98.83 %      0.30     0.041",
        "  no room for: format; batch 1, all threads; batch 32, 1",
        "  thread",
    ]
    assert shown[-1] == f"  run folder:    {script.folder}"


@pytest.mark.parametrize("width", [20, 33, 47, 60, 80, 97, 120, 250])
def test_no_line_exceeds_the_width(script, width) -> None:
    shown = shown_lines(on(width), script, script.mnist(), {"pretrain": script.training()})
    assert max(len(line) for line in shown if "run folder" not in line and str(script.folder) not in line) <= width


def test_the_end_has_the_path_of_the_report(script) -> None:
    (script.folder / "report.html").write_text("", encoding="utf-8")
    shown = shown_lines(on(None), script, script.mnist())
    assert shown[-2:] == [
        f"  run folder:    {script.folder}",
        f"  report:        {script.folder}/report.html",
    ]


def test_an_encoding_without_unicode_gets_ascii_symbols(script) -> None:
    shown = shown_lines(on(None, Latin1()), script, script.mnist())
    assert "\n".join(shown).isascii()
    assert shown[2] == "= 1/4 data      data.mnist         cached"
    assert shown[-2].startswith("+ mnist-qat done")


def test_the_end_names_the_deliverables_in_the_run_folder(script, delivered) -> None:
    shown = shown_lines(on(None), script, delivered)
    assert shown[-2:] == [
        f"  run folder:    {script.folder}",
        "  deliverables:  pretrain/ (2 files)",
    ]


def test_deliverables_are_grouped_by_stage() -> None:
    files = [Path("net/model.onnx"), Path("qat/recipe.json"), Path("qat/int8.safetensors"), Path("loose")]
    assert grouped_by_folder(files) == ["net/model.onnx", "qat/ (2 files)", "loose"]


def test_a_failure_names_its_cause_and_the_command_that_resumes(script) -> None:
    script.overrides = ("pretrain.lr=0.5",)
    stages = [
        script.stage(
            "pretrain",
            "train.supervised",
            Outcome.FAILED,
            seconds=3.1,
            message="the loss is NaN at step 31",
            frames=("loop.py:31 in step: check(loss)",),
        ),
        script.stage("int8", "quant.convert", Outcome.SKIPPED, key="", message="needs pretrain"),
    ]
    assert shown_lines(on(None), script, stages, exit_code=1)[2:] == [
        "✗ 1/2 pretrain  train.supervised   failed       3.1 s",
        "  the loss is NaN at step 31",
        "    loop.py:31 in step: check(loss)",
        "- 2/2 int8      quant.convert      skipped              needs pretrain",
        "",
        "✗ mnist-qat failed after 3 min 07 s  1 failed, 1 skipped",
        "  pretrain: the loss is NaN at step 31",
        "  resume with:   ptpipe run manifests/mnist_qat.yaml -s pretrain.lr=0.5",
        f"  run folder:    {script.folder}",
    ]


def test_a_useless_model_that_passes_is_named_at_the_end(script, verdict) -> None:
    outputs = verdict("passed", "no drop")
    outputs["output"]["summary"] |= {"candidate": "net", "trivial_answer": {"answer": "the mean", "no_better": ["net"]}}
    shown = shown_lines(on(None), script, [script.stage("gate", "gate.size", outputs=outputs)])
    assert "▲ mnist-qat done in 3 min 07 s, but net is no better than always answering the mean  1 done" in shown


def test_a_refusal_is_not_a_failure_and_needs_no_resuming(script, verdict) -> None:
    stages = [
        script.stage(
            "gate", "gate.size", Outcome.REFUSED, message="too big", outputs=verdict("refused", "29.3 % (at most 27 %)")
        ),
        script.stage("other", "gate.latency", outputs=verdict("undecided", "no such latency")),
    ]
    shown = shown_lines(on(None), script, stages, exit_code=3)
    assert shown[2] == "✗ 1/2 gate   gate.size          refused      1.0 s   29.3 % (at most 27 %)"
    assert "✗ gate   refused    29.3 % (at most 27 %)" in shown
    assert "▲ other  undecided  no such latency" in shown
    assert "✗ mnist-qat refused by a gate after 3 min 07 s  1 done, 1 refused" in shown
    assert not [line for line in shown if "resume with" in line]
    narrow = shown_lines(on(60), script, stages, exit_code=3)
    assert narrow[2].startswith("✗ 1/2 gate   refused      1.0 s   29.3 % (")  # cut, the whole below
    assert narrow[3] == "▲ 2/2 other  undecided    1.0 s   no such latency"


def test_a_gate_that_fails_undecided_is_not_called_refused(script, verdict) -> None:
    outputs = verdict("undecided", "too few samples")
    stages = [
        script.stage("gate", "gate.size", Outcome.UNDECIDED, message="too few samples", outputs=outputs),
        script.stage("late", "gate.size", Outcome.UNDECIDED, seconds=754.0, outputs=outputs),
    ]
    shown = shown_lines(on(None), script, stages, exit_code=4)
    assert shown[2] == "▲ 1/2 gate  gate.size          undecided    1.0 s   too few samples"
    assert shown[3] == "▲ 2/2 late  gate.size          undecided 12 min 34 s   too few samples"
    assert "▲ gate  undecided  too few samples" in shown
    assert "✗ mnist-qat undecided: a gate could not decide after 3 min 07 s  2 undecided" in shown
    script.verbosity = -1
    assert shown_lines(on(None), script, stages, exit_code=4)[0].startswith("▲ 1/2 gate")


@pytest.mark.parametrize(
    ("exit_code", "interrupted", "word"),
    [
        (130, True, "interrupted"),
        (143, True, "terminated"),
        (129, True, "the terminal was closed"),
        (5, False, "corrupt"),
        (70, False, "bug"),
        (9, False, "9"),
    ],
)
def test_every_ending_is_named_with_the_command_that_resumes(script, exit_code, interrupted, word) -> None:
    script.arguments = ("--nnodes", "2")
    shown = shown_lines(on(None), script, script.mnist()[:1], exit_code=exit_code, interrupted=interrupted)
    assert word in shown[-3] and shown[-3].startswith("✗ mnist-qat")
    assert shown[-2] == "  resume with:   ptpipe run manifests/mnist_qat.yaml --nnodes 2"


@pytest.mark.parametrize(
    ("folder", "variable", "option"),
    [
        ("artifacts", "", ""),
        ("artifacts", "elsewhere", " --artifacts {}"),
        ("elsewhere", "elsewhere", " --artifacts {}"),
        ("elsewhere", "", " --artifacts {}"),
    ],
)
def test_the_command_that_resumes_uses_the_same_artifacts_folder(
    script, tmp_path, monkeypatch, folder, variable, option
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PTPIPE_ARTIFACTS", variable)
    script.folder = tmp_path / folder / "runs" / "r"
    shown = shown_lines(on(None), script, script.mnist()[:1], exit_code=1)
    command = f"ptpipe run manifests/mnist_qat.yaml{option.format(tmp_path / folder)}"
    assert f"  resume with:   {command}" in shown


def test_quiet_shows_problems_and_the_end(script, verdict) -> None:
    script.verbosity = -1
    stages = [*script.mnist(), script.stage("big", "gate.size", Outcome.REFUSED, outputs=verdict("refused", "too big"))]
    events = {"pretrain": [*script.training(), LogLine("pretrain", "chatter", shown=True)]}
    assert shown_lines(on(None), script, stages, events, exit_code=3) == [
        "▲ data: digits in place of mnist",
        "▲ pretrain: fell back to float32",
        "✗ 5/5 big       gate.size          refused      1.0 s   too big",
        "",
        "✗ big  refused    too big",
        "",
        "✗ mnist-qat refused by a gate after 3 min 07 s  3 done, 1 cached, 1 refused",
        f"  run folder:    {script.folder}",
    ]


def test_silent_writes_nothing(script) -> None:
    script.verbosity = -2
    assert shown_lines(on(None), script, script.mnist(), {"pretrain": script.training()}) == []


def test_verbose_shows_log_lines_and_keys(script) -> None:
    events = {"pretrain": [LogLine("pretrain", "compiled in 3 s"), LogLine("pretrain", "resumes", shown=True)]}
    default = shown_lines(on(None), script, script.mnist(), events)
    assert "  pretrain: compiled in 3 s" not in default
    assert "  pretrain: resumes" in default
    script.verbosity = 1
    shown = shown_lines(on(None), script, script.mnist(), events)
    assert "  pretrain: compiled in 3 s" in shown
    assert "  key abababababab" in shown


def test_a_notice_is_shown_on_arrival_and_at_the_end(script) -> None:
    stage = script.stage("data", "data.mnist", notices=("stand-in",))
    shown = shown_lines(on(None), script, [stage], {"data": [Notice("data", "stand-in"), Notice("", "of the run")]})
    assert [line for line in shown if line.startswith("▲")] == ["▲ data: stand-in", "▲ of the run"] * 2


def test_what_several_stages_say_is_shown_once_and_at_the_end_with_all_of_them(script) -> None:
    stages = [script.stage(name, "export.onnx", notices=("may saturate",)) for name in ("static", "qat")]
    shown = shown_lines(on(None), script, stages, {name: [Notice(name, "may saturate")] for name in ("static", "qat")})
    notices = [line for line in shown if line.startswith("▲")]
    assert notices == ["▲ static: may saturate", "▲ static, qat: may saturate"]


@pytest.mark.parametrize(("seconds", "times"), [(29.0, 1), (31.0, 2)])
def test_a_notice_of_a_short_run_is_still_on_the_screen(script, seconds, times) -> None:
    console, stages = on(None), [script.stage("data", "data.mnist", notices=("stand-in",))]
    screen = Screen(script.started(stages), console)
    screen.event(Notice("data", "stand-in"))
    screen.run_finished(replace(script.ended(stages, 0, False), seconds=seconds))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines().count("▲ data: stand-in") == times


def test_untrusted_text_is_neither_markup_nor_terminal_code(script) -> None:
    stages = [script.stage("a[red]b", "x.y", Outcome.FAILED, message="[bold]50 %[/] \x1b]0;title\x07 :smile:\nnext")]
    shown = shown_lines(on(100), script, stages, exit_code=1)
    assert "  [bold]50 %[/] \\x1b]0;title\\x07 :smile: next" in shown
    assert shown[2].startswith("✗ 1/1 a[red]b")


def test_no_color_is_supported(script, monkeypatch) -> None:
    def colours(environ: dict[str, str]) -> list[Any]:
        console = Console(file=io.StringIO(), force_terminal=True, width=90, record=True, _environ=environ)
        shown_lines(console, script, script.mnist())
        assert isinstance(console.file, io.StringIO)
        return [line for line in console.file.getvalue().splitlines() if "\x1b[3" in line or ";3" in line]

    assert colours({"TERM": "xterm-256color"})
    assert not colours({"TERM": "xterm-256color", "NO_COLOR": "1"})


def test_a_recorded_run_exports_svg(script, tmp_path) -> None:
    console = Console(file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor", width=100)
    script.play([ConsoleReporter(console)], script.mnist())
    console.save_svg(str(tmp_path / "run.svg"), title="ptpipe run")
    picture = (tmp_path / "run.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    assert "mnist-qat done in 3 min 07 s" in picture and "99.28 %" in picture


def test_a_log_gets_a_line_on_progress_every_ten_seconds(script) -> None:
    now_s = 0.0
    console = on(None)
    screen = Screen(script.started(script.mnist()), console, clock=lambda: now_s)
    screen.run_started(script.started(script.mnist()))
    screen.stage_started(StageStarted("pretrain", "train.supervised", 2, 4))
    for step in range(351):
        now_s = step / 10
        screen.event(Progress("pretrain", step, 400, "step", {"epoch": "1/1", "loss": 2.0}))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[2:] == [
        "  2/4 pretrain  25 % · step 100/400 · epoch 1/1 · loss 2.00 · 0:30 left",
        "  2/4 pretrain  50 % · step 200/400 · epoch 1/1 · loss 2.00 · 0:20 left",
        "  2/4 pretrain  75 % · step 300/400 · epoch 1/1 · loss 2.00 · 0:10 left",
    ]


def test_progress_without_a_total_shows_the_count(script) -> None:
    now_s = 0.0
    console = on(None)
    screen = Screen(script.started(script.mnist()), console, clock=lambda: now_s)
    screen.stage_started(StageStarted("data", "data.image_folder", 1, 4))
    now_s = 11.0
    screen.event(Progress("data", 12_345, None, "images", {"samples_per_s": 1122.3}))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "  1/4 data      12,345 images · 1,122 samples/s\n"


def test_columns_of_words_are_dropped_first_then_from_the_right(script) -> None:
    from ptpipe_report.comparison import tables

    (table,) = tables(script.mnist())
    widths = range(200, 0, -1)
    kept = [tuple(column.label for column in fitting_columns(table, TerminalWriter(on(width)))) for width in widths]
    assert kept[0] == tuple(column.label for column in table.columns)
    assert kept[-1] == ("name",)
    without_format = tuple(column.label for column in table.columns if column.label != "format")
    assert next(labels for labels in kept if len(labels) < len(kept[0])) == without_format
    assert fitting_columns(table, TerminalWriter(on(None))) == table.columns


def test_a_log_line_never_wraps() -> None:
    console = on(None)
    TerminalWriter(console).entry(Text("lead: "), "word " * 200)
    assert isinstance(console.file, io.StringIO)
    assert len(console.file.getvalue().splitlines()) == 1


def test_the_run_folder_is_written_as_one_would_type_it(script, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    script.folder = tmp_path / "artifacts" / "runs" / "r"
    assert shown_lines(on(None), script, [])[-1] == "  run folder:    artifacts/runs/r"
