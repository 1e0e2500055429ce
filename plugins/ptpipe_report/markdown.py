"""Write `report.md`, a run's report in GitHub-flavored Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from ptpipe import ExitCode, Notice, RunFinished, RunStarted, StageFinished, host, one_line, write_atomically
from ptpipe_report import run_summary
from ptpipe_report.comparison import Column, Table, explained_marks, metric_tables, tables
from ptpipe_report.formatting import figure, joined, seconds_text

_INLINE_MARKUP = re.compile(r"([\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])|:(?=[a-z+-][\w+-]*:))")
"""What could start inline markup; underscores only at the edge of a word."""
_BLOCK_MARKUP = re.compile(r"^(\d+(?=[.)])|(?=[-+=#]))(.)(?=[-=#\s]*(?:\s|$))")
"""What starts a list, a heading or a rule at the start of a line; not the sign of a number."""
_LIVE = re.compile(r"@|#\d|://|www\.|gh-\d|\b(?=\d*[a-f])[\da-f]{7,40}\b", re.IGNORECASE)
"""What GitHub and others turn into a mention or a link (a commit's digits too); nothing but code keeps it from that."""
_WORD = re.compile(r"[^ |`]+|[|`]")
_SYMBOLS = {"passed": "✓", "refused": "✗", "undecided": "▲"}
_LEFT, _RIGHT = ":---", "---:"


def write_report(started: RunStarted, finished: RunFinished, run_notices: Sequence[Notice]) -> None:
    """Write `report.md` into the run's folder; `run_notices` are the notices that belong to no stage."""
    text = report(started, finished, run_notices, datetime.now(UTC))
    write_atomically(finished.folder / "report.md", text.encode("utf-8"))


def report(started: RunStarted, finished: RunFinished, run_notices: Iterable[Notice], at: datetime) -> str:
    """Return the whole file."""
    return "\n\n".join(sections(started, finished, run_notices, at)) + "\n"


def sections(started: RunStarted, finished: RunFinished, run_notices: Iterable[Notice], at: datetime) -> list[str]:
    """Return the file's parts, each a whole: the verdict, then the figures, then how they came about."""
    parts = [_verdict(finished, run_notices)]
    for table in tables(finished.stages):
        notes = [escape(note) for note in (_legend(table), _table_facts(table)) if note]
        parts.append(_part(f"## Comparison: {escape(table.stage_id)}", _comparison(table), *notes))
    parts.append(_part("## Stages", _stages(finished.stages)))
    if files := run_summary.deliverables(finished):
        parts.append(_part("## Deliverables", "\n".join(f"- {escape(path.as_posix())}" for path in files)))
    parts.append(_part("## Run", _facts(started, finished, at)))
    parts.append(_part("## Reproduce", _fenced(run_summary.command(started), "sh")))
    for name, table in metric_tables(finished.stages):
        parts.append(_part(f"## {escape(table.stage_id)}: {escape(name.replace('_', ' '))}", _columns(table)))
    return parts


def _part(*blocks: str) -> str:
    return "\n\n".join(blocks)


def _verdict(finished: RunFinished, run_notices: Iterable[Notice]) -> str:
    """Return the heading, what each gate decided and why, what failed, and all notices."""
    caveat = run_summary.caveat(finished) if finished.exit_code == ExitCode.DONE else ""
    ending = run_summary.ending(finished) + (f", but {caveat}" if caveat else "")
    blocks = [f"# {escape(finished.name)}: {escape(ending)}"]
    if gates := run_summary.gates(finished.stages):
        rows = [[escape(gate.stage_id), _decision(gate), escape(gate.reason)] for gate in gates]
        blocks.append(_table(["gate", "verdict", "reason"], [_LEFT] * 3, rows))
    blocks += [_failure(stage) for stage in run_summary.failed_stages(finished.stages)]
    notices = run_summary.Notices()
    for notice in run_notices:
        notices.add(notice)
    for stage in finished.stages:
        notices.add_all(stage)
    blocks += [f"> [!WARNING]\n> **{escape(_placed(notice))}**" for notice in notices]
    return _part(*blocks)


def _decision(gate: run_summary.Gate) -> str:
    return f"{_SYMBOLS.get(gate.decision, '')} **{escape(gate.decision)}**".lstrip()


def escape(text: str) -> str:
    """Escape text to Markdown that renders as exactly this text on one line, in a paragraph or a table cell.

    A word that would become a mention or a link (`@name`, `#1`, an address) is shown as code.
    """
    return _BLOCK_MARKUP.sub(r"\1\\\2", _WORD.sub(_escape_word, one_line(text).strip()))


def _escape_word(word: re.Match[str]) -> str:
    return f"`{word[0]}`" if _LIVE.search(word[0]) else _INLINE_MARKUP.sub(r"\\\1", word[0])


def _placed(notice: Notice) -> str:
    return f"{notice.stage_id}: {notice.text}" if notice.stage_id else notice.text


def _failure(stage: StageFinished) -> str:
    return f"> [!CAUTION]\n> **{escape(stage.stage_id)}** failed: {escape(stage.message)}"


def _facts(started: RunStarted, finished: RunFinished, at: datetime) -> str:
    rows = [
        ["outcome", f"{escape(run_summary.ending(finished))} (exit code {finished.exit_code})"],
        ["stages", run_summary.tally(finished.stages)],
        ["finished", f"{at:%Y-%m-%d %H:%M:%S} UTC"],
        ["wall time", seconds_text(finished.seconds)],
        ["manifest", escape(started.manifest_path)],
        ["overrides", escape(", ".join(started.overrides) or "none")],
        ["seed", str(started.seed)],
        ["run", escape(finished.run_id)],
    ]
    machines = dict.fromkeys(stage.machine for stage in finished.stages if stage.machine)
    rows += [["measured on", escape(_machine_text(digits))] for digits in machines]
    return _table(["", ""], [_LEFT, _LEFT], rows)


def _machine_text(fingerprint: str) -> str:
    if fingerprint != host.fingerprint():
        return f"machine {fingerprint}"
    about = host.describe()
    return f"{about['processor']}, {about['num_cpus']} CPUs, {about['system']} {about['architecture']} ({fingerprint})"


def _comparison(table: Table) -> str:
    return _columns(table, [" (baseline)" if is_baseline else "" for is_baseline in table.is_baseline])


def _columns(table: Table, marks: Sequence[str] | None = None) -> str:
    """Format a table; `marks` follow the first cell of each row."""
    headings = [_heading(column) for column in table.columns]
    sides = [_LEFT if column.is_text else _RIGHT for column in table.columns]
    texts = [_exact_texts(column) for column in table.columns]
    rows = [[escape(text) for text in row] for row in zip(*texts, strict=True)]
    for row, mark in zip(rows, marks or [""] * len(rows), strict=True):
        row[0] += mark
    return _table(headings, sides, rows)


def _heading(column: Column) -> str:
    label = "model" if column.name == "name" else column.label
    return escape(f"{label} ({column.unit})" if column.unit else label)


def _exact_texts(column: Column) -> Iterator[str]:
    for value, text in zip(column.values, column.texts, strict=True):
        is_size = column.name.endswith("_bytes") and isinstance(value, int)
        yield f"{text} ({value:,} bytes)" if is_size else text


def _legend(table: Table) -> str:
    """Explain the signs that the table has; empty where it has none."""
    has_interval = any(isinstance(value, list) for column in table.columns for value in column.values)
    explained = ("in brackets: the interval, 95 %" if has_interval else "", explained_marks(table.columns))
    return "; ".join(text for text in explained if text)


def _table_facts(table: Table) -> str:
    """Return `mnist · test · 10,000 samples`."""
    return joined(figure(name, value) for name, value in table.facts.items())


def _stages(stages: Sequence[StageFinished]) -> str:
    rows = []
    for place, stage in enumerate(stages, 1):
        seconds = "" if stage.outcome in run_summary.UNTIMED else f"{stage.seconds:.2f}"
        result = joined(run_summary.stage_figures(stage)) or stage.message
        cells = [str(place), stage.stage_id, stage.kind, stage.outcome, seconds, result, stage.key[:12]]
        rows.append([escape(cell) for cell in cells])
    headings = ["", "stage", "kind", "outcome", "seconds", "key figures", "key"]
    return _table(headings, [_RIGHT, _LEFT, _LEFT, _LEFT, _RIGHT, _LEFT, _LEFT], rows)


def _table(headings: Sequence[str], sides: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table of escaped cells."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, sides, *rows])


def _fenced(text: str, language: str) -> str:
    """Return the text verbatim, in a fence longer than any run of backticks in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
