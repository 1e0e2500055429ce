"""Implementation of quant.weight_only: weights of linear layers in 4 or 8 bits, by blocks, as MatMulNBits.

Shape legend: K inputs of a linear layer, N outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from packaging.version import Version

from ptpipe import JSON, Context, StageError
from ptpipe_onnx.quantization.config import WeightOnlyConfig
from ptpipe_onnx.quantization.float32 import in_float32
from ptpipe_onnx.quantization.nodes import NodeNames, nodes_to_skip, tensors_read
from ptpipe_onnx.quantization.preparation import check_inputs, load_preprocessed
from ptpipe_onnx.quantization.result import finished
from ptpipe_onnx.quantization.tools import quantizer_tools
from ptpipe_torch import Data, OnnxFile

_OLDEST = "1.24"
"""Earlier quantizers take no number of bits."""
_MAX_SHOWN = 20
_SCALE_BITS = 32
_USED_OTHERWISE = "its weight is also used otherwise, as that of an embedding, and would be stored twice"


def missing_quantizer() -> str | None:
    """Return an error message if the installed ONNX Runtime can't quantize weights alone, else None."""
    from ptpipe_torch.ort import ort

    if Version(ort.__version__) >= Version(_OLDEST):
        return None
    found = f"onnxruntime {ort.__version__} can't quantize weights to a given number of bits"
    return f"{found}: pip install 'onnxruntime>={_OLDEST}'"


def quantize_weights(config: WeightOnlyConfig, ctx: Context, model: OnnxFile, data: Data) -> OnnxFile:
    """Implement the stage `quant.weight_only`."""
    if message := missing_quantizer():
        raise StageError(message)
    check_inputs(config, ctx, model, data)
    content = load_preprocessed(ctx, in_float32(ctx, model))
    skipped = set(nodes_to_skip(content, config.skip, ctx.kind))
    use_matmul(content.graph, skipped)
    layers = _Layers(content.graph, config, skipped, share_tables(content.graph))
    if not layers.quantized:
        raise StageError(
            f"{ctx.kind}: the file has no linear layer whose weights become smaller{_reasons(layers.kept_float)}"
        )
    path = ctx.scratch / "model.onnx"
    _write_quantized(config, ctx, content, layers, path)
    file = OnnxFile(path, model.signature, f"{config.bits}-bit weights")
    for name, reason in layers.kept_float.items():
        ctx.log(f"{name} stays float: {reason}")
    result = finished(config, ctx, model, file, data, layers.facts())
    if result.size_bytes >= model.size_bytes:
        ctx.notice(
            f"the file ({result.size_bytes} bytes) is no smaller than the one that it was made of "
            f"({model.size_bytes}): set another `block_size` or fewer `bits`, or keep that one"
        )
    return result


