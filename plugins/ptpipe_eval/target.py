"""Predict as the processors do that a model was made for, where this one computes something else.

An ONNX file of `backend: qnnpack` is for phones, whose integer sums are exact. On x86 processors without VNNI the usual
kernels of ONNX Runtime saturate: a gate would judge the machine that builds the file. Latency is measured as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ptpipe import JSON, Context, StageError
from ptpipe_eval.predict import EvalSplit, Evaluation, evaluate_split, progress_callback
from ptpipe_eval.quality.gates import metric_text
from ptpipe_torch import Deployable, OnnxFile, Selected


def as_on_target(model: Deployable) -> Deployable:
    """Return what predicts as the model does where it is to run; the model itself where that is no different."""
    inner = model.model if isinstance(model, Selected) else model
    on_target = inner.as_on_target() if isinstance(inner, OnnxFile) else inner
    return model if on_target is inner else on_target


def report_exact_sums(
    ctx: Context, name: str, model: Deployable, split: EvalSplit, figures: Mapping[str, JSON]
) -> None:
    """Say that a model was predicted with exact sums, and what an application on this processor would get.

    `figures`: those with exact sums.
    """
    metric, total = split.data.info.task.primary_metric, len(split.samples)
    evaluation = Evaluation(split.of(model))
    on_batch = progress_callback(ctx, total, model=f"{name}, usual kernels")
    value = metric_text(metric, cast("float", figures[metric.name]), total)
    try:
        with model.predictor() as predict:
            evaluate_split(name, predict, evaluation, None, on_batch)
        here = metric_text(metric, cast("float", evaluation.figures(name)[metric.name]), total)
    except StageError as error:
        here = f"not known ({error})"
    remedy = ". To ship it to such machines too, set `reduce_range: true` where it is quantized"
    ctx.notice(
        f"{name} was made for qnnpack, so its quality is that of exact sums, as ARM computes them: {metric.name} "
        f"{value}. On this processor, which has no VNNI, sums of 8-bit products saturate: {metric.name} {here}"
        f"{'' if here == value else remedy}"
    )
