"""Whether the samples of somebody's ONNX file lie along the first axis of its inputs and outputs, as a data set's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ValueInfoProto

from ptpipe import StageError
from ptpipe_torch import Data, OnnxFile
from ptpipe_torch.model.example_inputs import zeros

Arrays = Mapping[str, npt.NDArray[Any]]

_TOLERANCE, _INT8_TOLERANCE = 0.05, 0.2
"""How far a sample's outputs may differ between batches, of how far values differ, where only roundings do."""
_NUM_SAMPLES, _CHECKED = 3, 1
"""Of a batch, and the one among them that has others before and behind it."""
_RANKING = {"TopK", "NonMaxSuppression"}
"""Operators whose results change places where roundings decide a tie, as among an untrained detector's scores."""


def check_symbols(path: Path, values: Sequence[ValueInfoProto]) -> None:
    """Raise StageError where an input or output has the batch on another axis than the first, as its symbols say."""
    symbols = [[axis.dim_param for axis in value.type.tensor_type.shape.dim] for value in values]
    plain = {axes[0] for axes in symbols if axes and axes[0]}
    plain -= {name for axes in symbols for name in axes if axes.count(name) > 1}  # `?` may stand for any size
    for value, axes in zip(values, symbols, strict=True):
        for number, name in enumerate(axes):
            if number and name in plain:
                raise StageError(
                    f"{path.name}: {value.name} has the batch ({name}) on axis {number}, and not on the first, where a "
                    "data set has its samples: export the file with a transpose of that tensor inside"
                )


def check_runs(file: OnnxFile, data: Data, operators: Collection[str]) -> None:
    """Raise StageError where ONNX Runtime can't run a file, or a sample's outputs depend on the others of a batch.

    `operators`: those in the file. The samples are the data set's, since ids and masks can't be drawn.
    """
    batch = _samples(file, data)
    if any(name.startswith("DynamicQuantize") for name in operators):
        batch = {name: np.repeat(array[_CHECKED:][:1], _NUM_SAMPLES, axis=0) for name, array in batch.items()}
    one = {name: array[_CHECKED:][:1] for name, array in batch.items()}
    with file.predictor(1) as predict:
        alone, among = predict(one), predict(batch)
        if _RANKING.isdisjoint(operators):
            _check_same(file, alone, among, lambda: predict(one))


def _samples(file: OnnxFile, data: Data) -> Arrays:
    split = next((name for name, of in data.splits.items() if len(of)), None)
    if split is None:
        inputs = file.own_signature.inputs
        return {spec.name: of.numpy() for spec, of in zip(inputs, zeros(inputs, _NUM_SAMPLES), strict=True)}
    order_N = np.arange(_NUM_SAMPLES) % len(data.splits[split])
    here = data.with_options({"num_workers": 0})
    (batch,) = here.batches(split, order_N=order_N, batch_size=_NUM_SAMPLES, input_form=file.input_form)
    return batch.input_arrays()


def _check_same(file: OnnxFile, alone: Arrays, among: Arrays, repeat: Callable[[], Arrays]) -> None:
    """Raise StageError where a sample's outputs differ in a batch, but not when it is alone again (`repeat`)."""
    tolerance = _TOLERANCE if "float" in file.precision else _INT8_TOLERANCE
    for name in [spec.name for spec in file.signature.outputs if spec.is_float] or list(alone):
        limit, difference = tolerance * _spread(among[name]), _distance(alone[name], among[name][_CHECKED:][:1])
        if difference > limit >= _distance(alone[name], repeat()[name]):
            raise StageError(
                f"{file.path.name}: {name} of a sample differs by {difference:.3g} with other samples in the batch, "
                f"and roundings explain {limit:.3g}. The first axis of each input and output must be the batch's: "
                "export it so (batch_first=True, or a transpose inside), and in evaluation mode, since batch "
                "statistics mix samples, too"
            )


def _distance(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Return the root mean square of the difference; infinite where one of the two is not finite."""
    finite = np.isfinite(first)
    if (finite != np.isfinite(second)).any():
        return np.inf
    return _rms(np.where(finite, first, 0) - np.where(finite, second, np.float64(0)))


def _spread(values: npt.NDArray[Any]) -> float:
    """Return the standard deviation, but at least a tenth of the root mean square: samples may be alike."""
    finite = np.asarray(values[np.isfinite(values)], np.float64)
    return max(_rms(finite - finite.mean()), _rms(finite) / 10) if finite.size else 0.0


def _rms(values: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(values).mean()))
