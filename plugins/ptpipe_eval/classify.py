"""Run a model over a split and compute its classification metrics: the work of `eval.classify`.

Shape legend: N samples, B of a batch, K classes.
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
    from ptpipe_eval.config import ClassifyConfig

_PROGRESS_INTERVAL_S = 0.2

OnBatch = Callable[[int], None]
"""Called after each batch with the number of samples done."""


@dataclass(frozen=True)
class EvalSplit:
    """The split of a data set that models are evaluated on; it has samples."""

    data: Data
    name: str
    """`test` or `val`."""

    @property
    def samples(self) -> Split:
        """Ids, labels and images."""
        return self.data.splits[self.name]

    def __str__(self) -> str:
        return f"split {self.name} of {self.data.info.name}"


def select_split(data: Data, name: str) -> EvalSplit:
    """Return the split. Raises StageError if it is empty or missing."""
    split = EvalSplit(data, name)
    if name not in data.splits or not len(data.splits[name]):
        filled = [other for other, samples in data.splits.items() if len(samples)]
        raise StageError(f"{split} is empty; splits with samples: {', '.join(filled) or 'none'}")
    return split


def predict_split(
    name: str, predict: Predictor, split: EvalSplit, batch_size: int | None, on_batch: OnBatch
) -> npt.NDArray[np.float32]:
    """Return the logits of every sample in the split's order, float32 of shape (N, K).

    `name` is the model's name in errors; `batch_size` None means the data set's. Raises StageError if the logits have
    another shape or are not finite (the error names the first such sample).
    """
    num_samples, num_classes = len(split.samples), split.data.info.num_classes
    (output,) = split.data.info.signature.outputs
    logits_NK = np.empty((num_samples, num_classes), dtype=np.float32)
    done = 0
    for batch in split.data.batches(split.name, batch_size=batch_size):
        logits_BK = predict(batch.input_arrays())[output.name]
        end = done + len(batch)
        if logits_BK.shape != (end - done, num_classes):
            raise StageError(
                f"{name} returned logits of shape {_shape_text(logits_BK.shape)} for {end - done} images, "
                f"expected {end - done} x {num_classes}"
            )
        finite_B = np.isfinite(logits_BK).all(axis=1)
        if not finite_B.all():
            position = done + int(finite_B.argmin())
            raise StageError(f"{name}: the logits of sample {split.samples.ids[position]} are not finite")
        logits_NK[done:end] = logits_BK
        done = end
        on_batch(done)
    assert done == num_samples, f"{split}: batches contain {done} of {num_samples} samples"
    return logits_NK


def progress_callback(ctx: Context, total: int, offset: int = 0, **facts: str) -> OnBatch:
    """Return a callback that reports progress a few times a second and at the end.

    `total` counts the images of the whole stage, `offset` those done before the first batch; `facts` are shown
    beside the progress bar.
    """
    started_s = reported_s = time.monotonic()

    def on_batch(done: int) -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if offset + done == total or now_s - reported_s >= _PROGRESS_INTERVAL_S:
            reported_s = now_s
            images_per_s = round(done / max(now_s - started_s, 1e-9))
            ctx.progress(offset + done, total, "images", images_per_s=images_per_s, **facts)

    return on_batch


def classify_split(config: ClassifyConfig, ctx: Context, model: Deployable, data: Data) -> Predictions:
    """Predict every sample of the configured split and compute the metrics."""
    name = ctx.input_names.get("model", ("the model",))[0]
    data.info.check_fit(name, model.signature)
    split = select_split(data, config.split)
    with model.predictor(config.num_threads) as predict:
        logits_NK = predict_split(name, predict, split, config.batch_size, progress_callback(ctx, len(split.samples)))
    metrics = classification_metrics(logits_NK, split.samples.labels_N, data.info.class_names)
    ctx.metric(**{name: metrics[name] for name in ("top1", "top5", "loss") if name in metrics})
    return Predictions(
        split.samples.ids,
        split.samples.labels_N,
        logits_NK,
        {"data": data.info.name, "split": config.split, "format": model.format} | metrics,
    )


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
