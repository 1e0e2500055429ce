"""Implementation of export.onnx: export a torch model to one self-contained file, and compare the two."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import Context, StageError, __version__
from ptpipe_onnx import dynamic_passes, graph, layerwise, qdq_passes, recurrent_passes, runtime_passes, torch_exporter
from ptpipe_onnx.config import ExportConfig
from ptpipe_onnx.coverage import coverage_of
from ptpipe_onnx.exact import compare_exactly
from ptpipe_onnx.kernels import Kernels
from ptpipe_onnx.metadata import metadata_of, reduced_range
from ptpipe_onnx.parity import Logits, Parity
from ptpipe_onnx.reproduction import stored_environment
from ptpipe_onnx.saturation import Saturation, saturation_of
from ptpipe_onnx.tensor_names import fused_layer_names, largest_integers, name_quantized_tensors
from ptpipe_onnx.vectors import SUFFIX, Tolerance, Vectors
from ptpipe_onnx.weights import store_float_weights, store_weights
from ptpipe_torch import Data, Model, OnnxFile, Predictor, Task, epoch_order
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import float_network, is_prepared, reference_network
from ptpipe_torch.int8.layers import QuantizedWeight, dynamic_weights, replace_layers, stored_weights
from ptpipe_torch.int8.recurrent import recurrent_weights
from ptpipe_torch.memory_format import to_channels_last
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.model.outputs import predicted, returned_names
from ptpipe_torch.runtime import released_memory, torch_threads

MAX_BYTES = 2**31 - 2**20
"""protobuf's limit, minus some room for everything but weights."""
_BATCH_SIZE = 64
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""By the names of the tensors, in the order of the signature."""


@dataclass(frozen=True)
class BuiltGraph:
    """An exported graph, before it is written."""

    model: ir.Model
    precision: str
    """As in `OnnxFile.precision`."""
    reference: GraphModule | None = None
    """Of a static or QAT int8 model: its reference network."""
    reduced: str = "false"
    """As in the metadata `reduce_range`; DynamicQuantizeLinear always has 8 bits."""
    float_reasons: Mapping[str, str] = field(default_factory=dict)
    """Why layers that are int8 in the model compute in float, by the names of their weights."""


@dataclass(frozen=True)
class WrittenFile:
    """What is known of a file that was written."""

    precision: str
    steps: Mapping[str, float]
    """The quantization step of each quantized output."""
    saturation: Saturation
    layer_names: Mapping[str, str]
    """Of layers that the model calls otherwise than the file."""
    float_reasons: Mapping[str, str]
    """As in `BuiltGraph`."""
    reference: GraphModule | None


def export_file(config: ExportConfig, ctx: Context, model: Model, data: Data) -> OnnxFile:
    """Implement the stage `export.onnx`."""
    _check_inputs(config, model, data)
    path = ctx.scratch / "model.onnx"
    with torch.random.fork_rng(devices=[]):  # converted layers draw random initial weights
        with released_memory():
            written = _write(config, path, model, data)
        onnx.checker.check_model(str(path), full_check=True)
        file = OnnxFile(path, model.signature, written.precision)
        ctx.metric(opset=config.opset, size_bytes=file.size_bytes)
        if written.precision != "float32":
            _report_kernels(ctx, path, written)
        if written.reference is not None:
            with released_memory():
                inputs = _inputs(config, ctx, data, layerwise.MAX_SAMPLES)
                compare_layers(ctx, path, model, written.reference, inputs)
            written = replace(written, reference=None)  # releases it
        parities = _compare(config, ctx, file, model, data, written.steps)
    figures = {
        name if len(parities) == 1 else f"{output}.{name}": value
        for output, parity in parities.items()
        for name, value in parity.figures.items()
    }
    ctx.metric(**figures)
    for parity in parities.values():
        parity.check()
    vectors = _write_vectors(config, ctx, file, data, parities)
    return OnnxFile(path, file.signature, file.precision, figures, vectors)


def _write_vectors(
    config: ExportConfig, ctx: Context, file: OnnxFile, data: Data, parities: Mapping[str, Parity]
) -> Path | None:
    """Write the test vectors beside the file; return None where there are to be none."""
    if not config.num_test_vectors:
        return None
    inputs, task = _inputs(config, ctx, data, config.num_test_vectors), data.info.task
    with file.predictor() as predict:
        outputs = predict(inputs)
    tolerances = {}
    for name, parity in parities.items():
        rms, largest = parity.limits_elsewhere
        tolerances[name] = Tolerance(largest, rms, tuple(task.output_scale), task.class_scores.get(name))
    path = file.path.with_suffix(SUFFIX)
    with file.path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    vectors = Vectors(digest, inputs, outputs, tolerances, stored_environment())
    vectors.save(path)
    ctx.metric(num_test_vectors=vectors.num_samples, test_vector_bytes=path.stat().st_size)
    return path


def compare_layers(ctx: Context, path: Path, model: Model, reference: GraphModule, inputs: Arrays) -> None:
    """Compare the layers of a static int8 file with the model's: exactly, then by what they compute from the inputs.

    Raises StageError, naming a layer, where they differ.
    """
    with quantized_engine(model.recipe.backend):
        exact = compare_exactly(path, reference, model.build())
    ctx.metric(**exact.figures)
    outputs = returned_names(reference.graph.output_node().args[0], model.signature.outputs)
    layers = layerwise.compare_file(path, reference, inputs, outputs, ctx.scratch)
    ctx.metric(**layers.figures)
    layers.check()


def _check_inputs(config: ExportConfig, model: Model, data: Data) -> None:
    if model.recipe.backend and not model.recipe.convert:
        raise StageError("this model is prepared for int8 but not converted: put a quant.convert before export.onnx")
    data.info.check_fit("the model", model.signature)
    if not len(data.splits[config.split]):
        raise StageError(f"the data has no samples in {config.split} to compare the file with: choose another `split`")


def build_graph(model: Model, opset: int) -> BuiltGraph:
    """Export a model, and rewrite its int8 parts into the form that runtimes fuse into integer kernels.

    Raises StageError for a model that can't be exported.
    """
    if not model.recipe.backend:
        return BuiltGraph(torch_exporter.optimize(_export(model, model.build(), opset)), "float32")
    prepared = model.build_prepared()
    if is_prepared(prepared):
        reduced = reduced_range(prepared)
        with quantized_engine(model.recipe.backend):
            network, weights = reference_network(prepared)
        exported = _export(model, network, opset)
        name_quantized_tensors(exported, network)
        store_weights(exported, weights)
        qdq_passes.use_integer_kernels(torch_exporter.optimize(exported))
        store_float_weights(exported, _stored_weights(model))
        return BuiltGraph(exported, "int8", network, reduced)
    return _dynamic_graph(model, prepared, opset)


def _stored_weights(model: Model) -> dict[str, QuantizedWeight]:
    """Return the weights that a static or QAT model's float layers have as int8 in its file."""
    if not any(reference.arguments.get("stored") for reference in model.recipe.prepare):
        return {}  # spares most networks another build
    with quantized_engine(model.recipe.backend):
        return stored_weights(model.int8_tensors or {}, model.build())


