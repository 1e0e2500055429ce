"""Count what an ONNX file computes, from its graph and the shapes of its tensors.

An operator between DequantizeLinear and QuantizeLinear counts as int8 where ONNX Runtime has a kernel for the three
together (onnxruntime/core/optimizer/qdq_transformer); else it computes in floating point.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from ptpipe_eval.graph import counts
from ptpipe_eval.graph.counts import INT8, GraphCounts
from ptpipe_eval.graph.onnx_shapes import TensorFacts, drop_weights, infer_tensors

_DEFAULT_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_CONVOLUTIONS = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}
"""With the position of the weights among the inputs."""
_PRODUCTS = (
    *("MatMul", "FusedMatMul", "MatMulNBits"),
    *("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul"),
)
_RECURRENT = {"LSTM": 4, "DynamicQuantizeLSTM": 4, "GRU": 3, "RNN": 1}
"""With the number of gates."""
_INT8_NAMES = re.compile(r"^(QLinear|QGemm|QAttention|QEmbed)|Integer|^DynamicQuantize(MatMul|LSTM)")
_FUSED_ALONE = {"MatMul", "Gemm"}
"""That have an int8 kernel whose output is float."""
_FUSED = _FUSED_ALONE | {"Conv", "Add", "Mul", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", "Softmax"}
_FUSED |= {"Concat", "Where", "Resize", "Split"}
_ACTIVATIONS = {"Relu", "Clip"}
"""That QuantizeLinear does beside its own work, where they are before it."""
_MOVES = {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Concat", "Split", "Slice", "Gather"}
_MOVES |= {
    "GatherElements",
    "GatherND",
    "Expand",
    "Tile",
    "Pad",
    "Shape",
    "Constant",
    "ConstantOfShape",
    "Cast",
    "Range",
}
_MOVES |= {"Size", "MaxPool", "Dropout", "DepthToSpace", "SpaceToDepth", "If", "Loop", "Scan"}
_HAS_PRODUCTS = re.compile(r"Conv|MatMul|Gemm|LSTM|GRU|RNN|Attention|Einsum|DFT|STFT|Deform")
_CASTS = re.compile(r"^(ConvertI|CastLike)")


def count_onnx(path: Path, inputs: Mapping[str, npt.NDArray[Any]]) -> GraphCounts:
    """Return the counts of the prediction of one sample. `inputs`: batches; the first sample counts."""
    model = _read(path)
    drop_weights(model)
    num_samples = _batch_size(model.graph)
    feed = {name: np.repeat(array[:1], num_samples, axis=0) for name, array in inputs.items()}
    counted = [node for node in model.graph.node if _has_formula(node)]
    wanted = {name for node in counted for name in (*node.input, *node.output) if name}
    wanted |= {node.output[0] for node in model.graph.node if node.op_type.startswith("Gather")}
    wanted |= {node.input[0] for node in model.graph.node if node.op_type == "Pad"}
    tensors = infer_tensors(model, feed, wanted, lambda: _read(path))
    return _Counter(model.graph, tensors).count().per_sample(num_samples)


def _read(path: Path) -> ModelProto:
    from onnx import inliner

    model = onnx.load(path, load_external_data=False)
    return inliner.inline_local_functions(model) if model.functions else model


def _batch_size(graph: GraphProto) -> int:
    """Return the only batch size that a file takes; 1 where it takes any."""
    stored = {tensor.name for tensor in graph.initializer}
    axes = [value.type.tensor_type.shape.dim[:1] for value in graph.input if value.name not in stored]
    return min((axis[0].dim_value for axis in axes if axis and axis[0].dim_value > 0), default=1)


def _has_formula(node: NodeProto) -> bool:
    names = (*_CONVOLUTIONS, *_PRODUCTS, *_RECURRENT, "ConvTranspose", "Gemm", "QGemm", "Einsum", "Attention")
    return node.op_type in names


class _Counter:
    """Counts the nodes of a graph."""

    def __init__(self, graph: GraphProto, tensors: Mapping[str, TensorFacts]) -> None:
        self._graph, self._tensors, self._counts = graph, tensors, GraphCounts()
        self._makers = {name: node for node in graph.node for name in node.output}
        self._readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self._readers[name].append(node)
        self._outputs = {value.name for value in graph.output}
        self._constants = {own.name for own in graph.initializer}
        """Tensors that are the same for all inputs: a runtime computes them once, when it loads the file."""
        for node in graph.node:
            if node.op_type != _DEQUANTIZE and all(name in self._constants for name in node.input if name):
                self._constants.update(node.output)

    def count(self) -> GraphCounts:
        for node in self._graph.node:
            default = node.domain in _DEFAULT_DOMAINS
            self._counts.operators[node.op_type if default else f"{node.domain}.{node.op_type}"] += 1
            is_int8 = self._is_int8(node)
            self._count_macs(node, is_int8)
            if not is_int8 and node.output[0] not in self._constants and self._computes_in_float(node):
                self._counts.float_operators.append(_place(node))
        self._counts.weights_read_bytes = sum(self._read_bytes())
        return self._counts

    def _count_macs(self, node: NodeProto, is_int8: bool) -> None:
        macs = None
        if _has_formula(node):
            try:
                macs = self._macs_of(node)
            except LookupError:  # a shape is not known
                macs = None
        if macs is not None:
            self._counts.macs[INT8 if is_int8 else self._dtype(node)] += macs
        elif _has_products(node):
            self._counts.uncounted.append(_place(node))

    def _macs_of(self, node: NodeProto) -> int | None:
        """Return a node's multiply-accumulates, without channels that `export.onnx` appends to a convolution's input.

        None where there is no formula for it. Raises LookupError for shapes.
        """
        inputs, out = [self._shape(name) for name in node.input], self._shape(node.output[0])
        if node.op_type == "Conv" and self._made_by(node.input[0], _DEQUANTIZE):
            integers = self._makers[node.input[0]].input[0]
            before = self._shape(self._makers[integers].input[0]) if self._made_by(integers, "Pad") else None
            num_added = 0 if before is None else _known(inputs[0])[1] - before[1]
            if num_added and _attribute(node, "group", 1) > 1:  # depthwise: as many outputs
                num_samples, num_channels, *size = _known(out)
                out = (num_samples, num_channels - num_added, *size)
            elif num_added:
                num_outputs, num_channels, *size = _known(inputs[1])
                inputs[1] = (num_outputs, num_channels - num_added, *size)
        return _macs(node, inputs, out)

    def _shape(self, name: str) -> Sequence[int] | None:
        facts = self._tensors.get(name)
        return None if facts is None else facts.shape

    def _num_values(self, name: str) -> int:
        shape = self._shape(name)
        return 0 if shape is None else prod(shape)

    def _dtype(self, node: NodeProto) -> str:
        facts = self._tensors.get(node.input[0])
        return facts.dtype if facts is not None else "unknown"

    def _is_int8(self, node: NodeProto) -> bool:
        if _INT8_NAMES.search(node.op_type) or node.op_type in (_QUANTIZE, _DEQUANTIZE, "DynamicQuantizeLinear"):
            return True
        if node.op_type in _ACTIVATIONS:
            return self._is_quantized(node.output[0]) and self._is_absorbed(node)
        if node.op_type not in _FUSED:
            return False
        data = [name for name in node.input[:2] if name]
        is_dequantized = all(self._made_by(name, _DEQUANTIZE) for name in data)
        return is_dequantized and (node.op_type in _FUSED_ALONE or self._is_quantized(node.output[0]))

    def _is_absorbed(self, node: NodeProto) -> bool:
        """Whether what an activation reads is computed in int8, or was."""
        maker = self._makers.get(node.input[0])
        return maker is not None and (maker.op_type == _DEQUANTIZE or self._is_int8(maker))

    def _is_quantized(self, name: str) -> bool:
        """Whether a tensor is read by QuantizeLinear alone, an activation between them or not."""
        readers = self._readers[name]
        if name in self._outputs or not readers:
            return False
        return all(
            reader.op_type == _QUANTIZE
            or (
                reader.op_type in _ACTIVATIONS
                and all(own.op_type == _QUANTIZE for own in self._readers[reader.output[0]])
            )
            for reader in readers
        )

    def _made_by(self, name: str, operator: str) -> bool:
        maker = self._makers.get(name)
        return maker is not None and maker.op_type == operator

    def _computes_in_float(self, node: NodeProto) -> bool:
        if node.op_type in _MOVES or (node.op_type == "Max" and len(node.input) == 1):  # that one is a copy
            return False
        facts = self._tensors.get(node.output[0])
        return facts is not None and facts.dtype.startswith(("float", "bfloat"))

    def _read_bytes(self) -> Iterator[int]:
        """Yield the bytes of every constant tensor that a prediction reads; of lookups, those of the rows."""
        stored = {own.name: own for own in self._graph.initializer}
        for name in sorted(self._constants):
            readers = [node for node in self._readers[name] if node.output[0] not in self._constants]
            facts = self._tensors.get(name)
            item_bytes = _item_bytes(stored[name]) if name in stored else _itemsize(facts)
            size = self._num_values(name) * item_bytes
            if readers and all(node.op_type.startswith("Gather") and node.input[0] == name for node in readers):
                yield int(min(size, sum(self._num_values(node.output[0]) for node in readers) * item_bytes))
            elif readers:
                yield int(size)


def _macs(node: NodeProto, inputs: Sequence[Sequence[int] | None], out: Sequence[int] | None) -> int | None:
    """Return a node's multiply-accumulates; None where there is no formula for it. Raises LookupError for shapes."""
    kind = node.op_type
    if kind in _CONVOLUTIONS:
        return counts.convolution(_known(out), _known(inputs[_CONVOLUTIONS[kind]]))
    if kind == "ConvTranspose":
        return counts.transposed_convolution(_known(inputs[0]), _known(inputs[1]))
    if kind in _PRODUCTS:
        return counts.matrix_product(_known(out), _known(inputs[0])[-2 if _attribute(node, "transA", 0) else -1])
    if kind in ("Gemm", "QGemm"):
        return counts.matrix_product(_known(out), _known(inputs[0])[-2 if _attribute(node, "transA", 0) else -1])
    if kind in _RECURRENT:
        num_steps, batch, size = _known(inputs[0])
        directions = 2 if _attribute(node, "direction", b"forward") == b"bidirectional" else 1
        sizes = [(size, _attribute(node, "hidden_size", 0))] * directions
        return counts.recurrent(num_steps * batch, _RECURRENT[kind], sizes)
    if kind == "Einsum":
        return _einsum(_attribute(node, "equation", b"").decode(), [_known(shape) for shape in inputs])
    query, key, value = (_known(shape) for shape in inputs[:3])
    return counts.attention(query, key, value) if len(query) == 4 and node.domain == "" else None


