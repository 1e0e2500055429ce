"""The work of export.onnx: a torch model to one self-contained file that was compared with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

from ptpipe import Context, StageError, __version__
from ptpipe_onnx import ExportConfig, dynamic_graph, graph, integer_graph, torch_ao, torch_exporter
from ptpipe_onnx.kernels import Kernels
from ptpipe_onnx.parity import Logits, Parity
from ptpipe_onnx.weights import store_convolutions, store_weights
from ptpipe_torch import Data, Model, OnnxFile, Predictor, epoch_order
from ptpipe_torch.runtime import quantized_engine, released_memory, torch_threads

MAX_BYTES = 2**31 - 2**20
"""protobuf's limit, less some room for what is not weights."""
_BATCH_SIZE = 64


@dataclass(frozen=True)
class Draft:
    """An exported graph that was not yet written."""

    model: graph.Model
    precision: str
    """As in `OnnxFile.precision`."""


def export_file(config: ExportConfig, ctx: Context, model: Model, data: Data) -> OnnxFile:
    """Do the stage `export.onnx`."""
    _check_inputs(config, model, data)
    path = ctx.scratch / "model.onnx"
    with torch.random.fork_rng(devices=[]):  # converted layers are born with random weights, drawn from nobody's stream
        with released_memory():
            precision, step = _write(config, path, model, data)
        onnx.checker.check_model(str(path), full_check=True)
        file = OnnxFile(path, model.input_shape_CHW, model.num_classes, precision)
        parity = _compared(config, ctx, file, model, data, step)
    ctx.metric(opset=config.opset, size_bytes=file.size_bytes, **parity.figures)
    if precision != "float32":
        _count_kernels(ctx, path)
    parity.check()
    return OnnxFile(path, file.input_shape_CHW, file.num_classes, file.precision, parity.figures)


def _check_inputs(config: ExportConfig, model: Model, data: Data) -> None:
    if model.recipe.backend and not model.recipe.convert:
        raise StageError("this model is prepared for int8 but not converted: put a quant.convert before export.onnx")
    if data.info.shape_CHW != model.input_shape_CHW:
        raise StageError(f"the model takes images of {model.input_shape_CHW}, the data has {data.info.shape_CHW}")
    if not len(data.splits[config.split]):
        raise StageError(f"the data has no samples in {config.split} to compare the file with: choose another `split`")


def _drafted(model: Model, opset: int) -> Draft:
    """Export, and bring the int8 parts into the form that integer kernels run."""
    ends = model.input_shape_CHW, model.num_classes
    if not model.recipe.backend:
        exported = torch_exporter.exported(model.build(), *ends, opset)
        return Draft(torch_exporter.tidied(exported), "float32")
    prepared = model.build_prepared()
    if torch_ao.is_prepared(prepared):
        with quantized_engine(model.recipe.backend):
            network, weights = torch_ao.reference_network(prepared)
        exported = torch_exporter.exported(network, *ends, opset)
        store_weights(exported.graph, weights)
        integer_graph.run_in_integers(torch_exporter.tidied(exported).graph)
        return Draft(exported, "int8")
    converted = model.build()
    weights = torch_ao.dynamic_weights(converted)
    if not weights:
        raise StageError(f"no layer of this {model.recipe.backend} model is quantized in a way that can be exported")
    stored = torch_ao.stored_weights(model.int8_tensors or {}, converted)
    exported = torch_exporter.exported(torch_ao.with_stored_weights(prepared, stored), *ends, opset)
    dynamic_graph.quantize_linear_layers(exported.graph, weights)
    store_convolutions(torch_exporter.tidied(exported).graph, stored)
    return Draft(exported, "int8 dynamic")


def _write(config: ExportConfig, path: Path, model: Model, data: Data) -> tuple[str, float | None]:
    """Write the file; return its precision and the quantization step of its output, None where that is float."""
    draft = _drafted(model, config.opset)
    content = draft.model
    size_bytes = graph.weight_bytes(content.graph)
    if size_bytes > MAX_BYTES:
        raise StageError(f"the weights are {size_bytes:,} bytes; one ONNX file holds less than 2 GiB")
    graph.describe_ends(content.graph, torch_exporter.BATCH_AXIS, model.input_shape_CHW, model.num_classes)
    content.producer_name, content.producer_version = "ptpipe", __version__
    content.metadata_props.update(_metadata(draft, model, data))
    step = integer_graph.output_step(content.graph)
    graph.write(content, path)
    return draft.precision, step


def _metadata(draft: Draft, model: Model, data: Data) -> dict[str, str]:
    info = data.info
    metadata = {
        "input": "images (N, C, H, W) float32: pixels / 255, less mean, divided by std, per channel",
        "mean": json.dumps(info.mean),
        "std": json.dumps(info.std),
        "data": info.name,
        "precision": draft.precision,
        "backend": model.recipe.backend or "",
        "builder": model.recipe.builder.address,
        "torch": str(torch.__version__),
    }
    if info.num_classes == model.num_classes:
        metadata["class_names"] = json.dumps(info.class_names)
    return metadata


def _compared(
    config: ExportConfig, ctx: Context, file: OnnxFile, model: Model, data: Data, step: float | None
) -> Parity:
    order_N = epoch_order(len(data.splits[config.split]), ctx.seed, 0)[: config.num_samples]
    rows: list[list[Logits]] = []
    num_done = 0
    with file.predictor() as onnx_logits, model.predictor() as torch_logits, _float_predictor(model) as float_logits:
        predictors = [onnx_logits, torch_logits, *([float_logits] if float_logits else [])]
        for part_N, batch_size in ((order_N[:1], 1), (order_N[1:], _BATCH_SIZE)):  # the batch axis is dynamic: try it
            for batch in data.batches(config.split, order_N=part_N, batch_size=batch_size):
                images_NCHW = np.ascontiguousarray(batch.images_NCHW.numpy())
                rows.append([predict(images_NCHW) for predict in predictors])
                num_done += len(images_NCHW)
                ctx.progress(num_done, len(order_N), "samples")
    columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
    return Parity(columns[0], columns[1], columns[2] if len(columns) == 3 else None, step)


@contextmanager
def _float_predictor(model: Model) -> Iterator[Predictor | None]:
    """The float network that an int8 model stands for; None for a float model."""
    if not model.recipe.backend:
        yield None
        return
    network: nn.Module = torch_ao.float_network(model.build_prepared()).to(memory_format=torch.channels_last)

    def predict(images_NCHW: Logits) -> Logits:
        logits_NK: Logits = network(torch.from_numpy(images_NCHW)).numpy()
        return logits_NK

    with torch_threads(None), torch.inference_mode():
        yield predict


def _count_kernels(ctx: Context, path: Path) -> None:
    kernels = Kernels.of(path, ctx.scratch)
    ctx.metric(num_int8_nodes=kernels.integer.total(), num_float_nodes=kernels.float.total())
    for words, counts in (("integers", kernels.integer), ("float", kernels.float)):
        listed = ", ".join(f"{count} {name}" for name, count in counts.items())
        ctx.log(f"ONNX Runtime computes in {words}: {listed or 'nothing'}")
