"""Somebody's ONNX file, with its inputs and outputs named as the data set's."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto, ValueInfoProto, helper

from ptpipe import Context, StageError, nearest
from ptpipe_torch import Data, FileInterface, InputForm, OnnxFile
from ptpipe_torch.data.raw_form import NORMALIZED
from ptpipe_torch.model.outputs import with_outputs
from ptpipe_torch.model.signature import BATCH, Meanings, TensorSpec, meanings_from_json
from ptpipe_zoo import onnx_external_data
from ptpipe_zoo.batch_axis import check_runs, check_symbols
from ptpipe_zoo.onnx_integers import cast_integers
from ptpipe_zoo.onnx_outputs import chosen_outputs, found_outputs

if TYPE_CHECKING:
    from ptpipe_zoo.config import OnnxModelConfig

_FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.DOUBLE: "float64",
}
_INT8_OPERATORS = {"QuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"}


def load_file(config: OnnxModelConfig, ctx: Context, data: Data) -> OnnxFile:
    """Implement `model.onnx`."""
    path, needed = Path(config.file).expanduser(), data.info.signature
    model, had_external_data = onnx_external_data.read(path)
    graph, form = model.graph, _input_form(config, model)
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]  # older files list the weights, too
    outputs = (
        _matched(path, "outputs", graph.output, needed.outputs, config.outputs)
        if needed.outputs
        else chosen_outputs(path, graph.output, config.outputs, needed.names)
    )
    renamed = {**_matched(path, "inputs", inputs, needed.inputs, config.inputs), **outputs}
    signature = replace(needed, meanings=_meanings(model, renamed, needed.names))
    data.info.check_fit(path.name, signature)
    kept = [value for value in graph.output if value.name in renamed]
    own = signature if form == NORMALIZED else replace(signature, inputs=_raw_inputs(data, form))
    cast = cast_integers(graph, _pairs(inputs, renamed, own.inputs), partial(_rename, path, graph))
    for words in cast:
        ctx.notice(f"{path.name} takes {words}")
    checked = _pairs([*inputs, *kept], renamed, (*own.inputs, *own.outputs))
    batch_sizes = {value.name: _check_value(path, value, spec) for value, spec in checked}
    if (fixed := _only_batch_size(path, inputs, kept, batch_sizes)) is not None:
        ctx.notice(f"{path.name} takes batches of {fixed} alone: others are predicted in pieces of that size")
    names = {old: new for old, new in renamed.items() if old != new}
    if had_external_data or cast or names or len(kept) < len(graph.output):
        del graph.output[:]
        graph.output.extend(kept)
        _rename(path, graph, names)
        path = ctx.scratch / path.name
        onnx.save_model(model, path)
    if not needed.outputs:
        specs = found_outputs(path, own.inputs, outputs, fixed)
        signature, own = (with_outputs(of, specs) for of in (signature, own))
    interface = None if form == NORMALIZED else FileInterface(form, own)
    result = OnnxFile(path, signature, _precision(graph), interface=interface)
    check_runs(result, data, {node.op_type for node in _nodes(graph)})
    ctx.metric(num_parameters=sum(int(np.prod(tensor.dims)) for tensor in _stored_tensors(graph)))
    return result


def _input_form(config: OnnxModelConfig, model: ModelProto) -> InputForm:
    """Return what the file takes: as the option says, else as ptpipe wrote into it."""
    if config.preprocessing is not None:
        return config.preprocessing
    stored = _metadata(model).get("preprocessing")
    forms: tuple[InputForm, ...] = ("nhwc", "nchw")
    return next((form for form in forms if form == stored), NORMALIZED)


def _raw_inputs(data: Data, form: InputForm) -> tuple[TensorSpec, ...]:
    columns = data.info.inputs
    return tuple(columns[spec.name].raw_form(spec.name, form).spec for spec in data.info.signature.inputs)


def _metadata(model: ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def _meanings(model: ModelProto, renamed: Mapping[str, str], needed: Collection[str]) -> Meanings:
    """Return what a file that ptpipe wrote says of the `needed` tensors, by their new names; nothing for others."""
    try:
        meanings = meanings_from_json(json.loads(_metadata(model).get("meanings", "{}")))
    except (ValueError, RecursionError):  # any tool may write an entry of this name
        return {}
    return {renamed[name]: words for name, words in meanings.items() if renamed.get(name) in needed}


def _matched(
    path: Path, side: str, values: Sequence[ValueInfoProto], specs: Sequence[TensorSpec], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the data set's name for each of the file's: as an option says, by name, or the only one.

    Further outputs are left out. Raises StageError where something is left over.
    """
    found, needed = [value.name for value in values], [spec.name for spec in specs]
    for option, words in ((given, found), (given.values(), needed)):
        for name in option:
            if name not in words:
                close = nearest(name, words)
                hint = f"did you mean {close!r}?" if close else f"there are {', '.join(words)}"
                raise StageError(f"{side}: {name!r} is neither in {path.name} nor in the data set ({hint})")
    if not given and len(found) == len(needed) == 1:
        return {found[0]: needed[0]}
    matched = {**{name: name for name in found if name in needed and name not in given.values()}, **given}
    if missing := [name for name in needed if name not in matched.values()]:
        what = "feeds no input" if side == "inputs" else "is no output"
        raise StageError(
            f"the data set's {missing[0]} {what} of {path.name}, which has {', '.join(found)}: say which by {side}, "
            f"{{{next((name for name in found if name not in matched), found[0])}: {missing[0]}}}"
        )
    if side == "inputs" and (unfed := [name for name in found if name not in matched]):
        raise StageError(f"{path.name} has an input that no column of the data set feeds: {', '.join(unfed)}")
    return matched


