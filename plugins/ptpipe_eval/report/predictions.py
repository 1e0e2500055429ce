"""What a model gets wrong, of a run that evaluates models without comparing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptpipe import Outcome, Section
from ptpipe.sections import Block, Topic
from ptpipe_torch import Predictions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ptpipe import Plan, RunFinished
    from ptpipe_eval.report import Load

_MAX_BYTES = 64 << 20
"""Of stored predictions, which are read, and verified, for their metrics."""


def prediction_sections(plan: Plan, run: RunFinished, load: Load) -> Iterator[Section]:
    """Yield the confusion matrix, or the scores by class, and curves of every model that was evaluated."""
    for stage in run.stages:
        for port in plan[stage.stage_id].stage.outputs:
            size = stage.outputs.get(port.name, {}).get("size_bytes")
            is_ended = stage.outcome in (Outcome.DONE, Outcome.CACHED)
            if not issubclass(port.type, Predictions) or not is_ended or not isinstance(size, int) or size > _MAX_BYTES:
                continue
            predictions = load(stage.stage_id, port.name)
            assert isinstance(predictions, Predictions), type(predictions)
            from ptpipe_eval.report.curves import curve_plots
            from ptpipe_eval.report.quality import confusion_map, score_plot  # imports numpy

            tables = dict(predictions.metrics)
            title = f"Confusion of {stage.stage_id}"
            found: list[Block | None] = [confusion_map(title, tables, len(predictions.ids))]
            found += [score_plot({stage.stage_id: tables})]
            found += curve_plots({stage.stage_id: tables}, (stage.stage_id, stage.stage_id))
            blocks = tuple(block for block in found if block is not None)
            if blocks:
                yield Section(f"What {stage.stage_id} gets wrong", blocks, Topic.QUALITY, stage.stage_id)
