"""One line on a stage: running, or how it ended, in columns that fit the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ptpipe import Outcome, StageFinished
from ptpipe_report import story
from ptpipe_report.figures import seconds_text
from ptpipe_report.look import FAINT, STYLES
from ptpipe_report.paper import Paper
from ptpipe_report.wording import one_line

_WIDEST_ID, _WIDTH_OF_KIND, _WIDTH_OF_TIME = 24, 17, 11
_MOST_FIGURES = 3
_WIDTH_WITH_KIND = 80
"""Terminals from here on show the kinds."""
_TIMED = frozenset({Outcome.DONE, Outcome.FAILED, Outcome.REFUSED})


class StageLines:
    """The lines of one run's stages, in step with each other."""

    def __init__(self, stage_ids: Sequence[str], paper: Paper) -> None:
        self._ids, self._paper = tuple(stage_ids), paper

    def lead(self, sign: str, style: str, stage_id: str) -> Text:
        """`✓ 3/12 pretrain`, the last padded."""
        place = self._ids.index(stage_id) + 1 if stage_id in self._ids else 0
        num_stages = str(len(self._ids))
        return Text.assemble(
            (f"{sign} ", style),
            (f"{place:{len(num_stages)}}/{num_stages} ", FAINT),
            (self.padded_id(stage_id, self._ids), "bold"),
        )

    def padded_id(self, stage_id: str, among: Sequence[str]) -> str:
        """The id, as wide as the widest of these."""
        shown = one_line(stage_id)
        width = min(_WIDEST_ID, max(cell_len(one_line(other)) for other in [stage_id, *among]))
        return shown if cell_len(shown) > width else set_cell_size(shown, width)

    def finished(self, stage: StageFinished) -> Text:
        """`✓ 3/12 pretrain  train.supervised  done  41.3 s  val top1 99.02 % · loss 0.0313`."""
        style = STYLES[stage.outcome]
        line = self.lead(self._paper.look.sign(stage.outcome), style, stage.stage_id)
        self.add_kind(line, stage.kind)
        line.append(f"  {stage.outcome:7}", style)
        line.append(f"{seconds_text(stage.seconds) if stage.outcome in _TIMED else '':>{_WIDTH_OF_TIME}}")
        room = None if self._paper.width is None else self._paper.width - line.cell_len - 3
        said = self._said(stage, room)
        return line.append(f"   {said}") if said else line

    def add_kind(self, line: Text, kind: str) -> None:
        """Append the kind, where the terminal is wide enough."""
        if self._paper.width is None or self._paper.width >= _WIDTH_WITH_KIND:
            line.append(f"  {one_line(kind):{_WIDTH_OF_KIND}}", FAINT)

    def running(self, stage_id: str, facts: str) -> Text:
        """`  3/12 pretrain  37 % · step 291/469 · loss 0.0213 · 0:25 left`, for a log."""
        line = self.lead(" ", "", stage_id)
        return line.append(f"  {facts}")

    def _said(self, stage: StageFinished, room: int | None) -> str:
        """The most telling figures that fit, or the reason."""
        if stage.outcome is Outcome.SKIPPED:
            return one_line(stage.message)
        separator = self._paper.look.separator
        reasons = separator.join(one_line(gate.reason) for gate in story.gates([stage]))
        if reasons and (room is None or cell_len(reasons) <= room or stage.outcome is Outcome.REFUSED):
            return reasons
        kept: list[str] = []
        for figure in story.stage_figures(stage)[:_MOST_FIGURES]:
            longer = [*kept, one_line(str(figure))]
            if room is not None and cell_len(separator.join(longer)) > room:
                break
            kept = longer
        return separator.join(kept)
