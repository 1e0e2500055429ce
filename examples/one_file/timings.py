"""A reporter in one file: writes the stages' times to `timings.csv` in the run's folder."""

from __future__ import annotations

from ptpipe import Reporter, RunFinished, hookimpl


class Timings(Reporter):
    """Overrides the one method that it needs."""

    def run_finished(self, event: RunFinished) -> None:
        rows = [f"{stage.stage_id},{stage.outcome},{stage.seconds:.3f}" for stage in event.stages]
        text = "\n".join(["stage,outcome,seconds", *rows, ""])
        (event.folder / "timings.csv").write_text(text, encoding="utf-8")


@hookimpl
def ptpipe_reporters() -> list[Reporter]:
    """Return a new reporter for each run."""
    return [Timings()]