def _pairs(
    values: Iterable[ValueInfoProto], renamed: Mapping[str, str], specs: Iterable[TensorSpec]
) -> Iterable[tuple[ValueInfoProto, TensorSpec]]:
    by_name = {spec.name: spec for spec in specs}
    return [(value, by_name[renamed[value.name]]) for value in values if renamed[value.name] in by_name]


def _check_value(path: Path, value: ValueInfoProto, spec: TensorSpec) -> int | None:
    """Return the only batch size of an input or output; None where it takes any, or doesn't say.

    Raises StageError where it is of another type, or can't have the shape of the data set's.
    """
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        hint = "convert with options={'zipmap': False}, if it is scikit-learn's"
        raise StageError(f"{path.name}: {value.name} is no tensor: {hint}")
    name = TensorProto.DataType.Name(tensor.elem_type)
    wanted = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
    if tensor.elem_type != wanted:
        hint = "; preprocessing: nhwc (or nchw) says that the file takes raw images" if name == "UINT8" else ""
        raise StageError(f"{path.name}: {value.name} is {name.lower()}, the data set's {spec} is not{hint}")
    if not tensor.HasField("shape"):
        return None
    sizes = [_size(axis) for axis in tensor.shape.dim]
    shown = f"{path.name}: {value.name} has the shape ({', '.join('?' if of is None else str(of) for of in sizes)})"
    if len(sizes) != len(spec.shape):
        raise StageError(f"{shown}; the data set needs {spec}")
    for size, needed in zip(sizes, spec.shape, strict=True):
        if needed == BATCH or size is None:
            continue
        if isinstance(needed, str):
            raise StageError(f"{shown}, and one of {size} alone; for any {needed}, export it with a dynamic axis")
        if size != needed:
            hint = "choose a file or a data set that fits the other"
            if len(sizes) == 4 and _fits(sizes, [spec.shape[axis] for axis in (0, 2, 3, 1)]):
                hint = f"export it with channels on the second axis (tf2onnx: --inputs-as-nchw {value.name})"
            raise StageError(f"{shown}; the data set needs {spec}: {hint}")
    return sizes[0]


