"""How a model's outputs compare with those of the file that it was made from, on real samples.

Shape legend: N samples, or their pixels or tokens; K classes, columns or channels of an output.
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
from ptpipe_torch import Data, DatasetInfo, Deployable, OnnxFile
from ptpipe_torch.parity.comparison import ComparedSamples, counted_rows, figures_of, output_rows
from ptpipe_torch.parity.parity import signal_to_noise

Rows = npt.NDArray[np.float32]
Outputs = Mapping[str, npt.NDArray[Any]]

_ROUNDING = 1e-5
"""Differences between samples, of the largest value, that may be rounding of float32, as in untrained detectors."""


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
        _check(ctx, name, pair)
    return figures_of(outputs)


@dataclass(frozen=True, eq=False)
class PairedRows:
    """An output of two models for the same samples."""

    first_NK: Rows
    second_NK: Rows
    are_class_scores: bool
    num_rows: Sequence[int]
    """Of each sample: pixels and tokens have a row each, and texts of batches of unequal length not as many."""
    num_features: int | None
    """Size of the last axis of an output with three; None: it has fewer, or more."""
    is_counted_N: npt.NDArray[np.bool_] | None
    """Which rows of class scores are predictions; None: all. As in `Parity`, differences are of all rows."""

    @property
    def num_samples(self) -> int:
        """That the rows are of."""
        return len(self.num_rows)

    @property
    def figures(self) -> dict[str, JSON]:
        """Figures named as those of `export.onnx`; `sqnr_db` and `channel_sqnr_db`: see `signal_to_noise`."""
        value = "logit" if self.are_class_scores else "output"
        difference_NK = np.abs(self.second_NK - self.first_NK)
        figures: dict[str, JSON] = {
            "num_samples": self.num_samples,
            f"max_abs_{value}_difference": float(difference_NK.max()),
            f"mean_abs_{value}_difference": float(difference_NK.mean()),
            f"rms_{value}_difference": math.sqrt(float(np.square(difference_NK, dtype=np.float64).mean())),
        }
        has_channels = not self.are_class_scores and len(self.first_NK) > self.num_samples
        counted = slice(None) if self.is_counted_N is None else self.is_counted_N
        first_NK, second_NK = self.first_NK[counted], self.second_NK[counted]
        figures |= signal_to_noise(first_NK, second_NK, has_channels, self.num_features)
        if self.are_class_scores:
            figures["top1_agreement"] = float(np.mean(first_NK.argmax(1) == second_NK.argmax(1)))
        return figures


def paired_rows(
    ctx: Context,
    models: tuple[Deployable, Deployable],
    data: Data,
    split: str,
    num_samples: int,
    *,
    is_reported: bool = True,
) -> Mapping[str, PairedRows]:
    """Return the outputs of two models of one signature and input form for at most so many samples, by name.

    `is_reported`: whether the progress is.
    """
    samples, form = ComparedSamples(data, split, num_samples, ctx.seed), models[0].input_form

    def predicted() -> Iterator[tuple[Outputs, Outputs, Outputs]]:
        num_done = 0
        with models[0].predictor() as predict_first, models[1].predictor() as predict_second:
            order_N = samples.fitting(predict_first, form).positions
            for batch in data.batches(split, order_N=order_N, batch_size=samples.batch_size, input_form=form):
                inputs = batch.input_arrays()
                yield inputs, predict_first(inputs), predict_second(inputs)
                num_done += len(batch)
                if is_reported:
                    ctx.progress(num_done, len(order_N), "samples")

    names = [spec.name for spec in models[0].signature.outputs if spec.is_float]
    return join_rows(data.info, names, predicted())


def join_rows(
    info: DatasetInfo, names: Sequence[str], batches: Iterable[tuple[Outputs, Outputs, Outputs]]
) -> Mapping[str, PairedRows]:
    """Return outputs of two models by name.

    `batches`: of each the inputs, and the outputs of both models.
    """
    rows: dict[str, list[tuple[Rows, Rows]]] = {name: [] for name in names}
    counted: dict[str, list[npt.NDArray[np.bool_]]] = {name: [] for name in names}
    num_rows: dict[str, list[int]] = {name: [] for name in names}
    shapes: dict[str, tuple[int, ...]] = {}
    for inputs, first, second in batches:
        shapes |= {name: first[name].shape for name in names}
        for name, pairs in rows.items():
            own, other = (output_rows(info.task, name, of[name]) for of in (first, second))
            pairs.append((own, other))
            num_samples = len(first[name])
            num_rows[name] += [len(own) // num_samples] * num_samples
            if (is_counted_N := counted_rows(info, name, inputs)) is not None:
                counted[name].append(is_counted_N)
    found = {}
    for name, pairs in rows.items():
        first_NK, second_NK = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        num_features = shapes[name][2] if len(shapes[name]) == 3 else None
        is_counted_N = np.concatenate(counted[name]) if counted[name] else None
        is_scores = name in info.task.class_scores
        found[name] = PairedRows(first_NK, second_NK, is_scores, num_rows[name], num_features, is_counted_N)
    return found


def _check(ctx: Context, name: str, pair: PairedRows) -> None:
    for which, rows_NK in (("float", pair.first_NK), ("quantized", pair.second_NK)):
        if not np.isfinite(rows_NK).all():
            raise StageError(f"{ctx.kind}: {name} of the {which} file has values that are not finite")
    differs = _largest_range(pair.first_NK, pair.num_rows) > _ROUNDING * np.abs(pair.first_NK).max()
    if differs and _largest_range(pair.second_NK, pair.num_rows) == 0:
        raise ConstantOutputError(
            f"{ctx.kind}: {name} of the quantized file is the same for all {pair.num_samples} samples: its ranges cut "
            "off what tells them apart. Calibrate on real samples, or keep layers float (`skip`)"
        )


def _largest_range(rows_NK: Rows, num_rows: Sequence[int]) -> float:
    """Return the largest range over the samples that a value has, at one place in them. `num_rows`: of each sample."""
    low_LK = np.full((max(num_rows), rows_NK.shape[1]), np.inf, np.float32)
    high_LK = -low_LK
    for own_LK in np.split(rows_NK, np.cumsum(num_rows)[:-1]):
        for extreme, of in ((np.minimum, low_LK[: len(own_LK)]), (np.maximum, high_LK[: len(own_LK)])):
            extreme(of, own_LK, out=of)
    return float((high_LK - low_LK).max())
