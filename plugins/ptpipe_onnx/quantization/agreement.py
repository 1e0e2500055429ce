"""How a model's outputs compare with those of the file that it was made from, on real samples.

Shape legend: N samples, K classes, or values of an output that are no scores of classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptpipe import JSON, Context, StageError
from ptpipe_onnx.quantization.config import QuantizerConfig
from ptpipe_torch import Data, Deployable, OnnxFile, Task
from ptpipe_torch.parity.comparison import BATCH_SIZE, ComparedSamples

_ROUNDING = 1e-12
"""Of a sum of squares in float64: a variance below it is that of a constant."""
Rows = npt.NDArray[np.float32]
Outputs = Mapping[str, npt.NDArray[Any]]


class ConstantOutputError(StageError):
    """An output is the same for all samples, and the float file's is not."""


def agreement(
    config: QuantizerConfig, ctx: Context, float_file: OnnxFile, file: OnnxFile, data: Data
) -> dict[str, JSON]:
    """Return the figures of all outputs, by name.

    Quantization's error is legitimate, and no limit is set here: gates do that. Raises StageError for outputs that are
    of no use: not finite, or the same for all samples where the float file's are not.
    """
    outputs = paired_rows(ctx, (float_file, file), data, config.compare_split, config.compare_samples)
    for name, pair in outputs.items():
        _check(ctx, name, pair.first_NK, pair.second_NK)
    return figures_of(outputs)


@dataclass(frozen=True, eq=False)
class PairedRows:
    """An output of two models for the same samples."""

    first_NK: Rows
    second_NK: Rows
    are_class_scores: bool
    num_samples: int
    """That the rows are of: pixels and tokens have a row each."""
    channel_noise: float | None = None
    """Mean over the second axis of the differences' power over the variance, 1 at most; None: an output without one."""

    @property
    def figures(self) -> dict[str, JSON]:
        """Figures named as those of `export.onnx`.

        `sqnr_db`: the signal-to-quantization-noise ratio, 10 log10 of the sum of squares over that of the differences;
        left out where nothing differs. `channel_sqnr_db`: that of an output with channels and positions, where all
        channels count alike: scores beside boxes in pixels, all rounded to 0, cost nothing in the other figure.
        """
        value = "logit" if self.are_class_scores else "output"
        difference_NK = np.abs(self.second_NK - self.first_NK)
        signal, noise = (float(np.square(rows, dtype=np.float64).mean()) for rows in (self.first_NK, difference_NK))
        figures: dict[str, JSON] = {
            "num_samples": self.num_samples,
            f"max_abs_{value}_difference": float(difference_NK.max()),
            f"mean_abs_{value}_difference": float(difference_NK.mean()),
            f"rms_{value}_difference": math.sqrt(noise),
        }
        if signal and noise:
            figures["sqnr_db"] = _decibels(signal / noise)
        if self.channel_noise:
            figures["channel_sqnr_db"] = _decibels(1 / self.channel_noise)
        if self.are_class_scores:
            figures["top1_agreement"] = float(np.mean(self.first_NK.argmax(1) == self.second_NK.argmax(1)))
        return figures


def _decibels(ratio: float) -> float:
    return round(10 * math.log10(ratio), 2)


class _ChannelNoise:
    """Sums over the batches, for each index of an output's second axis."""

    def __init__(self) -> None:
        self._sums: Any = 0.0

    def add(self, first: npt.NDArray[Any], second: npt.NDArray[Any]) -> None:
        """Add an output of two models, (B, C, ...)."""
        values_CP, difference_CP = (
            np.moveaxis(array, 1, 0).reshape(array.shape[1], -1).astype(np.float64) for array in (first, second - first)
        )
        powers = (np.ones_like(values_CP), values_CP, np.square(values_CP), np.square(difference_CP))
        self._sums = self._sums + np.stack([power_CP.sum(axis=1) for power_CP in powers])

    def result(self) -> float | None:
        """Return `PairedRows.channel_noise`; a channel that is constant counts as without noise where it stays so."""
        if not isinstance(self._sums, np.ndarray):
            return None
        count_C, sum_C, square_C, noise_C = self._sums
        variance_C = square_C - sum_C**2 / count_C
        is_constant_C = variance_C <= _ROUNDING * square_C
        ratios_C = np.where(is_constant_C, noise_C > 0, noise_C / np.where(is_constant_C, 1, variance_C))
        return float(np.minimum(ratios_C, 1).mean())


