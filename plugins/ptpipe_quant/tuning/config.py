"""Options of `quant.tune`."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from ptpipe import JSON, host
from ptpipe_quant.config import Observer, PrepareConfig

Remedy: TypeAlias = Observer | Literal["per_channel", "float"]


class TuneConfig(PrepareConfig):
    """Options of `quant.tune`; those of `quant.prepare` say where the search begins."""

    max_drop: float = Field(
        ge=0,
        description="maximum by which the int8 model may be worse than the float one in the primary metric, in its "
        "units, as in gate.quality: 0.005 is half a point of accuracy",
    )
    remedies: tuple[Remedy, ...] = Field(
        ("float",),
        min_length=1,
        description="what to change for a harmful layer, the cheapest first and the surest last: layers are found with "
        "the last one, then the others are tried for them, in order. An observer: another range of its output; "
        "per_channel: a scale for each channel of its weights, where `weights` is per_tensor; float: keep it float",
    )
    split: Literal["val", "calibration", "train", "test"] = Field(
        "val", description="split to measure on; leave the test split to a gate: the best of several trials flatters"
    )
    num_samples: int | None = Field(
        None, gt=0, description="maximum number of samples to measure on, spread over the split; null: all"
    )
    calibration_samples: int = Field(2000, ge=2, description="maximum number of samples to calibrate on")
    max_trials: int = Field(20, gt=0, description="number of int8 models to try at most")
    max_minutes: float | None = Field(
        None, gt=0, description="begin no further trial after this time; null: no limit. A resumed search counts all"
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="confidence, one-sided, to decide with on fewer samples than there are"
    )

    @model_validator(mode="after")
    def _has_remedies_in_order(self) -> Self:
        if len(set(self.remedies)) < len(self.remedies):
            raise ValueError("remedies: each is tried once")
        if "float" in self.remedies[:-1]:
            raise ValueError("remedies: float is the last one, nothing is left to try for a float layer")
        if self.observer in self.remedies:
            raise ValueError(f"remedies: {self.observer} is the observer of all layers already")
        if "per_channel" in self.remedies and self.weights != "per_tensor":
            raise ValueError("remedies: per_channel is what all layers have already, without weights: per_tensor")
        return self

    def observers(self) -> tuple[str, ...]:
        """Return the observers of layers without options of their own, and those to try."""
        return self.observer, *self.remedies

    def resolved_options(self) -> dict[str, JSON]:
        """Return the number of threads here: the last bits of what the network computes depend on it."""
        return {**super().resolved_options(), "num_threads": host.num_threads()}
