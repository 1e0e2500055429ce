"""Compare an int8 file with torch's reference network, layer by layer, on the file's own integers.

ONNX Runtime runs the very bytes of the file with its usual optimizations; only the list of outputs is longer, by the
integers of each quantized tensor. Asking for these leaves its integer kernels fused: it computes such a tensor in any
case. Where its usual kernels may saturate, it runs those that don't: see `exact_session`. Each layer of the reference
network is then given the integers that the file's layer had, and what it computes is compared with what the file's
layer computed (`ptpipe_torch.int8.layer_parity`). Where values are ranked, it computes with the file's positions.

What may differ, for a layer whose sums of products are sum_i x_i w_i + b on the grid s_x * s_w and whose output has
the step s_y: the file adds round(b), off by up to half of s_x s_w if the conversion left b unrounded, and ONNX Runtime
multiplies the sum by s_x s_w / s_y in float32. Both move a value by far less than a step, so that it is rounded to the
neighbor at most: one step. It happens to the fraction of values that lie this close to a tie, s_x s_w / (4 s_y) on
average where biases are unrounded; averages and sums of a few integers often are ties exactly.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe import JSON, StageError, host
from ptpipe_onnx.probes import rankings_of, write_probe
from ptpipe_onnx.tensor_names import grid_of
from ptpipe_torch.int8.layer_parity import NetworkDifference, compare_layers, quantize_nodes, source_nodes
from ptpipe_torch.int8.reference_nodes import quantized_before, repeated_nodes
from ptpipe_torch.model.exact_session import exact_session
from ptpipe_torch.model.onnx_file import one_line_errors, session_options
from ptpipe_torch.parity.rankings import Rankings

MAX_STEPS = 1
MAX_FRACTION, MAX_PRODUCT_FRACTION = 0.5, 0.1
"""How many of a layer's values may differ by a step: of averages, sums and the like, half are ties at worst; of sums of
products, 1 % is usual where the output has 25 steps to one of the products."""
MAX_OUTPUT_DIFFERENCE = 1e-3
"""Of the largest value, as in `parity`: for what is computed in float behind the last quantized tensor."""
MAX_SAMPLES = 32
_MATRIX_PRODUCTS = ("matmul", "bmm", torch.matmul, torch.bmm, operator.matmul)
_MAX_BYTES = 64 * 2**20
"""Of all quantized tensors together, beyond the first sample."""


@dataclass(frozen=True)
class LayerParity:
    """Result of the comparison of a file with its reference network."""

    difference: NetworkDifference
    num_samples: int
    products: frozenset[str]
    """Names of the quantize nodes behind convolutions, linear layers and products of two tensors."""

    @property
    def figures(self) -> Mapping[str, JSON]:
        """Recorded figures."""
        worst = self.difference.worst
        return {
            "layers_compared": len(self.difference.layers),
            "layers_merged": len(self.difference.missing),
            "layer_samples": self.num_samples,
            "max_layer_difference_steps": worst.max_steps if worst else 0.0,
            "max_layer_difference_fraction": max((layer.fraction for layer in self.difference.layers), default=0.0),
        }

    def check(self) -> None:
        """Raise StageError, naming the first layer of the file that computes something else."""
        for layer in self.difference.layers:
            allowed = MAX_PRODUCT_FRACTION if layer.node in self.products else MAX_FRACTION
            if layer.max_steps > MAX_STEPS or layer.fraction > allowed:
                raise StageError(
                    f"the file's layer {layer.layer} computes something else than torch's from the same integers: "
                    f"{layer.fraction:.2%} of its values differ, by up to {layer.max_steps:g} steps of its output, "
                    f"where {MAX_STEPS} is allowed, for at most {allowed:.0%}; over {self.num_samples} samples"
                )
        if self.difference.output > MAX_OUTPUT_DIFFERENCE:
            raise StageError(
                "the file's outputs are not what its last int8 tensors give in torch: they differ by "
                f"{self.difference.output:.4g} of the largest, where {MAX_OUTPUT_DIFFERENCE:g} is allowed"
            )


def compare_file(
    path: Path, reference: GraphModule, inputs: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str], scratch: Path
) -> LayerParity:
    """Run the file, and each layer of the reference network on its integers.

    `inputs`: in the order of the network's arguments. `outputs`: names of those of the file. As many of the samples are
    used as the integers of all layers fit a fixed amount of memory, at least one. `scratch`: folder for a copy of the
    file, which is removed.
    """
    names, positions = _names_in_file(path, reference), [ranking.positions for ranking in rankings_of(path)]
    returned = list(dict.fromkeys([*outputs, *names, *positions]))
    with _session_with_outputs(path, returned[len(outputs) :], scratch) as session:
        num_samples = _num_samples(session.run(names, _first(inputs, 1)))
        inputs = _first(inputs, num_samples)
        arrays = session.run(returned, inputs)
    computed = {name: torch.from_numpy(array) for name, array in zip(returned, arrays, strict=True)}
    found = {name: computed[name] for name in names}
    _add_merged(reference, found)
    tensors = [torch.from_numpy(array) for array in inputs.values()]
    with Rankings([computed[name] for name in positions]):
        difference = compare_layers(reference, tensors, found, [computed[name] for name in outputs])
    products = frozenset(node.name for node in quantize_nodes(reference) if _is_product(node, reference))
    return LayerParity(difference, num_samples, products)


def integers_of(
    path: Path, reference: GraphModule, inputs: Mapping[str, npt.NDArray[Any]], scratch: Path
) -> dict[str, torch.Tensor]:
    """Return the integers that a file computes from these inputs, by the names of the reference's quantize nodes.

    `scratch`: as above.
    """
    names = _names_in_file(path, reference)
    with _session_with_outputs(path, names, scratch) as session:
        found = dict(zip(names, map(torch.from_numpy, session.run(names, dict(inputs))), strict=True))
    _add_merged(reference, found)
    return found


def _is_product(quantize: Node, reference: GraphModule) -> bool:
    source = source_nodes(quantize, reference)[-1]
    if source.op != "call_module":
        return source.target in _MATRIX_PRODUCTS
    layer = reference.get_submodule(str(source.target))
    return any(isinstance(part, nn.Linear | nn.modules.conv._ConvNd) for part in layer.modules())


def _names_in_file(path: Path, reference: GraphModule) -> list[str]:
    written = {name for node in onnx.load(path, load_external_data=False).graph.node for name in node.output}
    return [node.name for node in quantize_nodes(reference) if node.name in written]


def _first(inputs: Mapping[str, npt.NDArray[Any]], num_samples: int) -> dict[str, npt.NDArray[Any]]:
    return {name: array[:num_samples] for name, array in inputs.items()}


def _num_samples(integers: Sequence[npt.NDArray[Any]]) -> int:
    num_bytes = sum(array.nbytes for array in integers)
    return int(np.clip(_MAX_BYTES // max(num_bytes, 1), 1, MAX_SAMPLES))


@contextmanager
def _session_with_outputs(path: Path, names: Sequence[str], scratch: Path) -> Iterator[Any]:
    """Yield a session of the file that also returns these tensors."""
    probe = scratch / "layers.onnx"
    write_probe(path, names, probe)
    with one_line_errors(path):
        try:
            session = exact_session(probe, session_options(host.num_threads()))
        finally:
            probe.unlink()
        yield session


def _add_merged(reference: GraphModule, found: dict[str, torch.Tensor]) -> None:
    """Add tensors that the file does not compute again.

    The reference network quantizes some a second time, behind dropout, and neither int8 form does. Operators that do
    the same to the same tensor are one in the file.
    """
    repeated = repeated_nodes(reference)
    for quantize in quantize_nodes(reference):
        first = repeated.get(quantize)
        if first is not None and first.name in found:
            found.setdefault(quantize.name, found[first.name])
        before = None if quantize.name in found else quantized_before(quantize)
        if before is not None and before.name in found:
            grid, new = grid_of(before), grid_of(quantize)
            values = (found[before.name].float() - grid.zero_point) * float(grid.scale)
            found[quantize.name] = values / float(new.scale) + new.zero_point
