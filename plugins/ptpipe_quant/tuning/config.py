"""Options of `quant.tune`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ptpipe import JSON, host
from ptpipe_quant.config import PrepareConfig


class TuneConfig(PrepareConfig):
    """Options of `quant.tune`; those of `quant.prepare` say where the search begins."""

    max_drop: float = Field(
        ge=0,
        description="maximum by which the int8 model may be worse than the float one in the primary metric, in its "
        "units, as in gate.quality: 0.005 is half a point of accuracy",
    )
    split: Literal["val", "calibration", "train", "test"] = Field(
        "val", description="split to measure on; leave the test split to a gate: the best of several trials flatters"
    )
    num_samples: int | None = Field(
        None, gt=0, description="maximum number of samples to measure on, spread over the split; null: all"
    )
    calibration_samples: int = Field(2000, gt=0, description="maximum number of samples to calibrate on")
    max_trials: int = Field(20, gt=0, description="number of int8 models to try at most")
    max_minutes: float | None = Field(
        None, gt=0, description="begin no further trial after this time; null: no limit. A resumed search counts all"
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="confidence, one-sided, to decide with on fewer samples than there are"
    )

    def resolved_options(self) -> dict[str, JSON]:
        """Return the number of threads here: the last bits of what the network computes depend on it."""
        return {**super().resolved_options(), "num_threads": host.num_threads()}
