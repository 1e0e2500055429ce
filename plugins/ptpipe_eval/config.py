"""Options of eval.* and gate.*. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from ptpipe import JSON, StageConfig, host
from ptpipe_eval.latency.latencies import Threads

BatchSize: TypeAlias = Annotated[int, Field(ge=1, le=65536)]
SplitName: TypeAlias = Literal["test", "val"]
OnInconclusive: TypeAlias = Literal["estimate", "warn", "fail"]


class PredictConfig(StageConfig):
    """Options of eval.predict."""

    split: SplitName = Field("test", description="the split to predict")
    batch_size: BatchSize | None = Field(None, description="samples per prediction; null: the data set's batch size")
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="threads per prediction; null: as many as the machine has processors"
    )

    def resolved_options(self) -> dict[str, JSON]:
        """Return the number of threads here: the last bits of logits depend on it."""
        return {"num_threads": self.num_threads or host.num_threads()}


class TimingOptions(StageConfig):
    """Options of kinds that measure latency."""

    baseline: str | None = Field(None, description="the model that the others are compared with; null: the first")
    split: SplitName = Field("test", description="the split whose samples are predicted")
    batch_sizes: tuple[BatchSize, ...] = Field(
        (1, 32), description="batch sizes to measure latency at; an empty list: no latency"
    )
    lengths: tuple[Annotated[int, Field(ge=1, le=1_048_576)], ...] = Field(
        (),
        description="lengths of sequences to measure latency at: real ones, cut or padded; an empty list: their own",
    )
    threads: tuple[Threads, ...] = Field(
        ("one", "all"), min_length=1, description="measure latency with one thread, with all processors, or both"
    )
    budget_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="seconds to measure the latency of all models in; it ends sooner when all ratios are precise",
    )
    precision: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="the half-width of the 95 % confidence interval at which a ratio of latencies is precise",
    )

    @field_validator("batch_sizes", "lengths", "threads")
    @classmethod
    def _unique(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return _without_repetition(values)


class EvalLatencyConfig(TimingOptions):
    """Options of eval.latency."""

    batch_sizes: tuple[BatchSize, ...] = Field((1, 32), min_length=1, description="batch sizes to measure latency at")


class CompareConfig(TimingOptions):
    """Options of eval.compare."""

    batch_size: BatchSize | None = Field(
        None, description="samples per prediction when measuring metrics; null: the data set's batch size"
    )


class GateConfig(StageConfig):
    """Options of every gate."""

    candidate: str | None = Field(None, description="the model to judge, named as in the needs of eval.compare")
    candidates: tuple[str, ...] | None = Field(
        None, min_length=1, description="several models to judge, in place of candidate: each of them must pass"
    )

    @model_validator(mode="after")
    def _names_models(self) -> Self:
        if (self.candidate is None) == (self.candidates is None):
            raise ValueError("give either candidate, a model, or candidates, a list of models that must all pass")
        return self

    @field_validator("candidates")
    @classmethod
    def _unique(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return _without_repetition(names) if names else names

    @property
    def names(self) -> tuple[str, ...]:
        """The models to judge."""
        return self.candidates or (str(self.candidate),)


class DropTest(StageConfig):
    """Options of a test whether a model is worse than the baseline."""

    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="confidence to decide on max_drop with, one-sided; 0.95 errs once in 20 times"
    )
    on_inconclusive: OnInconclusive = Field(
        "estimate",
        description="where the samples are too few to decide on max_drop, end with exit code 4: always (fail), never "
        "(warn), or if the drop on these samples is above max_drop (estimate)",
    )
    max_drop: float | None = None


class BaselineOption(StageConfig):
    """The option of gates that judge by an accepted model."""

    baseline_file: str | None = Field(
        None,
        min_length=1,
        description="compare with the model that this file of `ptpipe baseline accept` has, not with the comparison's "
        "baseline",
    )


class AccuracyConfig(BaselineOption, DropTest, GateConfig):
    """Options of gate.accuracy."""

    max_drop: float | None = Field(
        None, ge=0, le=1, description="maximum loss of accuracy against the baseline; 0.003 is 0.3 percentage points"
    )
    min_accuracy: float | None = Field(None, ge=0, le=1, description="minimum accuracy on these samples; 0.99 is 99 %")

    @model_validator(mode="after")
    def _has_limit(self) -> Self:
        _require_any(self, "max_drop", "min_accuracy")
        return self


class QualityConfig(BaselineOption, DropTest, GateConfig):
    """Options of gate.quality."""

    metric: str | None = Field(
        None, min_length=1, description="a metric of the data set's task; null: the one that models are compared by"
    )
    max_drop: float | None = Field(
        None, ge=0, description="maximum by which the candidate may be worse than the baseline, in units of the metric"
    )
    min_value: float | None = Field(None, description="minimum of the metric on these samples, where higher is better")
    max_value: float | None = Field(
        None, description="maximum of the metric on these samples, where lower is better: a loss, an error"
    )

    @model_validator(mode="after")
    def _has_limit(self) -> Self:
        _require_any(self, "max_drop", "min_value", "max_value")
        return self


class SelectConfig(DropTest):
    """Options of select.best."""

    max_drop: float = Field(
        ge=0, description="maximum by which a model may be worse than the baseline, in units of the metric"
    )
    metric: str | None = Field(
        None, min_length=1, description="a metric of the data set's task; null: the one that models are compared by"
    )
    by: Literal["size", "latency", "quality"] = Field(
        "size", description="what is best among the models that pass; the others decide, in this order, between equals"
    )
    batch_size: BatchSize = Field(1, description="the latency at this batch size")
    threads: Threads = Field("one", description="the latency with one thread or with all processors")
    length: Annotated[int, Field(ge=1, le=1_048_576)] | None = Field(
        None, description="a length of sequences that eval.compare measured; null: where it has no lengths"
    )


class SizeConfig(GateConfig):
    """Options of gate.size."""

    renamed_options: ClassVar[Mapping[str, str]] = {"max_share": "max_ratio"}

    max_ratio: float | None = Field(
        None, gt=0, description="maximum size as a fraction of the baseline's; 0.27 is 27 %"
    )
    max_bytes: int | None = Field(None, ge=1, description="maximum size in bytes")

    @model_validator(mode="after")
    def _has_limit(self) -> Self:
        _require_any(self, "max_ratio", "max_bytes")
        return self


class LatencyConfig(GateConfig):
    """Options of gate.latency."""

    renamed_options: ClassVar[Mapping[str, str]] = {
        "max_share": "max_ratio",
        "fail_undecided": "on_inconclusive (true is now fail, false is warn)",
    }

    batch_size: BatchSize = Field(1, description="samples per prediction; a batch size that eval.compare measured")
    threads: Threads = Field("one", description="the latency with one thread or with all processors")
    length: Annotated[int, Field(ge=1, le=1_048_576)] | None = Field(
        None, description="a length of sequences that eval.compare measured; null: where it has no lengths"
    )
    max_ms: float | None = Field(None, gt=0, description="maximum median in milliseconds")
    max_ratio: float | None = Field(
        None, gt=0, description="maximum ratio to the baseline's latency; 0.5 is half its time"
    )
    on_inconclusive: OnInconclusive = Field(
        "estimate",
        description="where the limit is inside the confidence interval, end with exit code 4: always (fail), never "
        "(warn), or if the estimate is beyond the limit or nothing was measured (estimate)",
    )

    @model_validator(mode="after")
    def _has_limit(self) -> Self:
        _require_any(self, "max_ms", "max_ratio")
        return self


def _without_repetition(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError("lists a value more than once")
    return values


def _require_any(config: StageConfig, *names: str) -> None:
    if all(getattr(config, name) is None for name in names):
        raise ValueError(f"give {' or '.join(names)} (or {'both' if len(names) == 2 else 'several'})")