def _dynamic_graph(model: Model, float_network: nn.Module, opset: int) -> BuiltGraph:
    converted = model.build()
    weights, recurrent = dynamic_weights(converted), recurrent_weights(converted)
    stored = stored_weights(model.int8_tensors or {}, converted)
    stored |= {name: weight.with_scale_of_each_row() for name, weight in recurrent.items()}
    if not weights and not stored:
        raise StageError(f"no layer of this {model.recipe.backend} model is quantized in a way that can be exported")
    # With weights of their own: one may be shared with a layer that is float.
    names = [name.rpartition(".")[0] for name in (*weights, *recurrent)]
    replace_layers(float_network, dict.fromkeys(names), copy.deepcopy)
    network = _with_rounded_weights(float_network, stored)
    layers = {name: network.get_submodule(name.removesuffix(".weight")) for name in weights}
    exported = _export(model, network, opset)
    # The exporter gives a layer that has several names one of them.
    found = {layer for name, layer in layers.items() if name in exported.graph.initializers}
    weights = {
        name: weight
        for name, weight in weights.items()
        if name in exported.graph.initializers or layers[name] not in found
    }
    dynamic_passes.quantize_linear_layers(exported, weights)
    float_reasons = recurrent_passes.quantize_recurrent_layers(exported, recurrent)
    store_float_weights(torch_exporter.optimize(exported), stored)
    return BuiltGraph(exported, "int8 dynamic", float_reasons=float_reasons)


def _export(model: Model, network: nn.Module, opset: int) -> ir.Model:
    return torch_exporter.export(network, model.signature, opset)


def _with_rounded_weights(network: nn.Module, weights: Mapping[str, QuantizedWeight]) -> nn.Module:
    with torch.no_grad():
        for name, weight in weights.items():
            network.get_parameter(name).copy_(torch.from_numpy(weight.dequantized()))
    return network


def _write(config: ExportConfig, path: Path, model: Model, data: Data) -> WrittenFile:
    """Write the file."""
    built = build_graph(model, config.opset)
    content = built.model
    runtime_passes.prevent_fusions(content.graph)
    size_bytes = graph.weight_bytes(content.graph)
    if size_bytes > MAX_BYTES:
        raise StageError(f"the weights are {size_bytes:,} bytes; one ONNX file holds less than 2 GiB")
    graph.set_shapes(content.graph, model.signature)
    largest = {}
    if built.reference is not None and built.reduced == "true":
        largest = largest_integers(built.reference)
    names = {} if built.reference is None else fused_layer_names(built.reference)
    saturation = saturation_of(content.graph, largest, names)
    content.ir_version = config.ir_version
    content.producer_name, content.producer_version = "ptpipe", __version__
    content.metadata_props.update(metadata_of(model, data, built.precision, built.reduced, saturation))
    steps = qdq_passes.output_steps(content.graph)
    graph.write(content, path)
    return WrittenFile(built.precision, steps, saturation, names, built.float_reasons, built.reference)


