"""Layer norms along one axis, as over the channels of images: as one operator for ONNX Runtime, written out for others.

(x - mean) / sqrt(variance + eps), with a factor and an offset for each index (J. Ba et al., Layer Normalization, arXiv
1607.06450, section 3). Written out, it is 9 operators of ONNX, and ONNX Runtime (1.32) is slow at means along another
axis than the last one: an image of 256 channels and 64 x 64 pixels takes 5.0 ms, with LayerNormalization between two
transpositions 1.25 ms (one thread, AMD EPYC, AVX-512). Integer convolutions compute with channels last: there the
transpositions vanish, and 0.42 ms are left.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from ptpipe_onnx.graph import (
    add_initializer,
    constant,
    insert_node,
    int_attribute,
    nodes,
    only_consumer,
    producer,
    replace,
    source,
)
from ptpipe_torch.torch_export import insert_call

_MIN_CHANNELS = 16
"""Of an axis that is not the last one; for 12 channels of 64 x 64 pixels, both forms take as long."""
_aten = torch.ops.aten
_RESHAPING = (_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default)


@dataclass(frozen=True)
class _Norm:
    """A layer norm that was found."""

    x: Node
    axis: int
    eps: float
    weight: Node | None
    bias: Node | None
    output: Node


def use_layer_norms(program: ExportedProgram) -> None:
    """Replace each layer norm that is written out, with the factors and offsets of its channels, in place."""
    graph = program.graph_module.graph
    targets = _aten.div.Tensor, _aten.mul.Tensor
    quotients = [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]
    num_nodes = len(graph.nodes)
    for quotient in quotients:
        if (norm := _norm_at(quotient)) is not None:
            replacement = _use_operator(graph, norm)
            program.graph_signature.replace_all_uses(norm.output.name, replacement.name)  # of the program's outputs
    if len(graph.nodes) > num_nodes:
        graph.eliminate_dead_code()
        program.graph_module.recompile()


def _norm_at(quotient: Node) -> _Norm | None:
    """Return the layer norm whose centered values this node divides by their deviation."""
    is_product = quotient.target is _aten.mul.Tensor
    operands = _arguments(quotient, quotient.target)
    first, second = operands["self"], operands["other"]
    for centered, divisor in ((first, second), (second, first))[: 1 + is_product]:
        total = _under_root(divisor, is_inverse=is_product)
        found = _centered(centered)
        if total is None or found is None:
            continue
        (x, axis), sum_ = found, _arguments(total, _aten.add.Tensor)
        sizes = _sizes(x)
        is_worth_it = sizes[axis] >= (1 if axis == len(sizes) - 1 else _MIN_CHANNELS)
        if is_worth_it and isinstance(sum_.get("other"), float) and _is_variance(sum_["self"], x, axis):
            weight, output = _per_channel(quotient, _aten.mul.Tensor, x, axis)
            bias, output = _per_channel(output, _aten.add.Tensor, x, axis)
            return _Norm(x, axis, sum_["other"] * sum_["alpha"], weight, bias, output)
    return None


def _under_root(value: Any, *, is_inverse: bool) -> Node | None:
    """Return what the value is the square root of, or one by it."""
    product = _arguments(value, _aten.mul.Tensor)
    if is_inverse and product.get("other") == 1:  # 1 / x is exported as (1 / x) * 1
        return _under_root(product["self"], is_inverse=True)
    if is_inverse and (inverse := _arguments(value, _aten.reciprocal.default)):
        return _under_root(inverse["self"], is_inverse=False)
    power = _arguments(value, _aten.pow.Tensor_Scalar)
    if power.get("exponent") == (-0.5 if is_inverse else 0.5):
        return _node(power["self"])
    return _node(_arguments(value, _aten.rsqrt.default if is_inverse else _aten.sqrt.default).get("self"))


def _centered(value: Any) -> tuple[Node, int] | None:
    """Return x and the axis along which this is x less its mean."""
    difference = _arguments(value, _aten.sub.Tensor)
    x = _node(difference.get("self"))
    if x is None or difference["alpha"] != 1 or x.meta["val"].dtype != torch.float32:
        return None
    mean = _arguments(difference["other"], _aten.mean.dim) or _moment(difference["other"], 1)
    axis = _only_axis(mean, x)
    return None if axis is None else (x, axis)


def _is_variance(value: Any, x: Node, axis: int) -> bool:
    """Return whether the value is the variance of x along the axis, divided by its size."""
    for variance in (_arguments(value, _aten.var.dim), _arguments(value, _aten.var.correction), _moment(value, 0)):
        if variance and not variance.get("unbiased", variance.get("correction", 1)):
            return _only_axis(variance, x) == axis
    mean = _arguments(value, _aten.mean.dim)
    squares = _node(mean.get("self"))
    is_of_x = _centered(_squared(squares)) == (x, axis)
    return is_of_x and squares is not None and _only_axis(mean, squares) == axis


def _squared(value: Any) -> Any:
    """Return what the value is the square of; two differences from the mean are one."""
    power, product = _arguments(value, _aten.pow.Tensor_Scalar), _arguments(value, _aten.mul.Tensor)
    if power.get("exponent") == 2:
        return power["self"]
    if product and _centered(product["self"]) == _centered(product["other"]):
        return product["self"]
    return _arguments(value, _aten.square.default).get("self")


def _moment(value: Any, index: int) -> dict[str, Any]:
    """Return the arguments of `var_mean`, of which the value is the variance (0) or the mean (1)."""
    is_part = isinstance(value, Node) and value.target is operator.getitem and value.args[1] == index
    return _arguments(value.args[0], _aten.var_mean.correction) if is_part else {}


def _only_axis(reduction: dict[str, Any], x: Node) -> int | None:
    """Return the axis of x that an operator reduces, if it is one, which it keeps."""
    axes = reduction.get("dim")
    if reduction.get("self") is not x or axes is None or len(axes) != 1 or not reduction["keepdim"]:
        return None
    return int(axes[0] % x.meta["val"].dim())


def _per_channel(value: Node, target: Any, x: Node, axis: int) -> tuple[Node | None, Node]:
    """Return what alone reads the value and combines it with one number for each index of the axis, and these numbers.

    None and the value itself where nothing does.
    """
    reader = next(iter(value.users)) if len(value.users) == 1 else None
    arguments = _arguments(reader, target)
    if reader is None or not arguments or arguments.get("alpha", 1) != 1:
        return None, value
    other = _node(arguments["other"] if arguments["self"] is value else arguments["self"])
    if other is None or other.meta["val"].dtype != torch.float32:
        return None, value
    sizes = _sizes(x)
    shape = [sizes[axis], *(1 for _ in sizes[axis + 1 :])]
    is_per_channel = _sizes(other) in [[1] * num + shape for num in range(axis + 1)]
    return (other, reader) if is_per_channel else (None, value)


def _use_operator(graph: Graph, norm: _Norm) -> Node:
    sizes = _sizes(norm.x)
    size, order = sizes[norm.axis], [axis for axis in range(len(sizes)) if axis != norm.axis] + [norm.axis]
    is_last = order == sorted(order)
    with graph.inserting_before(norm.output):
        weight, bias = (_flat(graph, values, size) for values in (norm.weight, norm.bias))
        x = norm.x if is_last else insert_call(graph, _aten.permute.default, norm.x, order)
        y = insert_call(graph, _aten.layer_norm.default, x, [size], weight, bias, norm.eps)
        if not is_last:
            y = insert_call(graph, _aten.permute.default, y, [order.index(axis) for axis in range(len(order))])
    norm.output.replace_all_uses_with(y)
    return y


def _flat(graph: Graph, values: Node | None, size: int) -> Node | None:
    """Return values as they were before they were given more axes than one."""
    if values is None:
        return None
    source = values
    while _sizes(source) != [size] and source.target in _RESHAPING:
        source = source.all_input_nodes[0]
    return source if _sizes(source) == [size] else insert_call(graph, _aten.view.default, values, [size])


def _arguments(value: Any, target: Any) -> dict[str, Any]:
    """Return the arguments of a call of this operator by name, with their defaults; empty for anything else."""
    if not isinstance(value, Node) or value.target != target:
        return {}
    expected = target._schema.arguments
    given = {argument.name: own for argument, own in zip(expected, value.args, strict=False)}
    return {argument.name: argument.default_value for argument in expected} | given | dict(value.kwargs)


def _node(value: Any) -> Node | None:
    return value if isinstance(value, Node) else None


def _sizes(node: Node) -> list[int]:
    """Return the shape of what a node computes; -1: any size."""
    return [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]


def write_channel_norms_out(graph: ir.Graph) -> bool:
    """Write each layer norm between two transpositions without them, in place; return whether there was any.

    For runtimes that have means along any axis, which the transpositions slow down: OpenVINO takes 1.37x the time for
    a network of 12 such norms.
    """
    written = [norm for norm in nodes(graph, "LayerNormalization") if _write_out(graph, norm)]
    return bool(written)


def _write_out(graph: ir.Graph, norm: ir.Node) -> bool:
    # Integers are transposed where they can be.
    dequantize = producer(norm.inputs[0], "DequantizeLinear")
    quantize = only_consumer(norm.outputs[0], "QuantizeLinear")
    before = producer((dequantize or norm).inputs[0], "Transpose")
    after = only_consumer((quantize or norm).outputs[0], "Transpose")
    parameters = [constant(value) for value in norm.inputs[1:]]
    if before is None or after is None or any(values is None for values in parameters):
        return False
    order, back = (int_attribute(node, "perm", ()) for node in (before, after))
    is_last = int_attribute(norm, "axis", (-1,))[0] in (-1, len(order) - 1)
    if not is_last or tuple(np.argsort(order)) != back:
        return False

    def stored(content: Any, suffix: str) -> ir.Value:
        return add_initializer(graph, f"{norm.outputs[0].name}.{suffix}", np.asarray(content))

    def computed(op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return insert_node(after, op_type, inputs, **attributes).outputs[0]

    x, axes = source(before), stored(np.array([order[-1]]), "axes")
    x = x if dequantize is None else computed("DequantizeLinear", x, *dequantize.inputs[1:])
    centered = computed("Sub", x, computed("ReduceMean", x, axes, keepdims=1))
    variance = computed("ReduceMean", computed("Pow", centered, stored(np.float32(2), "exponent")), axes, keepdims=1)
    eps = norm.attributes["epsilon"].value if "epsilon" in norm.attributes else 1e-5
    y = computed("Div", centered, computed("Sqrt", computed("Add", variance, stored(np.float32(eps), "epsilon"))))
    shape = [-1] + [1] * (len(order) - 1 - order[-1])
    for op_type, values in zip(("Mul", "Add"), parameters, strict=False):
        assert values is not None
        y = computed(op_type, y, stored(values.reshape(shape), op_type.lower()))
    y = y if quantize is None else computed("QuantizeLinear", y, *quantize.inputs[1:])
    replace(after.outputs[0], y)
    graph.remove([node for node in (after, quantize, norm) if node is not None], safe=True)
    return True