def use_matmul(graph: GraphProto, skipped: Iterable[str]) -> None:
    """Replace each Gemm of a constant weight by MatMul and Add: MatMulNBits takes the place of MatMul alone."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[NodeProto] = []
    for node in graph.node:
        attributes = {own.name: helper.get_attribute_value(own) for own in node.attribute}
        is_plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0 and not attributes.get("transA")
        is_linear = node.op_type == "Gemm" and is_plain and node.input[1] in stored and node.name not in skipped
        nodes += _as_matmul(graph, node, stored, bool(attributes.get("transB"))) if is_linear else [node]
    read = {name for node in nodes for name in tensors_read(node)} | {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in read or tensor.name not in stored]
    for field, values in ((graph.node, nodes), (graph.initializer, kept)):
        copies = [type(value).FromString(value.SerializeToString()) for value in values]
        del field[:]
        field.extend(copies)


def _as_matmul(
    graph: GraphProto, node: NodeProto, stored: dict[str, TensorProto], is_transposed: bool
) -> Iterator[NodeProto]:
    weight = node.input[1]
    if is_transposed:
        weight_KN = np.ascontiguousarray(numpy_helper.to_array(stored[weight]).T)
        weight = f"{weight}_KN"
        if weight not in stored:
            graph.initializer.append(numpy_helper.from_array(weight_KN, weight))
            stored[weight] = graph.initializer[-1]
    has_bias = len(node.input) == 3 and bool(node.input[2])
    product = f"{node.output[0]}_product" if has_bias else node.output[0]
    yield helper.make_node("MatMul", [node.input[0], weight], [product], node.name)
    if has_bias:
        yield helper.make_node("Add", [product, node.input[2]], node.output, f"{node.name}_bias")


def share_tables(graph: GraphProto) -> dict[str, str]:
    """Multiply by the transpose of a table, as that of an embedding, where ONNX Runtime stored its transpose, too.

    Return the layers' names by those of their MatMul nodes.
    """
    names, stored = NodeNames(graph), {tensor.name: tensor for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in stored]
    sizes = {tuple(reversed(stored[node.input[1]].dims)) for node in products}
    tables = {
        _digest(numpy_helper.to_array(tensor).T): tensor.name
        for tensor in graph.initializer
        if tuple(tensor.dims) in sizes and any(reader.op_type != "MatMul" for reader in names.readers(tensor.name))
    }
    shared = dict[str, str]()
    for node in products if tables else ():
        weight = node.input[1]
        if (table := tables.get(_digest(numpy_helper.to_array(stored[weight])))) not in (None, weight):
            shared[node.name] = names.layer(node)
            node.input[1] = f"{table}_of_{node.name}"
            graph.node.insert(0, helper.make_node("Transpose", [table], [node.input[1]], node.input[1], perm=(1, 0)))
    read = {name for node in graph.node for name in tensors_read(node)} | {value.name for value in graph.output}
    for tensor in [tensor for tensor in graph.initializer if shared and tensor.name not in read]:
        graph.initializer.remove(tensor)
    return shared


def _digest(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).digest()


class _Layers:
    """The linear layers of a graph: which ones are quantized, and why the others stay float."""

    def __init__(
        self, graph: GraphProto, config: WeightOnlyConfig, skipped: set[str], shared: Mapping[str, str]
    ) -> None:
        self._config, self._names = config, NodeNames(graph)
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self.quantized: dict[str, str] = {}
        """Names of layers by those of their nodes."""
        self.kept_float: dict[str, str] = dict.fromkeys(shared.values(), _USED_OTHERWISE)
        self._num_weights = 0
        for node in graph.node:
            weight = self._stored.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
            if weight is None:
                continue
            reason = "`skip`" if node.name in skipped else self._reason(weight)
            if reason:
                self.kept_float[self._names.layer(node)] = reason
            else:
                self.quantized[node.name] = self._names.layer(node)
                self._num_weights += int(np.prod(weight.dims))

    def _reason(self, weight: TensorProto) -> str | None:
        """Return why a weight stays float, or None."""
        if weight.data_type != TensorProto.FLOAT or len(weight.dims) != 2:
            return "its weight is no float32 matrix"
        if any(reader.op_type != "MatMul" for reader in self._names.readers(weight.name)):
            return _USED_OTHERWISE
        num_inputs = weight.dims[0]
        num_blocks = -(-num_inputs // self._config.block_size)
        if num_blocks * (self._config.block_size * self._config.bits + _SCALE_BITS) >= 32 * num_inputs:
            return f"blocks of {self._config.block_size} are no smaller than its {num_inputs} float inputs"
        return None

    def facts(self) -> dict[str, JSON]:
        """Return the metrics of the stage."""
        total = sum(int(np.prod(own.dims)) for own in self._stored.values() if own.data_type == TensorProto.FLOAT)
        return {
            "bits": self._config.bits,
            "block_size": self._config.block_size,
            "num_quantized_layers": len(self.quantized),
            "quantized_layers": _shown(self.quantized.values()),
            "float_layers": _shown(self.kept_float),
            "quantized_parameters_fraction": round(self._num_weights / total, 4),
        }


def _write_quantized(config: WeightOnlyConfig, ctx: Context, content: ModelProto, layers: _Layers, path: Path) -> None:
    with quantizer_tools(ctx, "ONNX Runtime's quantizer can't quantize the weights"):
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        products = (node for node in content.graph.node if node.op_type == "MatMul")
        quantizer = MatMulNBitsQuantizer(
            content,
            bits=config.bits,
            block_size=config.block_size,
            is_symmetric=config.symmetric,
            accuracy_level=config.accuracy_level,
            nodes_to_exclude=[node.name for node in products if node.name not in layers.quantized],
        )
        quantizer.process()
        result = quantizer.model.model
    _drop_repeated(result.graph)
    onnx.save_model(result, path)


def _drop_repeated(graph: GraphProto) -> None:
    """Drop what the quantizer stores again for each layer that shares a weight."""
    first = {tensor.name: tensor for tensor in reversed(graph.initializer)}
    if len(first) < len(graph.initializer):
        copies = [TensorProto.FromString(tensor.SerializeToString()) for tensor in first.values()]
        del graph.initializer[:]
        graph.initializer.extend(copies)


def _shown(names: Iterable[str]) -> list[JSON]:
    listed: list[JSON] = [*dict.fromkeys(names)]
    more = len(listed) - _MAX_SHOWN
    return listed if more <= 0 else [*listed[:_MAX_SHOWN], f"and {more} more"]


def _reasons(kept_float: dict[str, str]) -> str:
    listed = [f"{name}: {reason}" for name, reason in kept_float.items()]
    return f" ({'; '.join(listed[:3])}{'; ...' if len(listed) > 3 else ''})" if listed else ""
