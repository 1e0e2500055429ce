"""Examine models, put them side by side, and let gates say no: eval.classify, eval.compare, gate.*."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from ptpipe import Context, Stage, StageConfig, Verdict, hookimpl, stage
from ptpipe_eval.comparison import Comparison, Latency, Row, Threads
from ptpipe_torch import Data, Deployable, Predictions

if TYPE_CHECKING:
    from ptpipe import Plan, Problem

__all__ = ["Comparison", "Latency", "Row"]

_RUNTIMES = ("torch", "onnxruntime")

BatchSize: TypeAlias = Annotated[int, Field(ge=1, le=65536)]
EvalSplit: TypeAlias = Literal["test", "val"]


class ClassifyConfig(StageConfig):
    """Options of eval.classify."""

    split: EvalSplit = Field("test", description="the samples to predict")
    batch_size: BatchSize | None = Field(None, description="images predicted at once; null: as the data set says")
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="threads of one prediction; null: all of the machine"
    )


@stage("eval.classify", packages=_RUNTIMES)
def classify(config: ClassifyConfig, ctx: Context, model: Deployable, data: Data) -> Predictions:
    """Predict every sample of a split and work out top-1, top-5, loss, figures of each class and the confusion.

    Float, int8 and ONNX models go through the same code. The logits of every sample are kept by id. Ends with an
    error where model and data set don't fit, the split is empty, or a logit is not finite (the sample is named).
    """
    from ptpipe_eval.classification import classify_split

    return classify_split(config, ctx, model, data)


class CompareConfig(StageConfig):
    """Options of eval.compare."""

    baseline: str | None = Field(None, description="the model that the others are held against; null: the first")
    split: EvalSplit = Field("test", description="the samples that accuracy is counted on")
    batch_size: BatchSize | None = Field(
        None, description="images predicted at once where accuracy is counted; null: as the data set says"
    )
    batch_sizes: tuple[BatchSize, ...] = Field(
        (1, 32), description="batch sizes to time a prediction at; an empty list: no latency"
    )
    threads: tuple[Threads, ...] = Field(
        ("one", "all"), min_length=1, description="time with one thread, with all of the machine, or both"
    )
    budget_s: float = Field(
        0.2,
        gt=0,
        le=600,
        description="seconds to time one model at one batch size and thread count; steady ones take less",
    )

    @field_validator("batch_sizes", "threads")
    @classmethod
    def _each_once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) < len(values):
            raise ValueError("lists a value more than once")
        return values


@stage("eval.compare", per_machine=True, packages=_RUNTIMES)
def compare(config: CompareConfig, ctx: Context, models: Sequence[Deployable], data: Data) -> Comparison:
    """Put models side by side: format, size, accuracy, drop against a baseline, and latency.

    Rows are named as `needs` names the models. Latency is the wall time of one prediction on real samples, input in
    memory to logits in memory, after a warm-up; median, 10th and 90th percentile. It holds for this machine only.
    """
    from ptpipe_eval.table import compare_models

    return compare_models(config, ctx, models, data)


class GateConfig(StageConfig):
    """What all gates are told."""

    candidate: str = Field(description="the model to judge, named as in the needs of eval.compare")


def _want_one_of(config: StageConfig, *names: str) -> None:
    if all(getattr(config, name) is None for name in names):
        raise ValueError(f"give {' or '.join(names)} (or both)")


class AccuracyConfig(GateConfig):
    """Options of gate.accuracy."""

    max_drop: float | None = Field(
        None, ge=0, le=1, description="greatest loss of accuracy against the baseline; 0.003 is 0.3 points"
    )
    min_accuracy: float | None = Field(None, ge=0, le=1, description="least accuracy; 0.99 is 99 %")

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        _want_one_of(self, "max_drop", "min_accuracy")
        return self


@stage("gate.accuracy")
def gate_accuracy(config: AccuracyConfig, ctx: Context, comparison: Comparison) -> Verdict:
    """Refuse a model that loses more accuracy against the baseline, or has less of it, than allowed.

    The limit itself passes, to the sample. A refusal ends the run with exit code 3 after the other stages are done.
    """
    from ptpipe_eval.gates import judge_accuracy

    return judge_accuracy(config, comparison)


class SizeConfig(GateConfig):
    """Options of gate.size."""

    max_share: float | None = Field(None, gt=0, description="greatest size over the baseline's; 0.27 is 27 %")
    max_bytes: int | None = Field(None, ge=1, description="greatest size in bytes")

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        _want_one_of(self, "max_share", "max_bytes")
        return self


@stage("gate.size")
def gate_size(config: SizeConfig, ctx: Context, comparison: Comparison) -> Verdict:
    """Refuse a model whose file is greater than allowed.

    The limit itself passes. A refusal ends the run with exit code 3 after the other stages are done.
    """
    from ptpipe_eval.gates import judge_size

    return judge_size(config, comparison)


class LatencyConfig(GateConfig):
    """Options of gate.latency."""

    batch_size: BatchSize = Field(1, description="images of one prediction; one that eval.compare measured")
    threads: Threads = Field("one", description="with one thread or with all of the machine")
    max_ms: float | None = Field(None, gt=0, description="greatest median in milliseconds")
    max_share: float | None = Field(None, gt=0, description="greatest median over the baseline's; 0.5 is half its time")
    fail_undecided: bool = Field(False, description="end with exit code 4 where the comparison lacks the figure")

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        _want_one_of(self, "max_ms", "max_share")
        return self


@stage("gate.latency")
def gate_latency(config: LatencyConfig, ctx: Context, comparison: Comparison) -> Verdict:
    """Refuse a model that takes longer for a prediction than allowed.

    Medians are compared. A refusal ends the run with exit code 3 after the other stages are done; a figure that the
    comparison lacks leaves the gate undecided.
    """
    from ptpipe_eval.gates import judge_latency

    return judge_latency(config, comparison)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Offer the kinds of this plugin."""
    return [classify, compare, gate_accuracy, gate_size, gate_latency]


@hookimpl
def ptpipe_check(plan: Plan) -> Iterable[Problem]:
    """Find gates and baselines that name what is not compared, and latencies that nobody measures."""
    from ptpipe_eval.checks import comparison_problems

    return comparison_problems(plan)