def _fits(sizes: Iterable[int | None], shape: Iterable[int | str]) -> bool:
    return all(size is None or size == needed for size, needed in zip(sizes, shape, strict=True) if needed != BATCH)


def _size(axis: TensorShapeProto.Dimension) -> int | None:
    """Return the size of an axis, or None for any: by name, or as Paddle writes it, -1."""
    return axis.dim_value if axis.HasField("dim_value") and axis.dim_value >= 0 else None


def _only_batch_size(
    path: Path,
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    sizes: Mapping[str, int | None],
) -> int | None:
    """Return the batch size of a file that takes no other, of the `sizes` of its tensors, by name.

    Raises StageError where tensors have several, or the batch is on different axes. One of 1 goes with any number:
    samples are predicted one at a time.
    """
    of_inputs = {sizes[value.name] for value in inputs}
    if 1 not in of_inputs:
        check_symbols(path, [*inputs, *outputs])
    shown = sorted({size for size in sizes.values() if size is not None})
    is_mixed = None in of_inputs and not of_inputs <= {None, 1}
    if len(shown) > 1 or is_mixed:
        several = f"{' and '.join(map(str, shown))} samples{' and of any number' if is_mixed else ''}"
        raise StageError(f"{path.name} has inputs and outputs of {several}: export it with the same batch axis for all")
    return next(iter(shown), None)


def _rename(path: Path, graph: GraphProto, renamed: Mapping[str, str]) -> None:
    """Rename tensors in a graph and in those inside it, in which a name stands for the same tensor."""
    names = {name for node in _nodes(graph) for name in (*node.input, *node.output)}
    values = {value.name for value in (*graph.input, *graph.output)} | {tensor.name for tensor in graph.initializer}
    for new in renamed.values():
        if new in names | values and new not in renamed:
            raise StageError(f"{path.name} has another tensor called {new!r}: rename it in the file")
    for node in _nodes(graph):
        for side in (node.input, node.output):
            side[:] = [renamed.get(name, name) for name in side]
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = renamed.get(value.name, value.name)
    for inner in _graphs(graph):
        for value in (*inner.output, *inner.value_info):
            value.name = renamed.get(value.name, value.name)


def _graphs(graph: GraphProto) -> list[GraphProto]:
    """Return the graphs inside a graph, of loops and branches, at any depth."""
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    inside = [attribute.g for attribute in attributes if attribute.HasField("g")]
    inside += [inner for attribute in attributes for inner in attribute.graphs]
    return [*inside, *(deeper for inner in inside for deeper in _graphs(inner))]


def _nodes(graph: GraphProto) -> list[NodeProto]:
    return [node for each in (graph, *_graphs(graph)) for node in each.node]


def _stored_tensors(graph: GraphProto) -> list[TensorProto]:
    """Return the tensors in a file: many tools write a Constant for each weight."""
    attributes = [own for node in _nodes(graph) if node.op_type == "Constant" for own in node.attribute]
    constants = [own.t for own in attributes if own.HasField("t")]
    return [tensor for each in (graph, *_graphs(graph)) for tensor in each.initializer] + constants


def _precision(graph: GraphProto) -> str:
    nodes = _nodes(graph)
    operators = {node.op_type for node in nodes}
    if "MatMulNBits" in operators:
        bits = [
            own.i for node in nodes if node.op_type == "MatMulNBits" for own in node.attribute if own.name == "bits"
        ]
        return f"{min(bits, default=4)}-bit weights"
    if "DynamicQuantizeLinear" in operators:
        return "int8 dynamic"
    return "int8" if operators & _INT8_OPERATORS else _float_precision(graph)


def _float_precision(graph: GraphProto) -> str:
    """Return the type of most float values that are stored."""
    sizes = dict.fromkeys(_FLOATS, 0)
    for tensor in _stored_tensors(graph):
        if tensor.data_type in sizes:
            sizes[tensor.data_type] += int(np.prod(tensor.dims))
    return _FLOATS[max(sizes, key=sizes.__getitem__)]
