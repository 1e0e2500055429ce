"""Options of `data.teacher_outputs`."""

from __future__ import annotations

from ptpipe import JSON, StageConfig, host


class TeacherOutputsConfig(StageConfig):
    """Options of `data.teacher_outputs`: none."""

    def resolved_options(self) -> dict[str, JSON]:
        """Return the number of threads here: the last bits of outputs depend on it."""
        return {"num_threads": host.num_threads()}
