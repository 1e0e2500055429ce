"""Operators of torch for which its exporter (2.13) has no ONNX form, or a slow one.

Shape legend: N samples, C channels, H and W height and width, K positions of a kernel, L of its places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.fx import Graph, Node

_LAST = np.iinfo(np.int64).max
_MAX_POOLS = tuple(getattr(torch.ops.aten, f"adaptive_max_pool{number}d").default for number in (1, 2, 3))
_AVERAGE_POOLS = tuple(getattr(torch.ops.aten, f"adaptive_avg_pool{number}d").default for number in (1, 2, 3))


def translations(graph: Graph) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return what the exporter makes of the operators in this module.

    `graph`: to translate. Of fixed sizes, torch's exporter has quicker forms for averages of sequences and pictures.
    """
    aten = torch.ops.aten
    pools = [node for node in graph.nodes if node.target in _AVERAGE_POOLS]
    is_open = any(isinstance(size, torch.SymInt) for pool in pools for size in pool.args[0].meta["val"].shape[2:])
    return {
        **dict.fromkeys(_AVERAGE_POOLS if is_open else _AVERAGE_POOLS[2:], _adaptive_avg_pool),
        **dict.fromkeys(_MAX_POOLS, _adaptive_max_pool),
        aten.cdist.default: _distances,
        aten.hypot.default: _hypot,
        aten.im2col.default: _unfold,
        aten.kthvalue.default: _kthvalue,
        aten.logcumsumexp.default: _logcumsumexp,
        aten.median.dim: _median,
        aten.rrelu.default: _rrelu,
        aten.unfold_backward.default: _overlap_added,
    }


def without_form(graph: Graph) -> Iterator[tuple[Node, str]]:
    """Yield the operators that have a form, but not as they are called, and what has none.

    Positions of maxima, and as many windows along an axis as depends on sizes, unless it is all of its places.
    """
    for node in graph.nodes:
        if node.target in _MAX_POOLS and any(result.args[1] == 1 and result.users for result in node.users):
            yield node, "the positions that {} returns have no ONNX form"
        if node.target in (*_MAX_POOLS, *_AVERAGE_POOLS) and not _has_fixed_windows(*node.args):
            yield node, "{} to a size that depends on another one has no ONNX form"


def _has_fixed_windows(source: Any, sizes: Any) -> bool:
    given = source.meta["val"].shape[-len(sizes) :]
    return all(
        isinstance(wanted, int) or wanted.meta["val"].node.expr == size.node.expr
        for size, wanted in zip(given, sizes, strict=True)
    )


