"""Tables in Markdown for trackers: options of a run, verdicts, comparisons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ptpipe import JSON, RunStarted, StageFinished
from ptpipe_report.comparison import tables
from ptpipe_report.markdown import escape


def options(started: RunStarted) -> Iterator[tuple[str, str]]:
    """Yield the seed and every option: `("finetune.lr", "0.001")`."""
    yield "seed", str(started.seed)
    for stage_id, values in started.options.items():
        for name, value in values.items():
            yield f"{stage_id}.{name}", _text(value)


def options_table(started: RunStarted) -> str:
    """Return the options as a table."""
    return markdown_table(("option", "value"), list(options(started)))


def comparisons(stage: StageFinished) -> Iterator[str]:
    """Yield each comparison of models that the stage made as a table."""
    for table in tables([stage]):
        headings = [f"{column.label} ({column.unit})" if column.unit else column.label for column in table.columns]
        yield markdown_table(headings, list(zip(*(column.texts for column in table.columns), strict=True)))


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text."""
    lines = [[escape(cell) for cell in headings], ["---"] * len(headings), *([escape(c) for c in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value)