def figures_of(outputs: Mapping[str, PairedRows]) -> dict[str, JSON]:
    """Return the figures of all outputs, with the output's name in front where there are several."""
    return {
        key if len(outputs) == 1 else f"{name}.{key}": value
        for name, pair in outputs.items()
        for key, value in pair.figures.items()
    }


def paired_rows(
    ctx: Context, models: tuple[Deployable, Deployable], data: Data, split: str, num_samples: int
) -> Mapping[str, PairedRows]:
    """Return the outputs of two models of one signature and input form for at most so many samples, by name."""
    samples, form = ComparedSamples(data, split, num_samples, ctx.seed), models[0].input_form

    def predicted() -> Iterator[tuple[Outputs, Outputs]]:
        num_done = 0
        with models[0].predictor() as predict_first, models[1].predictor() as predict_second:
            order_N = samples.fitting(predict_first, form).positions
            size = min(BATCH_SIZE, data.loader.batch_size)
            for batch in data.batches(split, order_N=order_N, batch_size=size, input_form=form):
                inputs = batch.input_arrays()
                yield predict_first(inputs), predict_second(inputs)
                num_done += len(batch)
                ctx.progress(num_done, len(order_N), "samples")

    return join_rows(data.info.task, [spec.name for spec in models[0].signature.outputs], predicted())


def join_rows(task: Task, names: Sequence[str], batches: Iterable[tuple[Outputs, Outputs]]) -> Mapping[str, PairedRows]:
    """Return these outputs of two models, of one batch after the other, by name."""
    rows: dict[str, list[tuple[Rows, Rows]]] = {name: [] for name in names}
    channels = {name: _ChannelNoise() for name in names}
    num_samples = 0
    for first, second in batches:
        num_samples += len(first[names[0]])
        for name, pairs in rows.items():
            pairs.append((_rows(task, name, first[name]), _rows(task, name, second[name])))
            if first[name].ndim > 2 and name not in task.class_scores:
                channels[name].add(first[name], second[name])
    found = {}
    for name, pairs in rows.items():
        first_NK, second_NK = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        are_scores, noise = name in task.class_scores, channels[name].result()
        found[name] = PairedRows(first_NK, second_NK, are_scores, num_samples, noise)
    return found


def _rows(task: Task, name: str, output: npt.NDArray[np.generic]) -> Rows:
    """Return an output in its natural unit, as rows of the scores of classes, else of a sample."""
    values = task.in_natural_units(output.astype(np.float32, copy=False)).astype(np.float32, copy=False)
    if (axis := task.class_scores.get(name)) is None:
        return values.reshape(len(values), -1)
    scores = np.moveaxis(values, axis, -1)
    return scores.reshape(-1, scores.shape[-1])


def _check(ctx: Context, name: str, float_NK: Rows, quantized_NK: Rows) -> None:
    for which, rows_NK in (("float", float_NK), ("quantized", quantized_NK)):
        if not np.isfinite(rows_NK).all():
            raise StageError(f"{ctx.kind}: {name} of the {which} file has values that are not finite")
    if np.ptp(quantized_NK, axis=0).max() == 0 and np.ptp(float_NK, axis=0).max() > 0:
        raise ConstantOutputError(
            f"{ctx.kind}: {name} of the quantized file is the same for all {len(float_NK)} samples: its ranges cut off "
            "what tells them apart. Calibrate on real samples, or keep layers float (`skip`)"
        )
