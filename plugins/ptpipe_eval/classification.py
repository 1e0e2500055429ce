"""Run one model over one split, and say what came of it.

Shape legend: N samples, B of a batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptpipe import Context, StageError
from ptpipe_eval.metrics import classification_metrics
from ptpipe_torch import Data, Deployable, Predictions, Predictor, Split

if TYPE_CHECKING:
    from ptpipe_eval import ClassifyConfig

_SECONDS_BETWEEN_NEWS = 0.2

OnBatch = Callable[[int], None]
"""Told how many samples are done, after each batch."""


@dataclass(frozen=True)
class Sitting:
    """What a model is examined on: a split of a data set, known not to be empty."""

    data: Data
    split: str

    @property
    def samples(self) -> Split:
        """Ids, labels and images."""
        return self.data.splits[self.split]

    @property
    def name(self) -> str:
        """`split test of mnist`."""
        return f"split {self.split} of {self.data.info.name}"


def open_sitting(data: Data, split: str) -> Sitting:
    """Find the split. Raises StageError where it is empty."""
    sitting = Sitting(data, split)
    if split not in data.splits or not len(data.splits[split]):
        filled = [name for name, part in data.splits.items() if len(part)]
        raise StageError(f"{sitting.name} is empty; there are samples in: {', '.join(filled) or 'none'}")
    return sitting


def check_fit(name: str, model: Deployable, data: Data) -> None:
    """Raise StageError where model and data set differ in the number of classes or the shape of an image."""
    info = data.info
    if model.num_classes != info.num_classes:
        raise StageError(f"{name} tells {model.num_classes} classes apart, {info.name} has {info.num_classes}")
    if tuple(model.input_shape_CHW) != tuple(info.shape_CHW):
        raise StageError(
            f"{name} takes images of shape {_by(model.input_shape_CHW)} (channels x height x width), "
            f"{info.name} has {_by(info.shape_CHW)}"
        )


def predict_split(
    name: str, predict: Predictor, sitting: Sitting, batch_size: int | None, on_batch: OnBatch
) -> npt.NDArray[np.float32]:
    """Logits of every sample in the split's order, float32 of shape (N, K).

    Raises StageError where they are of another shape or not finite; the latter names the first such sample.
    """
    num_samples, num_classes = len(sitting.samples), sitting.data.info.num_classes
    logits_NK = np.empty((num_samples, num_classes), dtype=np.float32)
    done = 0
    for batch in sitting.data.batches(sitting.split, batch_size=batch_size):
        logits_BK = predict(np.ascontiguousarray(batch.images_NCHW.numpy()))
        end = done + len(batch.labels_N)
        if logits_BK.shape != (end - done, num_classes):
            raise StageError(
                f"{name} answered {end - done} images with logits of shape {_by(logits_BK.shape)}, "
                f"where {end - done} x {num_classes} were due"
            )
        finite_B = np.isfinite(logits_BK).all(axis=1)
        if not finite_B.all():
            position = done + int(finite_B.argmin())
            raise StageError(f"{name}: the logits of sample {sitting.samples.ids[position]} are not finite")
        logits_NK[done:end] = logits_BK
        done = end
        on_batch(done)
    assert done == num_samples, f"{sitting.name}: batches gave {done} of {num_samples} samples"
    return logits_NK


def news(ctx: Context, total: int, offset: int = 0, **facts: str) -> OnBatch:
    """Tell the progress of a walk over images a few times a second, and at its end."""
    started = told = time.monotonic()

    def on_batch(done: int) -> None:
        nonlocal told
        now = time.monotonic()
        if offset + done == total or now - told >= _SECONDS_BETWEEN_NEWS:
            told = now
            ctx.progress(offset + done, total, "images", images_per_s=round(done / max(now - started, 1e-9)), **facts)

    return on_batch


def classify_split(config: ClassifyConfig, ctx: Context, model: Deployable, data: Data) -> Predictions:
    """Do the work of `eval.classify`."""
    name = ctx.input_names.get("model", ("the model",))[0]
    check_fit(name, model, data)
    sitting = open_sitting(data, config.split)
    with model.predictor(config.num_threads) as predict:
        on_batch = news(ctx, len(sitting.samples))
        logits_NK = predict_split(name, predict, sitting, config.batch_size, on_batch)
    metrics = classification_metrics(logits_NK, sitting.samples.labels_N, data.info.class_names)
    ctx.metric(**{word: metrics[word] for word in ("top1", "top5", "loss") if word in metrics})
    return Predictions(
        sitting.samples.ids,
        sitting.samples.labels_N,
        logits_NK,
        {"data": data.info.name, "split": config.split, "format": model.format} | metrics,
    )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
