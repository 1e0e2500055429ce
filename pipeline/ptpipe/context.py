"""What a stage may use beyond its options and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ptpipe.artifact import JSON
from ptpipe.events import Attachment, Event, LogLine, Metric, Notice, Progress


@dataclass(frozen=True)
class Context:
    """The second parameter of every stage function.

    `scratch` is a folder that survives a kill and is handed to the next try of the same work (the same key);
    it is deleted once the stage is done. `seed` is the manifest's. Everything said here reaches the reporters,
    and metrics and notices are kept with the stage's result, so that a cached stage says them again.
    """

    stage_id: str
    kind: str
    seed: int
    scratch: Path
    input_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each port, the references it is bound to, as in the manifest: `{"models": ("pretrain", "onnx")}`."""
    tell: Callable[[Event], None] = lambda event: None
    rank: int = 0
    """Which of the stage's workers this is; the outputs of rank 0 are the stage's."""
    num_workers: int = 1
    """How many processes do the stage together."""

    def progress(self, done: int, total: int | None, unit: str, **facts: float | int | str) -> None:
        """Say how far the work is; `facts` (loss, images_per_s ...) are shown beside the bar.

        Cheap, but not free: call it a few times a second, not a few thousand. The console works out the ETA.
        """
        self.tell(Progress(self.stage_id, done, total, unit, dict(facts)))

    def metric(self, **values: JSON) -> None:
        """Record facts of the result (`accuracy=0.991`). The last value of a name wins."""
        for name, value in values.items():
            self.tell(Metric(self.stage_id, name, value))

    def notice(self, text: str) -> None:
        """Say something that nobody may overlook: shown in the console, the record and the report."""
        self.tell(Notice(self.stage_id, text))

    def attach(self, file: Path) -> None:
        """Give a file of the scratch folder (a trace, a picture) to the run: it is copied into the run's folder.

        It belongs to this run, and not to the stage's result: a run that finds the stage cached doesn't have it.
        """
        self.tell(Attachment(self.stage_id, str(file)))

    def log(self, text: str) -> None:
        """Write a line to the run's log (and to the screen with --verbose)."""
        self.tell(LogLine(self.stage_id, text))
