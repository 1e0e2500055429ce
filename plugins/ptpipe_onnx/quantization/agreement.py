"""How a model's outputs compare with those of the file that it was made from, on real samples.

Shape legend: N samples, K classes, or values of an output that are no scores of classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ptpipe import JSON, Context, StageError
from ptpipe_onnx.quantization.config import QuantizerConfig
from ptpipe_torch import Data, Deployable, OnnxFile, Task, epoch_order

_BATCH_SIZE = 64
Rows = npt.NDArray[np.float32]
Outputs = Mapping[str, npt.NDArray[Any]]


def agreement(
    config: QuantizerConfig, ctx: Context, float_file: OnnxFile, file: OnnxFile, data: Data
) -> dict[str, JSON]:
    """Return the figures of all outputs, by name.

    Quantization's error is legitimate, and no limit is set here: gates do that. Raises StageError for outputs that are
    of no use: not finite, or the same for all samples where the float file's are not.
    """
    outputs = paired_rows(ctx, (float_file, file), data, config.compare_split, config.compare_samples)
    for name, pair in outputs.items():
        _check(ctx, name, *pair)
    return compare_outputs(data.info.task, outputs)


def compare_outputs(task: Task, outputs: Mapping[str, tuple[Rows, Rows]]) -> dict[str, JSON]:
    """Return the figures of all outputs, with the output's name in front where there are several."""
    found: dict[str, JSON] = {}
    for name, (float_NK, quantized_NK) in outputs.items():
        figures = compare_rows(float_NK, quantized_NK, are_class_scores=name in task.class_scores)
        found |= {key if len(outputs) == 1 else f"{name}.{key}": value for key, value in figures.items()}
    return found


def compare_rows(float_NK: Rows, quantized_NK: Rows, *, are_class_scores: bool) -> dict[str, JSON]:
    """Return figures of one output, named as those of `export.onnx`.

    `sqnr_db`: the signal-to-quantization-noise ratio, 10 log10 of the sum of squares over that of the differences;
    left out where nothing differs.
    """
    value = "logit" if are_class_scores else "output"
    difference_NK = np.abs(quantized_NK - float_NK)
    signal, noise = (float(np.square(rows, dtype=np.float64).mean()) for rows in (float_NK, difference_NK))
    figures: dict[str, JSON] = {
        "num_samples": len(float_NK),
        f"max_abs_{value}_difference": float(difference_NK.max()),
        f"mean_abs_{value}_difference": float(difference_NK.mean()),
        f"rms_{value}_difference": math.sqrt(noise),
    }
    if signal and noise:
        figures["sqnr_db"] = round(10 * math.log10(signal / noise), 2)
    if are_class_scores:
        figures["top1_agreement"] = float(np.mean(float_NK.argmax(1) == quantized_NK.argmax(1)))
    return figures


def paired_rows(
    ctx: Context, models: tuple[Deployable, Deployable], data: Data, split: str, num_samples: int
) -> Mapping[str, tuple[Rows, Rows]]:
    """Return the outputs of two models of one signature and input form for at most so many samples, as rows by name."""
    order_N = epoch_order(len(data.splits[split]), ctx.seed, 0)[:num_samples]

    def predicted() -> Iterator[tuple[Outputs, Outputs]]:
        num_done = 0
        with models[0].predictor() as predict_first, models[1].predictor() as predict_second:
            for batch in data.batches(split, order_N=order_N, batch_size=_BATCH_SIZE, input_form=models[0].input_form):
                inputs = batch.input_arrays()
                yield predict_first(inputs), predict_second(inputs)
                num_done += len(batch)
                ctx.progress(num_done, len(order_N), "samples")

    return join_rows(data.info.task, [spec.name for spec in models[0].signature.outputs], predicted())


def join_rows(
    task: Task, names: Sequence[str], batches: Iterable[tuple[Outputs, Outputs]]
) -> Mapping[str, tuple[Rows, Rows]]:
    """Return these outputs of two models, of one batch after the other, as rows by name."""
    rows: dict[str, list[tuple[Rows, Rows]]] = {name: [] for name in names}
    for first, second in batches:
        for name, pairs in rows.items():
            pairs.append((_rows(task, name, first[name]), _rows(task, name, second[name])))
    return {
        name: (np.concatenate([one for one, _ in pairs]), np.concatenate([other for _, other in pairs]))
        for name, pairs in rows.items()
    }


def _rows(task: Task, name: str, output: npt.NDArray[np.generic]) -> Rows:
    """Return an output in its natural unit, as rows of the scores of classes, else of a sample."""
    values = output.astype(np.float32, copy=False)
    if task.output_scale:
        values = ((values - np.array(task.output_shift)) / np.array(task.output_scale)).astype(np.float32)
    if (axis := task.class_scores.get(name)) is None:
        return values.reshape(len(values), -1)
    scores = np.moveaxis(values, axis, -1)
    return scores.reshape(-1, scores.shape[-1])


def _check(ctx: Context, name: str, float_NK: Rows, quantized_NK: Rows) -> None:
    for which, rows_NK in (("float", float_NK), ("quantized", quantized_NK)):
        if not np.isfinite(rows_NK).all():
            raise StageError(f"{ctx.kind}: {name} of the {which} file has values that are not finite")
    if np.ptp(quantized_NK, axis=0).max() == 0 and np.ptp(float_NK, axis=0).max() > 0:
        raise StageError(
            f"{ctx.kind}: {name} of the quantized file is the same for all {len(float_NK)} samples: its ranges cut off "
            "what tells them apart. Calibrate on real samples, or keep layers float (`skip`)"
        )
