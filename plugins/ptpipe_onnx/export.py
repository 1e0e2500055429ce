"""Implementation of export.onnx: export a torch model to one self-contained file, and compare the two."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import Context, StageError, __version__
from ptpipe_onnx import dynamic_passes, graph, layerwise, qdq_passes, recurrent_passes, runtime_passes, torch_exporter
from ptpipe_onnx.activation_pass import write_fusable_activations
from ptpipe_onnx.branches import merge_branches
from ptpipe_onnx.config import ExportConfig
from ptpipe_onnx.coverage import coverage_of
from ptpipe_onnx.exact import compare_exactly
from ptpipe_onnx.file_interface import raw_forms, whole, with_interface
from ptpipe_onnx.kernels import Kernels
from ptpipe_onnx.latency_passes import use_quicker_kernels
from ptpipe_onnx.metadata import metadata_of, origin_of
from ptpipe_onnx.postprocessing import AddedOutputs, check_postprocessing, outputs_to_add
from ptpipe_onnx.preprocessing import check_preprocessing, check_resizing
from ptpipe_onnx.probes import RankedFile, rankings_named, rankings_of
from ptpipe_onnx.quantization.agreement import paired_rows
from ptpipe_onnx.reproduction import stored_environment
from ptpipe_onnx.saturation import Saturation, saturation_of
from ptpipe_onnx.tensor_names import fused_layer_names, name_quantized_tensors
from ptpipe_onnx.vectors import SUFFIX, Tolerance, Vectors
from ptpipe_onnx.weights import store_float_weights, store_weights
from ptpipe_torch import Data, Model, OnnxFile, RawForm
from ptpipe_torch.data.raw_form import NORMALIZED
from ptpipe_torch.files import file_digest
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.int8.layers import dynamic_weights, replace_layers, stored_weights, use_rounded_weights
from ptpipe_torch.int8.recurrent import recurrent_weights
from ptpipe_torch.model.exact_session import may_saturate
from ptpipe_torch.model.outputs import returned_names
from ptpipe_torch.model.reparametrized import remove_parametrizations
from ptpipe_torch.parity.comparison import (
    BATCH_SIZE,
    Arrays,
    ComparedSamples,
    Exported,
    check_exportable,
    compare_outputs,
    figures_of,
)
from ptpipe_torch.parity.other_sizes import check_other_sizes
from ptpipe_torch.parity.parity import Parity
from ptpipe_torch.runtime import large_blocks_mapped, released_memory

MAX_BYTES = 2**31 - 2**20
"""protobuf's limit, minus some room for everything but weights."""


@dataclass(frozen=True)
class Int8Networks:
    """The two forms of a static or QAT int8 model, with the same weights and biases."""

    int8: nn.Module
    """With torch's int8 layers."""
    reference: GraphModule
    """See `ptpipe_torch.int8.fx.reference_network`."""


@dataclass(frozen=True)
class BuiltGraph:
    """An exported graph, before it is written."""

    model: ir.Model
    precision: str
    """As in `OnnxFile.precision`."""
    networks: Int8Networks | None = None
    """Of a static or QAT int8 model."""
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
    networks: Int8Networks | None
    """As in `BuiltGraph`."""
    added: tuple[AddedOutputs, ...]
    """Further outputs that it is to have."""
    forms: Mapping[str, RawForm]
    """What it is to take in place of normalized inputs; empty: it takes those."""


@large_blocks_mapped()
def export_file(config: ExportConfig, ctx: Context, model: Model, data: Data) -> OnnxFile:
    """Implement the stage `export.onnx`."""
    check_exportable(ctx, model, data, config.split)
    samples = ComparedSamples(data, config.split, config.num_samples, ctx.seed)
    network_path = ctx.scratch / "network.onnx"
    with torch.random.fork_rng(devices=[]):  # converted layers draw random initial weights
        int8 = None
        with released_memory():
            ctx.progress(1, None, "step", doing="exporting the network")
            with released_memory():
                written = _write(config, ctx, network_path, model, data)
            if written.networks is not None:
                int8 = written.networks.int8
                ctx.progress(2, None, "step", doing="comparing layers with torch's")
                inputs = samples.inputs(layerwise.MAX_SAMPLES)
                with rankings_named(network_path):
                    compare_layers(ctx, network_path, model, written.networks, inputs)
                written = replace(written, networks=None)  # releases the reference
        network = OnnxFile(network_path, model.signature, written.precision)
        file = _completed(config, ctx, network, samples, written)
        onnx.checker.check_model(str(file.path), full_check=True)
        ctx.metric(opset=config.opset, size_bytes=file.size_bytes)
        if written.precision != "float32":
            with released_memory():
                _report_kernels(ctx, file.path, written)
        with rankings_named(file.path):
            parities = compare_outputs(ctx, _exported(ctx, file, written, int8), model, samples)
            figures = figures_of(parities)
            ctx.metric(**figures)
            for parity in parities.values():
                parity.check()
            without_interface = file if file.interface is None else network
            exported = _exported(ctx, without_interface, replace(written, added=()), int8)
            check_other_sizes(ctx, exported, model, samples)
        network_path.unlink(missing_ok=True)
    if written.saturation.saturating and may_saturate():
        _report_saturation_here(config, ctx, file, data)
    vectors = _write_vectors(config, ctx, file, samples, parities, written.added)
    return OnnxFile(file.path, file.signature, file.precision, figures, vectors, file.interface)