def _einsum(equation: str, shapes: Sequence[Sequence[int]]) -> int | None:
    """Of two operands: a product for each combination of the indices. None for others, and for `...`."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if len(shapes) != 2 or "." in equation or [len(term) for term in terms] != [len(shape) for shape in shapes]:
        return None
    sizes = {
        letter: size
        for term, shape in zip(terms, shapes, strict=True)
        for letter, size in zip(term, shape, strict=True)
    }
    return prod(sizes.values())


def _known(shape: Sequence[int] | None) -> Sequence[int]:
    if shape is None:
        raise LookupError
    return shape


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    found = next((own for own in node.attribute if own.name == name), None)
    return default if found is None else helper.get_attribute_value(found)


def _has_products(node: NodeProto) -> bool:
    """Whether a node may have multiply-accumulates, itself or in a graph inside it."""
    if _CASTS.search(node.op_type):
        return False
    graphs = [own.g for own in node.attribute if own.HasField("g")]
    if graphs:
        return any(_has_products(inner) for graph in graphs for inner in graph.node)
    is_foreign = node.domain not in _DEFAULT_DOMAINS and not node.op_type.endswith("QuantizeLinear")
    is_foreign = is_foreign and node.op_type not in (_QUANTIZE, _DEQUANTIZE) and not node.op_type.startswith("QLinear")
    return is_foreign or bool(_HAS_PRODUCTS.search(node.op_type))


def _place(node: NodeProto) -> str:
    return f"{node.name or node.output[0]} ({node.op_type})"


def _itemsize(facts: TensorFacts | None) -> int:
    try:
        return 0 if facts is None else np.dtype(facts.dtype).itemsize
    except TypeError:  # of a type that NumPy has not
        return 0


def _item_bytes(tensor: TensorProto) -> float:
    name = TensorProto.DataType.Name(tensor.data_type)
    if name in ("INT4", "UINT4", "FLOAT4E2M1"):
        return 0.5
    return helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _tensor_bytes(tensor: TensorProto) -> int:
    return int(prod(tensor.dims) * _item_bytes(tensor))


def stored_bytes(path: Path) -> dict[str, int]:
    """Return the bytes of the tensors that a file holds, by dtype."""
    graph = onnx.load(path, load_external_data=False).graph
    constants = (own.t for node in graph.node for own in node.attribute if own.HasField("t"))
    found: dict[str, int] = {}
    for tensor in (*graph.initializer, *constants):
        name = TensorProto.DataType.Name(tensor.data_type).lower()
        name = {"float": "float32", "double": "float64"}.get(name, name)
        found[name] = found.get(name, 0) + _tensor_bytes(tensor)
    return found
