"""Write a run as TensorBoard's event files: `runs/<id>/tensorboard/`. Imports neither torch nor TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ptpipe import Event, Progress, Reporter, RunFinished, RunStarted, StageFinished
from ptpipe_report import run_summary
from ptpipe_report.markdown import escape
from ptpipe_report.trackers.curves import Curves, Point
from ptpipe_report.trackers.text import comparisons, options_table

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

_FLUSH_S = 5


class TensorBoardTracker(Reporter):
    """Write curves, results, options, verdicts and comparisons; `tensorboard --logdir artifacts/runs` shows them."""

    def __init__(self) -> None:
        self._writer: EventFileWriter | None = None
        self._curves = Curves()

    def run_started(self, event: RunStarted) -> None:
        """Open the file; write the options."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(event.folder / "tensorboard"), flush_secs=_FLUSH_S)
        self._text("options", options_table(event))
        if event.overrides:
            self._text("overrides", "\n".join(f"    {override}" for override in event.overrides))

    def event(self, event: Event) -> None:
        """Write what the progress has of curves."""
        if isinstance(event, Progress):
            self._points(self._curves.progress(event))

    def stage_finished(self, event: StageFinished) -> None:
        """Write the stage's results, verdict and comparison."""
        self._points(self._curves.finished(event))
        for gate in run_summary.gates([event]):
            self._text(f"verdict/{gate.stage_id}", f"**{gate.decision}**: {escape(gate.reason)}")
        for table in comparisons(event):
            self._text(f"comparison/{event.stage_id}", table)

    def run_finished(self, event: RunFinished) -> None:
        """Write how the run ended, and close the file."""
        self._text("verdict", escape(run_summary.ending(event)))
        if self._writer:
            self._writer.close()
            self._writer = None

    def _points(self, points: Iterable[Point]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value, step in points:
            self._write(Summary(value=[Summary.Value(tag=name, simple_value=value)]), step)

    def _text(self, name: str, markdown: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode("utf-8", "replace")])
        self._write(Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)]), 0)

    def _write(self, summary: Summary, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as EventProto

        if self._writer:
            self._writer.add_event(EventProto(wall_time=time.time(), step=step, summary=summary))
