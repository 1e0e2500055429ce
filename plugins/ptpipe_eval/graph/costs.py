"""Costs of a model that need no stopwatch: what a user downloads, and what a prediction computes and reads."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ptpipe_eval.graph.facts import Costs
from ptpipe_torch import Deployable, Model, OnnxFile, Selected, TensorSpec
from ptpipe_torch.model.axis_sizes import numbers_of, sized

if TYPE_CHECKING:
    import numpy.typing as npt

    from ptpipe_eval.graph.counts import GraphCounts

_LEVEL = 6
_PART_BYTES, _MAX_PARTS = 1 << 20, 16


def measure_costs(model: Deployable, inputs: Mapping[str, npt.NDArray[Any]]) -> Costs:
    """Return the costs of a model. `inputs`: a batch of one sample.

    Nothing is known of what a model of another plugin computes.
    """
    model = _chosen(model)
    files = Costs(compressed_bytes=_compressed_bytes(model), weight_bytes=_weight_bytes(model))
    return recount(files, model, inputs)


def recount(costs: Costs, model: Deployable, inputs: Mapping[str, npt.NDArray[Any]]) -> Costs:
    """Return the costs of the same model with a sample of another size. `inputs`: a batch of one."""
    model = _chosen(model)
    numbers = _numbers(model, inputs)
    costs = replace(costs, io_bytes=_io_bytes(model, inputs, numbers), sizes=_sizes(model, numbers))
    try:
        counts = _counts(model, inputs)
    except Exception as error:  # noqa: BLE001  # a network, or a file, may be anything; it is measured all the same
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return replace(costs, uncounted=(f"it can't be counted: {reason}",))
    if counts is None:
        return replace(costs, uncounted=(f"{model.format} has no graph that can be read",))
    return replace(
        costs,
        macs=None if counts.uncounted else sum(counts.macs.values()),
        macs_by_dtype=dict(sorted(counts.macs.items())),
        weights_read_bytes=counts.weights_read_bytes,
        operators=dict(counts.operators.most_common()),
        float_operators=tuple(counts.float_operators) if "int8" in model.format else (),
        uncounted=tuple(counts.uncounted),
    )


def _chosen(model: Deployable) -> Deployable:
    return model.model if isinstance(model, Selected) else model


def _counts(model: Deployable, inputs: Mapping[str, npt.NDArray[Any]]) -> GraphCounts | None:
    if isinstance(model, OnnxFile):
        from ptpipe_eval.graph.onnx_graph import count_onnx

        return count_onnx(model.path, inputs)
    if isinstance(model, Model):
        from ptpipe_eval.graph.torch_graph import count_torch

        return count_torch(model, inputs)
    return None


def _compressed_bytes(model: Deployable) -> int:
    if isinstance(model, OnnxFile):  # its test vectors are no part of what is deployed
        return _compressed(model.path)
    with TemporaryDirectory(prefix="ptpipe-") as name:
        folder = Path(name)
        model.save(folder)
        files = [folder / file for file in type(model).deliverables(folder)]
        return sum(_compressed(file) for file in files or _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def _compressed(path: Path) -> int:
    """Return the size of a compressed file, or an estimate from evenly spread parts."""
    size_bytes = path.stat().st_size
    if size_bytes <= _MAX_PARTS * _PART_BYTES:
        return len(zlib.compress(path.read_bytes(), _LEVEL))
    total = 0
    with path.open("rb") as file:
        for part in range(_MAX_PARTS):
            file.seek(part * (size_bytes - _PART_BYTES) // (_MAX_PARTS - 1))
            total += len(zlib.compress(file.read(_PART_BYTES), _LEVEL))
    return round(total * size_bytes / (_MAX_PARTS * _PART_BYTES))


def _weight_bytes(model: Deployable) -> dict[str, int]:
    """Return the bytes of the tensors that one ships, by dtype, the most first."""
    found: dict[str, int] = {}
    if isinstance(model, Model):
        tensors = model.tensors if model.int8_tensors is None else model.int8_tensors
        for tensor in tensors.values():
            name = str(tensor.dtype).removeprefix("torch.")
            found[name] = found.get(name, 0) + tensor.nbytes
    elif isinstance(model, OnnxFile):
        from ptpipe_eval.graph.onnx_graph import stored_bytes

        found = stored_bytes(model.path)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _numbers(model: Deployable, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, int]:
    """Return what the names of axes of any size stand for; none where it is not known what the model takes."""
    specs = model.own_signature.inputs if isinstance(model, OnnxFile) else model.signature.inputs
    return numbers_of((spec.shape[1:], inputs[spec.name].shape[1:]) for spec in specs) or {}


def _sizes(model: Deployable, numbers: Mapping[str, int]) -> dict[str, int]:
    symbols = [symbol for spec in model.signature.inputs for symbol in spec.symbols]
    return {
        symbol: size for symbol, size in zip(symbols, sized(symbols, numbers), strict=True) if isinstance(size, int)
    }


def _io_bytes(model: Deployable, inputs: Mapping[str, npt.NDArray[Any]], numbers: Mapping[str, int]) -> int:
    outputs = sum(_spec_bytes(spec, numbers) for spec in model.signature.outputs)
    return outputs + sum(inputs[spec.name].nbytes for spec in model.signature.inputs)


def _spec_bytes(spec: TensorSpec, numbers: Mapping[str, int]) -> int:
    import numpy as np

    shape = [size if isinstance(size, int) else 1 for size in sized(spec.sample_shape, numbers)]
    return prod(shape) * np.dtype(spec.dtype).itemsize
