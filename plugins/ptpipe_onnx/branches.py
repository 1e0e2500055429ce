"""Graph pass for float files: parallel convolutions and batch norms whose outputs are added are one.

What `ptpipe_quant.branches` does for static int8 networks: `quant.onnx` may quantize the file. ONNX Runtime (1.32)
computes each branch and each sum.

Shape legend: K output channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from ptpipe_onnx.graph import (
    bias_of,
    constant,
    int_attribute,
    known_shape,
    nodes,
    only_consumer,
    producer,
    replace,
    set_parameter,
    source,
)
from ptpipe_torch.merged_convolution import Convolution, merged

_SIGNS = {"Add": 1.0, "Sub": -1.0}


@dataclass(frozen=True)
class _Branch:
    """A Conv or a BatchNormalization of `source`, or the one behind the other."""

    source: ir.Value
    convolution: Convolution
    """That computes the same."""
    node: ir.Node | None
    """The Conv, if there is one."""


def merge_branches(graph: ir.Graph) -> None:
    """Replace sums and differences of branches by one convolution, in place."""
    for node in nodes(graph, *_SIGNS):
        _merge(graph, node)


def _merge(graph: ir.Graph, node: ir.Node) -> None:
    values = source(node, 0), source(node, 1)
    shapes = [known_shape(value) or (None,) for value in values]
    if shapes[0] != shapes[1] or None in shapes[0] or (branches := _branches(*values)) is None:
        return
    first, second = branches
    total = merged(first.convolution, second.convolution.times(_SIGNS[node.op_type]), mixed_sizes=False)
    if total is None or (kept := branches[total[0]].node) is None:
        return
    convolution = total[1]
    replace(node.outputs[0], kept.outputs[0])
    graph.remove(node, safe=True)
    behind = values[total[0]].producer()
    while behind is not None and behind is not kept:  # nothing reads these any more
        before = source(behind).producer()
        graph.remove(behind, safe=True)
        behind = before
    norm = only_consumer(kept.outputs[0], "BatchNormalization")
    fused = None if norm is None else _normalized(convolution, norm)
    if norm is not None and fused is not None:  # as the exporter's rules fuse others
        convolution = fused
        replace(norm.outputs[0], kept.outputs[0])
        graph.remove(norm, safe=True)
    # The bias first, as its name is made of the weight's.
    for index, parameter in ((2, convolution.bias_K), (1, convolution.weight)):
        set_parameter(kept, index, parameter.numpy().astype(np.float32))


def _branches(*values: ir.Value) -> tuple[_Branch, _Branch] | None:
    first, second = map(_branch, values)
    return None if first is None or second is None or first.source is not second.source else (first, second)


def _branch(value: ir.Value) -> _Branch | None:
    """Return the branch that ends in a value, if nothing reads the value but the sum."""
    if only_consumer(value) is None:
        return None
    if (node := producer(value, "Conv")) is not None:
        return _convolution(node)
    if (norm := producer(value, "BatchNormalization")) is None:
        return None
    branch = _branch(source(norm)) or _identity(source(norm))
    convolution = None if branch is None else _normalized(branch.convolution, norm)
    return None if branch is None or convolution is None else _Branch(branch.source, convolution, branch.node)


def _convolution(node: ir.Node) -> _Branch | None:
    weight, bias_K = constant(node.inputs[1]), bias_of(node)
    pads_itself = node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET"
    if weight is None or weight.dtype != np.float32 or bias_K is None or pads_itself:
        return None
    ones = (1,) * (weight.ndim - 2)
    (groups,) = int_attribute(node, "group", (1,))
    strides, dilations = (int_attribute(node, name, ones) for name in ("strides", "dilations"))
    padding = int_attribute(node, "pads", (0,) * 2 * len(ones))[: len(ones)]
    convolution = Convolution(torch.tensor(weight), torch.tensor(bias_K), groups, strides, padding, dilations)
    return _Branch(source(node), convolution, node)


def _identity(value: ir.Value) -> _Branch | None:
    shape = known_shape(value) or ()
    if len(shape) < 3 or not isinstance(shape[1], int):
        return None
    return _Branch(value, Convolution.identity(shape[1], len(shape) - 2), None)


def _normalized(convolution: Convolution, norm: ir.Node) -> Convolution | None:
    """Return the convolution with a batch norm behind it; None if the norm's parameters are not constant."""
    values = [constant(value) for value in norm.inputs[1:]]
    if any(value is None or value.ndim != 1 for value in values) or int_attribute(norm, "training_mode", (0,)) != (0,):
        return None
    gamma_K, beta_K, mean_K, variance_K = map(torch.tensor, values)
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    return convolution.normalized(gamma_K, beta_K, mean_K, variance_K, epsilon)