def _compare(
    config: ExportConfig, ctx: Context, file: OnnxFile, model: Model, data: Data, steps: Mapping[str, float]
) -> dict[str, Parity]:
    """Return the parity of each output by its name."""
    order_N = _order(config, ctx, data)
    predictions: list[list[dict[str, npt.NDArray[Any]]]] = []
    num_done = 0
    with file.predictor() as onnx_predict, model.predictor() as torch_predict, float_predictor(model) as float_predict:
        predictors = [onnx_predict, torch_predict, *([float_predict] if float_predict else [])]
        for part_N, batch_size in (
            (order_N[:1], 1),
            (order_N[1:], _BATCH_SIZE),
        ):  # tests that the batch axis is dynamic
            for batch in data.batches(config.split, order_N=part_N, batch_size=batch_size):
                inputs = batch.input_arrays()
                predictions.append([predict(inputs) for predict in predictors])
                num_done += len(batch)
                ctx.progress(num_done, len(order_N), "samples")
    parities, task = {}, data.info.task
    for spec in model.signature.outputs:
        by_model = zip(*([_rows(task, spec.name, of[spec.name]) for of in batch] for batch in predictions), strict=True)
        onnx_NK, torch_NK, *float_NK = [np.concatenate(rows) for rows in by_model]
        parities[spec.name] = Parity(
            onnx_NK,
            torch_NK,
            float_NK[0] if float_NK else None,
            None if task.output_scale else steps.get(spec.name),
            are_class_scores=spec.name in task.class_scores,
            are_layers_proven=file.precision == "int8",
        )
    return parities


def _rows(task: Task, name: str, output: npt.NDArray[Any]) -> Logits:
    """Return an output in its natural unit, as rows of the scores of classes, else of its second axis."""
    if task.output_scale:
        output = (output - np.array(task.output_shift)) / np.array(task.output_scale)
    axis = task.class_scores.get(name, 1)
    rows = output.reshape(len(output), -1) if output.ndim < 3 else np.moveaxis(output, axis, -1)
    return rows.reshape(-1, rows.shape[-1]).astype(np.float32, copy=False)


def _order(config: ExportConfig, ctx: Context, data: Data) -> npt.NDArray[np.int64]:
    return epoch_order(len(data.splits[config.split]), ctx.seed, 0)[: config.num_samples]


def _inputs(config: ExportConfig, ctx: Context, data: Data, num_samples: int) -> Arrays:
    order_N = _order(config, ctx, data)[:num_samples]
    (batch,) = data.batches(config.split, order_N=order_N, batch_size=num_samples)
    return batch.input_arrays()


@contextmanager
def float_predictor(model: Model) -> Iterator[Predictor | None]:
    """Yield a predictor of the float network of an int8 model; None for a float model."""
    if not model.recipe.backend:
        yield None
        return
    network = float_network(model.build_prepared())
    to_channels_last(network, zeros(model.signature.inputs, 2))

    def predict(inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        return predicted(network, inputs, model.signature)

    with torch_threads(None), torch.inference_mode():
        yield predict


def _report_kernels(ctx: Context, path: Path, written: WrittenFile) -> None:
    """Report what computes in integers, and what can saturate."""
    kernels = Kernels.of(path, ctx.scratch)
    ctx.metric(num_int8_nodes=kernels.integer.total(), num_float_nodes=kernels.float.total())
    for precision, counts in (("int8", kernels.integer), ("float", kernels.float)):
        listed = ", ".join(f"{count} {name}" for name, count in counts.items())
        ctx.log(f"ONNX Runtime computes in {precision}: {listed or 'nothing'}")
    coverage = coverage_of(path, kernels, written.layer_names, written.float_reasons)
    ctx.metric(**coverage.figures)
    (ctx.log if coverage.is_as_in_the_model else ctx.notice)(str(coverage))
    for name, reason in coverage.float_layers.items():
        ctx.log(f"{name} computes in float: {reason}")
    saturation = written.saturation
    ctx.metric(num_saturating_layers=len(saturation.saturating))
    if saturation.saturating:
        ctx.notice(str(saturation))
    for layer in (layer for layer in saturation.layers if layer.saturates):
        ctx.log(f"{layer.name}: sums of two products from {layer.low:,} to {layer.high:,}, in 16 bits without VNNI")
