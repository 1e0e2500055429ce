"""Options of `quant.analyze`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ptpipe import JSON, StageConfig, host


class AnalyzeConfig(StageConfig):
    """Options of `quant.analyze`."""

    split: Literal["val", "calibration", "train", "test"] = Field("val", description="split to measure on")
    num_samples: int | None = Field(
        512,
        gt=0,
        description="maximum number of samples, spread over the split; null: all. The time is that of as many passes "
        "over them as there are layers, the width of the intervals shrinks with the square root",
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="of each of the two one-sided limits of a layer's effect on the primary metric"
    )

    def resolved_options(self) -> dict[str, JSON]:
        """Return the number of threads here: the last bits of what the network computes depend on it."""
        return {"num_threads": host.num_threads()}
