"""One console line per stage, running or finished, in columns that fit the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ptpipe import Decision, Outcome, StageFinished, one_line
from ptpipe_report import run_summary
from ptpipe_report.console import TerminalWriter
from ptpipe_report.formatting import seconds_text
from ptpipe_report.theme import FAINT, STYLES

_MAX_ID_WIDTH, _OUTCOME_AND_TIME_WIDTH = 24, 18
_MIN_KIND_WIDTH, _MAX_KIND_WIDTH = 17, 24
_MAX_FIGURES = 3
_OTHER_SPLITS = (" val", " test")
"""Of a data set, behind its name, its classes and its training samples."""
_OF_FAILING_GATES = frozenset({Outcome.REFUSED, Outcome.UNDECIDED})
_MIN_WIDTH_WITH_KIND = 80
"""Narrower terminals omit the kinds."""


class StageLines:
    """Formats the stages of one run in aligned columns."""

    def __init__(self, stage_ids: Sequence[str], writer: TerminalWriter, kinds: Sequence[str] = ()) -> None:
        self._ids, self._writer = tuple(stage_ids), writer
        widest = max([_MIN_KIND_WIDTH, *(cell_len(one_line(kind)) for kind in kinds)])
        self._kind_width = min(_MAX_KIND_WIDTH, widest)

    def lead(self, symbol: str, style: str, stage_id: str) -> Text:
        """Return `✓ 3/12 pretrain`, the id padded."""
        position = self._ids.index(stage_id) + 1 if stage_id in self._ids else 0
        num_stages = str(len(self._ids))
        return Text.assemble(
            (f"{symbol} ", style),
            (f"{position:{len(num_stages)}}/{num_stages} ", FAINT),
            (self.padded_id(stage_id, self._ids), "bold"),
        )

    def padded_id(self, stage_id: str, among: Sequence[str]) -> str:
        """Return the id, padded to the widest of `among`."""
        shown = one_line(stage_id)
        width = min(_MAX_ID_WIDTH, max(cell_len(one_line(other)) for other in [stage_id, *among]))
        return shown if cell_len(shown) > width else set_cell_size(shown, width)

    def finished(self, stage: StageFinished) -> Text:
        """Return `✓ 3/12 pretrain  train.supervised  done  41.3 s  val accuracy 99.02 % · loss 0.0313`."""
        outcome = _shown_outcome(stage)
        style = STYLES[outcome]
        line = self.lead(self._writer.theme.symbol(outcome), style, stage.stage_id)
        self.add_kind(line, stage.kind)
        line.append(f"  {outcome:7} ", style)
        seconds = "" if stage.outcome in run_summary.UNTIMED else seconds_text(stage.seconds)
        line.append(f"{seconds:>{_OUTCOME_AND_TIME_WIDTH - max(7, len(outcome)) - 1}}")
        room = None if self._writer.width is None else self._writer.width - line.cell_len - 3
        result = self._result(stage, room)
        return line.append(f"   {result}") if result else line

    def add_kind(self, line: Text, kind: str) -> None:
        """Append the kind if the terminal is wide enough."""
        if self._writer.width is None or self._writer.width >= _MIN_WIDTH_WITH_KIND:
            line.append(f"  {one_line(kind):{self._kind_width}}", FAINT)

    def running(self, stage_id: str, facts: str) -> Text:
        """Return `  3/12 pretrain  37 % · step 291/469 · loss 0.0213 · 0:25 left`, for a log file."""
        line = self.lead(" ", "", stage_id)
        return line.append(f"  {facts}")

    def _result(self, stage: StageFinished, room: int | None) -> str:
        """Return the key figures that fit, or the reason of a verdict or a skip."""
        if stage.outcome is Outcome.SKIPPED:
            return one_line(stage.message)
        separator = self._writer.theme.separator
        reasons = separator.join(one_line(gate.reason) for gate in run_summary.gates([stage]))
        if reasons and (room is None or cell_len(reasons) <= room or stage.outcome in _OF_FAILING_GATES):
            return reasons
        kept: list[str] = []
        figures = run_summary.stage_figures(stage)
        splits = [figure for figure in figures[_MAX_FIGURES:] if figure.text.endswith(_OTHER_SPLITS)]
        for figure in (*figures[:_MAX_FIGURES], *splits):
            longer = [*kept, one_line(str(figure))]
            if room is not None and cell_len(separator.join(longer)) > room:
                break
            kept = longer
        return separator.join(kept)


def _shown_outcome(stage: StageFinished) -> Outcome:
    """Return the outcome; of a gate that is done and could not decide, that."""
    is_done = stage.outcome in (Outcome.DONE, Outcome.CACHED)
    decisions = {gate.decision for gate in run_summary.gates([stage])} if is_done else set()
    return Outcome.UNDECIDED if Decision.UNDECIDED in decisions else stage.outcome