def _exported(ctx: Context, file: OnnxFile, written: WrittenFile, int8: nn.Module | None) -> Exported:
    check, is_proven = partial(check_postprocessing, written.added), file.precision == "int8"
    proven, rankings = whole(file).with_exact_sums(), rankings_of(file.path)
    if rankings:
        proven = RankedFile.of(file, rankings, ctx.scratch / "ranked.onnx")
    return Exported(proven, "ONNX file", written.steps, is_proven, file.input_form, check, int8, rankings)


def _completed(
    config: ExportConfig, ctx: Context, network: OnnxFile, samples: ComparedSamples, written: WrittenFile
) -> OnnxFile:
    """Return the file with what the options put around its network; with nothing, it is the network's own, moved."""
    path, form = ctx.scratch / "model.onnx", config.input_form
    if not config.has_interface:
        network.path.replace(path)
        return OnnxFile(path, network.signature, network.precision)
    with released_memory():
        file = with_interface(network, path, form, written.forms, written.added)
    if written.forms:
        raw, inputs = (samples.inputs(BATCH_SIZE, of) for of in (form, NORMALIZED))
        ctx.metric(max_abs_preprocessing_difference=check_preprocessing(written.forms, raw, inputs, config.opset))
        if config.resize:
            ctx.metric(max_resize_difference_levels=check_resizing(written.forms, raw, config.opset))
    return file


def _report_saturation_here(config: ExportConfig, ctx: Context, file: OnnxFile, data: Data) -> None:
    """Report how much saturation changes the outputs on this processor."""
    outputs = paired_rows(ctx, (file.with_exact_sums(), file), data, config.split, config.num_samples)
    for name, pair in outputs.items():
        figures, exact_NK = pair.figures, pair.first_NK
        prefix = "saturation" if len(outputs) == 1 else f"{name}.saturation"
        ctx.metric(**{f"{prefix}_{key}": value for key, value in figures.items() if key != "num_samples"})
        largest = float(np.abs(pair.second_NK - exact_NK).max())
        changed = f"{name} by up to {largest:.4g} of {np.abs(exact_NK).max():.4g}"
        if isinstance(agreement := figures.get("top1_agreement"), float):
            changed += f", and {1 - agreement:.2%} of the predicted classes"
        if largest:
            ctx.notice(f"this processor has no VNNI: in ONNX Runtime's usual kernels, saturation changes {changed}")


def _write_vectors(
    config: ExportConfig,
    ctx: Context,
    file: OnnxFile,
    samples: ComparedSamples,
    parities: Mapping[str, Parity],
    added: Sequence[AddedOutputs],
) -> Path | None:
    """Write the test vectors beside the file; return None where there are to be none."""
    if not config.num_test_vectors:
        return None
    inputs, task = samples.inputs(config.num_test_vectors, file.input_form), samples.data.info.task
    with whole(file).with_exact_sums().predictor() as predict:
        outputs = predict(inputs)
    tolerances = {}
    for name, parity in parities.items():
        rms, largest = parity.limits_elsewhere(outputs[name].size)
        scores_axis = task.class_scores.get(name)
        tolerances[name] = Tolerance(largest, rms, tuple(task.output_scale), scores_axis, parity.step)
    for own in added:
        tolerances[own.probabilities] = own.tolerance(tolerances[own.scores.name])
    outputs = {name: outputs[name] for name in tolerances}  # classes follow from scores
    path = file.path.with_suffix(SUFFIX)
    vectors = Vectors(file_digest(file.path), inputs, outputs, tolerances, stored_environment())
    vectors.save(path)
    ctx.metric(num_test_vectors=vectors.num_samples, test_vector_bytes=path.stat().st_size)
    return path


