"""Run a model over a split and compute its metrics: the work of `eval.predict`.

Shape legend: N samples, B of a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ptpipe import JSON, Context, StageError
from ptpipe_eval.quality.curves import curves_of
from ptpipe_torch import BATCH, Data, Deployable, InputForm, Predictions, Predictor, Split, TensorSpec
from ptpipe_torch.task.own_task import check_own_task
from ptpipe_torch.task.ranking import with_ranking
from ptpipe_torch.task.task import exact_sums

if TYPE_CHECKING:
    from ptpipe_eval.config import PredictConfig
    from ptpipe_eval.quality.recorder import SampleRecorder

_PROGRESS_INTERVAL_S = 0.2
_ROUNDING = 1e-6
_FILL = -1
"""What shorter rows of what is kept end in."""

OnBatch = Callable[[int], None]
"""Called after each batch with the number of samples done."""


@dataclass(frozen=True)
class EvalSplit:
    """The split of a data set that models are evaluated on; it has samples."""

    data: Data
    name: str
    """`test` or `val`."""
    input_form: InputForm = "normalized"
    """What the model takes that is evaluated."""
    outputs: tuple[TensorSpec, ...] = ()
    """What the model returns that is evaluated."""

    def of(self, model: Deployable) -> EvalSplit:
        """Return the split with the inputs that a model takes, and its outputs."""
        return replace(self, input_form=model.input_form, outputs=model.signature.outputs)

    @property
    def samples(self) -> Split:
        """Ids and columns."""
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


@dataclass
class Evaluation:
    """What the task's figures are computed from and, where wanted, what is kept of each sample."""

    split: EvalSplit
    keeps_samples: bool = False
    recorder: SampleRecorder | None = None
    """Receives every batch too."""
    _sums: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    _ranked: list[npt.NDArray[np.float32]] = field(default_factory=list)
    _kept: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    _num_done: int = 0

    def add(self, outputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> int:
        """Add a batch; return the number of samples so far."""
        task, start = self.split.data.info.task, self._num_done
        if not start:
            check_own_task(task, outputs, targets)
        for name, total in exact_sums(task, outputs, targets).items():
            self._sums[name] = self._sums[name] + total.numpy() if name in self._sums else total.numpy()
        if (ranked := task.label_scores(outputs, targets)) is not None:
            self._ranked.append(ranked.numpy())
        for name, rows in task.samples(outputs, targets).items() if self.keeps_samples else ():
            self._kept[name] = _with_rows(self._kept.get(name), start, rows.numpy(), len(self.split.samples))
        if self.recorder is not None:
            self.recorder.add(outputs, targets)
        self._num_done += len(next(iter(outputs.values())))
        return self._num_done

    def figures(self, name: str) -> dict[str, JSON]:
        """Return the task's figures, of all samples, and the curves of its rankings.

        Raises StageError, with the model's name `name`, for a metric of NaN or a fraction that is none.
        """
        num_samples, task = len(self.split.samples), self.split.data.info.task
        assert self._num_done == num_samples, f"{self.split}: batches contain {self._num_done} of {num_samples} samples"
        ranked = np.concatenate(self._ranked) if self._ranked else None
        figures = with_ranking(task, task.figures(self._sums, num_samples), ranked)
        for metric in task.metrics:
            value = figures[metric.name]
            if not (isinstance(value, int | float) and math.isfinite(value)):
                raise StageError(f"{name}: the {metric.name} on {self.split} is {value}, which no gate could judge")
            if metric.is_fraction and not -_ROUNDING < value < 1 + _ROUNDING:
                raise StageError(
                    f"{name}: the {metric.name} on {self.split} is {value:g}, and a fraction lies between 0 and 1: the "
                    f"task {type(task).__name__} must return no percentage, or not call it `is_fraction`"
                )
        return figures | curves_of(task, figures, ranked)

    @property
    def kept(self) -> Mapping[str, npt.NDArray[Any]]:
        """What the task keeps of each sample, by name, with N rows in the split's order; shorter rows end in -1."""
        return self._kept


def _with_rows(
    kept_N: npt.NDArray[Any] | None, start: int, rows_B: npt.NDArray[Any], num_samples: int
) -> npt.NDArray[Any]:
    """Return the rows kept so far and these from `start` on, in place unless these are longer."""
    if kept_N is None:
        kept_N = np.empty((num_samples, *rows_B.shape[1:]), dtype=rows_B.dtype)
    if kept_N.shape[1:] != rows_B.shape[1:]:  # tokens: a batch is as long as its longest text
        sizes = np.maximum(kept_N.shape[1:], rows_B.shape[1:])
        kept_N, rows_B = (_filled_up(array, sizes) for array in (kept_N, rows_B))
    kept_N[start : start + len(rows_B)] = rows_B
    return kept_N


def _filled_up(array: npt.NDArray[Any], sizes: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    missing = [(0, 0), *((0, int(size)) for size in sizes - array.shape[1:])]
    return np.pad(array, missing, constant_values=_FILL)


def evaluate_split(
    name: str, predict: Predictor, evaluation: Evaluation, batch_size: int | None, on_batch: OnBatch
) -> None:
    """Add the predictions of every sample.

    `name` is the model's name in errors; `batch_size` None means the data set's. Raises StageError if an output has
    another shape or is not finite (the error names the first such sample).
    """
    split = evaluation.split
    done = 0
    input_specs = split.data.info.signature.inputs
    for batch in split.data.batches(split.name, batch_size=batch_size, input_form=split.input_form):
        inputs = batch.input_arrays()
        arrays, ids_B = predict(inputs), split.samples.ids[done : done + len(batch)]
        sizes = _sizes(input_specs, inputs)
        outputs = {
            spec.name: torch.from_numpy(_checked(name, _sized(spec, sizes), arrays, ids_B)) for spec in split.outputs
        }
        done = evaluation.add(outputs, batch.targets)
        on_batch(done)


def _sizes(specs: Sequence[TensorSpec], inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, int]:
    """Return the sizes in a batch of axes that may have any: that of an output is that of the input."""
    pairs = (pair for spec in specs for pair in zip(spec.shape, inputs[spec.name].shape, strict=True))
    return {symbol: size for symbol, size in pairs if isinstance(symbol, str) and symbol != BATCH}


def _sized(spec: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
    return replace(spec, shape=tuple(sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape))


def _checked(
    name: str, spec: TensorSpec, arrays: Mapping[str, npt.NDArray[Any]], ids_B: npt.NDArray[np.str_]
) -> npt.NDArray[Any]:
    """Return a writable output, or raise StageError where it is not what the task expects."""
    array, num_samples = arrays[spec.name], len(ids_B)
    if not spec.fits(array.shape) or len(array) != num_samples:
        raise StageError(
            f"{name} returned {spec.name} of shape {_shape_text(array.shape)} for {num_samples} samples, expected "
            f"{_shape_text((num_samples, *spec.sample_shape))}"
        )
    finite_B = np.isfinite(array).reshape(num_samples, -1).all(axis=1)
    if not finite_B.all():
        raise StageError(f"{name}: the {spec.name} of sample {ids_B[int(finite_B.argmin())]} are not finite")
    return array if array.flags.writeable else array.copy()


def progress_callback(ctx: Context, total: int, offset: int = 0, **facts: str) -> OnBatch:
    """Return a callback that reports progress a few times a second and at the end.

    `total` counts the samples of the whole stage, `offset` those done before the first batch; `facts` are shown
    beside the progress bar.
    """
    started_s = reported_s = time.monotonic()

    def on_batch(done: int) -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if offset + done == total or now_s - reported_s >= _PROGRESS_INTERVAL_S:
            reported_s = now_s
            samples_per_s = round(done / max(now_s - started_s, 1e-9))
            ctx.progress(offset + done, total, "samples", samples_per_s=samples_per_s, **facts)

    return on_batch


def predict_split(config: PredictConfig, ctx: Context, model: Deployable, data: Data) -> Predictions:
    """Predict every sample of the configured split and compute the metrics."""
    from ptpipe_eval.target import as_on_target, report_exact_sums

    name = ctx.input_names.get("model", ("the model",))[0]
    data.info.check_fit(name, model.signature)
    split = select_split(data, config.split).of(model)
    evaluation = Evaluation(split, keeps_samples=True)
    on_target = as_on_target(model)
    with on_target.predictor(config.num_threads) as predict:
        evaluate_split(name, predict, evaluation, config.batch_size, progress_callback(ctx, len(split.samples)))
    figures = evaluation.figures(name)
    if on_target is not model:
        report_exact_sums(ctx, name, model, split, figures)
    for sentence in data.info.task.undefined(figures, config.split):
        ctx.notice(sentence)
    if metrics := data.info.task.metrics:  # unlabeled data have none
        ctx.metric(**{metric.name: figures[metric.name] for metric in metrics}, primary_metric=metrics[0].name)
    origin: dict[str, JSON] = {"data": data.info.name, "split": config.split, "format": model.format}
    origin["probabilities"] = dict(data.info.task.probability_functions)
    return Predictions(split.samples.ids, evaluation.kept, origin | {"num_samples": len(split.samples)} | figures)


def _shape_text(shape: tuple[int | str, ...]) -> str:
    return " x ".join(map(str, shape))
