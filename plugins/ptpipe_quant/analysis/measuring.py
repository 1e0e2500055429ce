"""Run samples through a rounded network: what rounding does to each tensor, and each rounding to the outputs.

One pass over each batch without rounding, then one for each rounding, which computes only what comes behind it.
Shape legend: N samples of all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.fx import Node

from ptpipe import StageError
from ptpipe_quant.analysis.rounded_network import RoundedLayer, RoundedNetwork, Rounding, Values
from ptpipe_quant.analysis.tensor_error import ErrorSums, Grid, decibels
from ptpipe_torch import Batch, Data, Signature, Task
from ptpipe_torch.int8.decomposed import QUANTIZE
from ptpipe_torch.int8.read_ranges import read_range
from ptpipe_torch.model.outputs import named_outputs, tensors_of
from ptpipe_torch.task.ranking import rows_of_samples


@dataclass
class OutputRecord:
    """What a network with some rounding makes of the samples."""

    signal: float = 0.0
    noise: float = 0.0
    _batches: list[dict[str, npt.NDArray[Any]]] = field(default_factory=list)

    @property
    def sqnr_db(self) -> float | None:
        """Of the outputs, against those without rounding; None where they are the same."""
        return decibels(self.signal, self.noise)

    @property
    def sums(self) -> dict[str, npt.NDArray[Any]]:
        """What the primary metric is computed from, with N rows."""
        return {name: np.concatenate([batch[name] for batch in self._batches]) for name in self._batches[0]}

    def add(self, returned: Any, expected: Any, sums: dict[str, npt.NDArray[Any]]) -> None:
        """Add a batch: the outputs, those without rounding, and the sums of its samples."""
        for found, wanted in zip(tensors_of(returned), tensors_of(expected), strict=True):
            if found.is_floating_point():
                self.signal += float(wanted.double().square().sum())
                self.noise += float((found.double() - wanted.double()).square().sum())
        self._batches.append(sums)


class Measurement:
    """Collects figures batch by batch."""

    def __init__(
        self, network: RoundedNetwork, task: Task, signature: Signature, roundings: Sequence[Rounding]
    ) -> None:
        self._network, self._task, self._signature = network, task, signature
        self._roundings = roundings
        self.unrounded = OutputRecord()
        self.rounded = [OutputRecord() for _ in roundings]
        """One for each rounding."""
        self.tensors: dict[Node, ErrorSums] = {node: ErrorSums() for layer in network.layers for node in layer.outputs}
        self._read = {node: read_range(network.graph, node) for node in self.tensors}

    def run(self, batches: Iterable[Batch], on_pass: Callable[[int], None]) -> None:
        """Measure these batches; `on_pass` gets the number of samples after each pass.

        Raises StageError, naming the layer, where a tensor to round is not finite.
        """
        with torch.no_grad():
            for batch in batches:
                expected, values = self._network.run_float(batch.args)
                self._observe(values)
                self.unrounded.add(expected, expected, self._sums(expected, batch))
                on_pass(len(batch))
                for rounding, record in zip(self._roundings, self.rounded, strict=True):
                    returned = self._network.run_rounded(rounding, values)
                    record.add(returned, expected, self._sums(returned, batch))
                    on_pass(len(batch))

    def output_error(self, layer: RoundedLayer) -> ErrorSums | None:
        """Return what rounding does to a layer's output: where it has several grids, the noisiest one."""
        sums = [self.tensors[node] for node in layer.outputs]
        return max(sums, key=lambda of: of.noise, default=None)

    def _observe(self, values: Values) -> None:
        names = {node: layer.name for layer in self._network.layers for node in layer.outputs}
        for node, sums in self.tensors.items():
            if not bool(values[node].isfinite().all()):
                raise StageError(f"the output of {names[node]} is not finite; the model or its input is broken")
            x = values[node].clamp(*self._read[node])  # what no reader tells apart is no error
            _, scale, zero_point, first, last, *_ = node.args
            integers = QUANTIZE(x, *node.args[1:])
            is_calibrated = (scale, zero_point) not in self._network.fixed_grids
            ends: tuple[Any, Any] = (first, last)
            step, zero = torch.tensor(scale, dtype=torch.float64), torch.tensor(zero_point)
            sums.add(x, integers, Grid(step, zero, *ends, is_calibrated=is_calibrated))

    def _sums(self, returned: Any, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        return rows_of_samples(self._task, named_outputs(returned, self._signature.outputs), batch.targets)


def spread_positions(data: Data, split: str, num_samples: int | None, kind: str) -> npt.NDArray[np.int64]:
    """Return positions of samples spread evenly over a split. Raises StageError if it is empty."""
    available = len(data.splits[split]) if split in data.splits else 0
    if not available:
        filled = [name for name, samples in data.splits.items() if len(samples)]
        raise StageError(f"{kind}: the data set's split {split!r} is empty; set `split` to one of {', '.join(filled)}")
    return np.linspace(0, available - 1, min(available, num_samples or available)).round().astype(np.int64)