def compare_layers(ctx: Context, path: Path, model: Model, networks: Int8Networks, inputs: Arrays) -> None:
    """Compare the layers of a static int8 file with the model's: exactly, then by what they compute from the inputs.

    Raises StageError, naming a layer, where they differ.
    """
    reference = networks.reference
    with quantized_engine(model.recipe.backend):
        exact = compare_exactly(path, reference, networks.int8)
    ctx.metric(**exact.figures)
    outputs = returned_names(reference.graph.output_node().args[0], model.signature.outputs)
    layers = layerwise.compare_file(path, reference, inputs, outputs, ctx.scratch)
    ctx.metric(**layers.figures)
    layers.check()


def build_graph(model: Model, opset: int) -> BuiltGraph:
    """Export a model, and rewrite its int8 parts into the form that runtimes fuse into integer kernels.

    Raises StageError for a model that can't be exported.
    """
    if not model.recipe.backend:
        network = model.build()
        remove_parametrizations(network)  # what computes them may have no ONNX form
        exported = torch_exporter.optimize(_export(model, network, opset))
        merge_branches(exported.graph)
        return BuiltGraph(exported, "float32")
    if not model.recipe.prepare:
        return _dynamic_graph(model, opset)
    with quantized_engine(model.recipe.backend):
        int8 = model.build()
        network, weights = reference_network(model.build_prepared(), int8)
    exported = _export(model, network, opset)
    name_quantized_tensors(exported, network)
    store_weights(exported, weights)
    qdq_passes.use_integer_kernels(torch_exporter.optimize(exported))
    store_float_weights(exported, stored_weights(model.int8_tensors or {}, int8))
    return BuiltGraph(exported, "int8", Int8Networks(int8, network))


def _dynamic_graph(model: Model, opset: int) -> BuiltGraph:
    float_network, converted = model.build_prepared(), model.build()
    for reference in model.recipe.convert[:-1]:  # the last one quantizes
        float_network = reference.resolve("transform")(float_network, **reference.arguments)
    weights, recurrent = dynamic_weights(converted), recurrent_weights(converted)
    stored = stored_weights(model.int8_tensors or {}, converted)
    stored |= {name: weight.with_scale_of_each_row() for name, weight in recurrent.items()}
    if not weights and not stored:
        raise StageError(f"no layer of this {model.recipe.backend} model is quantized in a way that can be exported")
    # With weights of their own: one may be shared with a layer that is float.
    names = [name.rpartition(".")[0] for name in (*weights, *recurrent)]
    replace_layers(float_network, dict.fromkeys(names), copy.deepcopy)
    use_rounded_weights(float_network, stored)
    exported = _export(model, float_network, opset)
    # The exporter gives a layer that has several names one of them, and leaves out what no output depends on.
    weights = {name: weight for name, weight in weights.items() if name in exported.graph.initializers}
    dynamic_passes.quantize_linear_layers(exported, weights)
    float_reasons = recurrent_passes.quantize_recurrent_layers(exported, recurrent)
    store_float_weights(torch_exporter.optimize(exported), stored)
    return BuiltGraph(exported, "int8 dynamic", float_reasons=float_reasons)


def _export(model: Model, network: nn.Module, opset: int) -> ir.Model:
    return torch_exporter.export(network, model.signature, opset)


def _write(config: ExportConfig, ctx: Context, path: Path, model: Model, data: Data) -> WrittenFile:
    """Write the file of the network."""
    added = outputs_to_add(model.signature, data.info.task) if config.postprocessing else ()
    form, inputs = config.input_form, model.signature.inputs
    forms = {} if form == NORMALIZED else raw_forms(data, form, inputs, resize=config.resize)
    built = build_graph(model, config.opset)
    content = built.model
    write_fusable_activations(content.graph)
    use_quicker_kernels(content.graph)
    runtime_passes.prevent_fusions(content.graph)
    graph.remove_unused(content)  # runtimes would run it
    runtime_passes.separate_zero_points(content.graph)
    size_bytes = graph.weight_bytes(content.graph)
    if size_bytes > MAX_BYTES:
        raise StageError(f"the weights are {size_bytes:,} bytes; one ONNX file holds less than 2 GiB")
    graph.set_shapes(content.graph, model.signature)
    names = {} if built.networks is None else fused_layer_names(built.networks.reference)
    saturation = saturation_of(content.graph, names)
    content.ir_version = config.ir_version
    content.producer_name, content.producer_version = "ptpipe", __version__
    content.metadata_props.update(metadata_of(model, data, built.precision, saturation))
    content.metadata_props.update(origin_of(ctx, config))
    steps = qdq_passes.output_steps(content.graph)
    graph.write(content, path)
    reasons, networks = built.float_reasons, built.networks
    return WrittenFile(built.precision, steps, saturation, names, reasons, networks, added, forms)


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