def _unfold(
    x: Any, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Any:
    """Return (N, C K, L) for (N, C, H, W), a slice for each position of the kernel; K is by row and column, as L is.

    torch's exporter looks the elements up, by indices along two axes, which takes 8 times as long.
    """
    from onnxscript import opset18 as op

    num_channels = x.shape[1]
    if any(padding):
        x = op.Pad(x, _numbers(0, 0, *padding, 0, 0, *padding))
    parts = []
    for place in product(*map(range, kernel_size)):
        starts = [index * step for index, step in zip(place, dilation, strict=True)]
        behind = [(size - 1 - index) * step for size, index, step in zip(kernel_size, place, dilation, strict=True)]
        ends = [-number if number else _LAST for number in behind]
        part = op.Slice(x, _numbers(*starts), _numbers(*ends), _numbers(2, 3), _numbers(*stride))
        parts.append(op.Unsqueeze(part, _numbers(2)))
    return op.Reshape(op.Concat(*parts, axis=2), _numbers(0, num_channels * len(parts), -1))


def _adaptive_max_pool(x: Any, output_size: Sequence[int]) -> Any:
    """Return the largest values, and something in the place of their positions, which nothing may read."""
    from onnxscript import opset18 as op

    if (kernel := _kernel(x, output_size)) is not None:
        return op.MaxPool(x, kernel_shape=kernel, strides=kernel)
    return _reduced_by_axis(x, output_size, op.ReduceMax), _numbers(0)


def _adaptive_avg_pool(x: Any, output_size: Sequence[int]) -> Any:
    from onnxscript import opset18 as op

    if (kernel := _kernel(x, output_size)) is not None:
        return op.AveragePool(x, kernel_shape=kernel, strides=kernel)
    return _reduced_by_axis(x, output_size, op.ReduceMean)  # a window's mean is that of the means of its rows


def _kernel(x: Any, output_size: Sequence[int]) -> list[int] | None:
    """Return the kernel of a pooling whose windows do not overlap; None where sizes are no multiples, or not known."""
    sizes = x.shape[-len(output_size) :]
    if any(not isinstance(given, int) or given % wanted for given, wanted in zip(sizes, output_size, strict=True)):
        return None
    return [given // wanted for given, wanted in zip(sizes, output_size, strict=True)]


def _reduced_by_axis(x: Any, output_size: Sequence[Any], reduce: Any) -> Any:
    """Return what `reduce` makes of each window, one axis after the other."""
    from onnxscript import opset18 as op

    rank, sizes = len(x.shape), x.shape[-len(output_size) :]
    for axis, given, wanted in zip(range(rank - len(sizes), rank), sizes, output_size, strict=True):
        if not isinstance(wanted, int):  # of each place, see `without_form`
            continue
        if isinstance(given, int):
            ends = [(place * given // wanted, -(-(place + 1) * given // wanted)) for place in range(wanted)]
            bounds = [(_numbers(start), _numbers(end)) for start, end in ends]
        else:
            bounds = _bounds(op.Shape(x, start=axis, end=axis + 1), wanted)
        windows = (op.Slice(x, start, end, _numbers(axis)) for start, end in bounds)
        parts = [reduce(window, _numbers(axis), keepdims=1) for window in windows]
        x = parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)
    return x


def _bounds(size: Any, wanted: int) -> list[tuple[Any, Any]]:
    """Return where each window of an axis of any size begins and ends."""
    from onnxscript import opset18 as op

    numbers, last = _numbers(wanted), _numbers(wanted - 1)
    starts = [op.Div(op.Mul(size, _numbers(place)), numbers) for place in range(wanted)]
    ends = [op.Div(op.Add(op.Mul(size, _numbers(place)), last), numbers) for place in range(1, wanted + 1)]
    return list(zip(starts, ends, strict=True))


def _kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the kth smallest value and where it is."""
    from onnxscript import opset18 as op

    smallest = op.TopK(x, _numbers(k), axis=dim, largest=0)
    last = [op.Slice(part, _numbers(k - 1), _numbers(k), _numbers(dim)) for part in smallest]
    return tuple(last if keepdim else (op.Squeeze(part, _numbers(dim)) for part in last))


def _median(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the lower one of two medians and where it is."""
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def _rrelu(x: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: object = None) -> Any:
    """Return a leaky ReLU with the mean slope, which it is in eval mode."""
    from onnxscript import opset18 as op

    return op.LeakyRelu(x, alpha=(lower + upper) / 2)


def _hypot(x: Any, y: Any) -> Any:
    from onnxscript import opset18 as op

    return op.Sqrt(op.Add(op.Mul(x, x), op.Mul(y, y)))


def _distances(x: Any, y: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """Return the p-norms of the differences of each vector of `x` (..., K, C) and each of `y` (..., L, C)."""
    from onnxscript import opset18 as op

    differences = op.Abs(op.Sub(op.Unsqueeze(x, _numbers(-2)), op.Unsqueeze(y, _numbers(-3))))
    if p == 0.0:
        return op.ReduceSum(op.Sign(differences), _numbers(-1), keepdims=0)
    if p == 1.0:
        return op.ReduceSum(differences, _numbers(-1), keepdims=0)
    if p == float("inf"):
        return op.ReduceMax(differences, _numbers(-1), keepdims=0)
    if p == 2.0:
        return op.Sqrt(op.ReduceSum(op.Mul(differences, differences), _numbers(-1), keepdims=0))
    powers = op.ReduceSum(op.Pow(differences, op.Constant(value_float=p)), _numbers(-1), keepdims=0)
    return op.Pow(powers, op.Constant(value_float=1 / p))


def _logcumsumexp(x: Any, dim: int) -> Any:
    """Return the logarithm of the sum of exponentials up to each place, one place after the other.

    torch's exporter subtracts the maximum of all places: what is 90 below it becomes -inf.
    """
    from onnxscript import opset18 as op

    first = op.Gather(x, op.Constant(value_int=0), axis=dim)
    nothing = op.Expand(op.CastLike(op.Constant(value_float=-math.inf), x), op.Shape(first))
    options = {"num_scan_inputs": 1, "scan_input_axes": [dim], "scan_output_axes": [dim]}
    scan: ir.Node = op.Scan(nothing, x, body=_sum_of_exponentials(x.dtype, len(x.shape) - 1), **options).producer()
    scan.resize_outputs(2)  # torch's exporter knows of one, the last state
    return scan.outputs[1]


def _sum_of_exponentials(dtype: ir.DataType, rank: int) -> ir.Graph:
    """Return the step of a Scan: the logarithm of the sum of two exponentials, as state and as output."""
    shape, type_, tape = ir.Shape([None] * rank), ir.TensorType(dtype), ir.tape.Tape()
    one, other = (ir.Value(name=name, shape=shape, type=type_) for name in ("one", "other"))
    zero, unit = (tape.op("Constant", [], {"value": ir.tensor(number, dtype)}) for number in (0.0, 1.0))
    high, low = tape.op("Max", [one, other]), tape.op("Min", [one, other])
    # Of two that are equal, which may be infinite, the difference is 0.
    below = tape.op("Where", [tape.op("Equal", [low, high]), zero, tape.op("Sub", [low, high])])
    sums = [tape.op("Add", [high, tape.op("Log", [tape.op("Add", [unit, tape.op("Exp", [below])])])])]
    sums.append(tape.op("Identity", sums))
    return ir.Graph([one, other], sums, nodes=tape.nodes, name="sum_of_exponentials")


def _overlap_added(windows: Any, input_sizes: Sequence[Any], dim: int, size: int, step: int) -> Any:
    """Return (N, T) for windows (N, L, K), one each `step` places: what `torch.istft` ends with.

    torch's exporter adds them at positions of int32, which ONNX Runtime does not read.
    """
    from onnxscript import opset18 as op

    assert dim == 1, dim
    assert len(windows.shape) == 3, windows.shape
    length = input_sizes[1]
    last = _numbers(length) if isinstance(length, int) else op.Reshape(length, _numbers(1))
    options = {"strides": [1, step]}
    added = op.Col2Im(
        op.Transpose(windows, perm=[0, 2, 1]), op.Concat(_numbers(1), last, axis=0), _numbers(1, size), **options
    )
    return op.Squeeze(added, _numbers(1, 2))


def _numbers(*values: int) -> Any:
    from onnxscript import opset18 as op

    return op.Constant(value_ints=list(values))
