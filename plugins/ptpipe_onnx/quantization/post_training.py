"""Implementation of quant.onnx: post-training quantization by ONNX Runtime's own quantizer."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from math import isfinite
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx import ModelProto, TensorProto

from ptpipe import JSON, Context, StageError
from ptpipe_onnx.kernels import Kernels
from ptpipe_onnx.quantization.agreement import ConstantOutputError
from ptpipe_onnx.quantization.calibration import CalibrationReader
from ptpipe_onnx.quantization.clips import shared_clips
from ptpipe_onnx.quantization.config import QuantizeOnnxConfig
from ptpipe_onnx.quantization.coordinates import nodes_of_coordinates
from ptpipe_onnx.quantization.float32 import in_float32
from ptpipe_onnx.quantization.float_passes import float_parts
from ptpipe_onnx.quantization.integers import nodes_of_integers
from ptpipe_onnx.quantization.masks import mask_nodes
from ptpipe_onnx.quantization.nodes import has_graphs, nodes_to_skip
from ptpipe_onnx.quantization.optimization import optimized_float, optimized_int8
from ptpipe_onnx.quantization.preparation import (
    check_inputs,
    fit_for_quantizer,
    load_preprocessed,
    only_batch_size,
)
from ptpipe_onnx.quantization.ranked import ranked_nodes, ranks_values
from ptpipe_onnx.quantization.result import finished
from ptpipe_onnx.quantization.rounding_effects import Remedy, describe_poor, find_remedy, is_poor
from ptpipe_onnx.quantization.tools import quantizer_tools
from ptpipe_onnx.quantization.unsupported_layers import batched_products, check_weights, grouped_transposed
from ptpipe_onnx.runtime_passes import prevent_fusions
from ptpipe_torch import Data, OnnxFile

_METHODS = {"min_max": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
_TYPES = {"int8": "QInt8", "uint8": "QUInt8"}
_DYNAMIC_OPERATORS = ["MatMul", "Gemm", "Attention", "LSTM", "Gather", "EmbedLayerNormalization"]
"""Not convolutions: ONNX Runtime has no kernel for those with int8 weights, and a slow one with uint8."""
_FAILED = "ONNX Runtime's quantizer can't quantize the file"


def quantize(config: QuantizeOnnxConfig, ctx: Context, model: OnnxFile, data: Data) -> OnnxFile:
    """Implement the stage `quant.onnx`."""
    check_inputs(config, ctx, model, data)
    float32 = in_float32(ctx, model)
    content = load_preprocessed(ctx, float32)
    if config.is_optimized:
        content = optimized_float(config, ctx, float32, data, content)
    fit_for_quantizer(ctx, content)
    excluded = nodes_to_skip(content, config.skip, ctx.kind)
    excluded = [*dict.fromkeys([*excluded, *_nodes_kept_float(config, ctx, content)])]
    check_weights(content.graph, excluded, ctx.kind)
    path = ctx.scratch / "model.onnx"
    if config.mode == "static":
        _quantize_static(config, ctx, content, data, excluded, path)
    else:
        _quantize_dynamic(config, ctx, content, excluded, path)
    if not _is_quantized(path, {tensor.name for tensor in content.graph.initializer}):
        kept = f", `skip` aside ({', '.join(config.skip)}): skip fewer" if config.skip else ": leave the stage out"
        raise StageError(f"{ctx.kind}: the file has no node that mode {config.mode} quantizes{kept}")
    _tidy(path)
    file = OnnxFile(path, model.signature, "int8" if config.mode == "static" else "int8 dynamic")
    if config.is_optimized:
        file = optimized_int8(config, ctx, float32, data, file)
    facts: dict[str, JSON] = {"mode": config.mode, "num_skipped_nodes": len(excluded)}
    facts["reduce_range"] = config.has_reduced_range
    facts |= _kernels(ctx, file)

    def remedy() -> Remedy | None:
        return _remedy(config, ctx, model, data, (content, onnx.load(path, load_external_data=False)), excluded)

    try:
        result = finished(config, ctx, model, file, data, facts)
    except ConstantOutputError as error:
        found = remedy()
        raise StageError(f"{error}. In detail: {found.describe(config.skip)}" if found else str(error)) from error
    if is_poor(result.parity):
        ranks = ranks_values(content.graph)
        _report_poor(config, ctx, result, None if ranks else remedy(), ranks=ranks)
    return result


def _report_poor(
    config: QuantizeOnnxConfig, ctx: Context, result: OnnxFile, remedy: Remedy | None, *, ranks: bool
) -> None:
    """Give a notice that outputs are poor, and what to do if that is known. `ranks`: see `describe_poor`."""
    if remedy is None:
        ctx.notice(describe_poor(result.parity, ranks=ranks))
        return
    ctx.notice(remedy.describe(config.skip))
    noise_db: dict[str, JSON] = {name: value if isfinite(value) else None for name, value in remedy.noise_db.items()}
    ctx.metric(suggested_skip=[*config.skip, *remedy.skip], sqnr_db_alone=noise_db)


def _remedy(
    config: QuantizeOnnxConfig,
    ctx: Context,
    float_file: OnnxFile,
    data: Data,
    contents: tuple[ModelProto, ModelProto],
    skipped: list[str],
) -> Remedy | None:
    """Return what to keep float, where the outputs have little to do with the float file's; None: it isn't known."""
    if config.format != "qdq" or config.mode != "static":
        return None
    try:
        with quantizer_tools(ctx, "ONNX Runtime can't run the file with single tensors rounded"):
            return find_remedy(ctx, config.compare_split, float_file, data, contents, skipped=skipped)
    except StageError as error:  # the file is what was asked for, with or without an explanation
        ctx.log(str(error))
        return None


def _nodes_kept_float(config: QuantizeOnnxConfig, ctx: Context, content: ModelProto) -> list[str]:
    """Return the names of the nodes that a file keeps float besides those of `skip`."""
    by_reason: dict[str, list[str]] = {}
    if config.per_channel and (config.mode == "dynamic" or config.format == "qoperator"):
        by_reason["no integer operator has a scale for each channel of several matrices"] = batched_products(
            content.graph
        )
    if config.mode == "static":
        by_reason["they apply attention masks"] = mask_nodes(content.graph)
        by_reason["their values grow with the size of the inputs"] = nodes_of_coordinates(content.graph)
        by_reason["integers are made of their values"] = nodes_of_integers(content.graph)
        by_reason["what they clip is read by others too"] = shared_clips(content.graph, config.format)
        if config.per_channel:
            reason = "ONNX Runtime's quantizer fails on biases of groups of transposed convolutions"
            by_reason[reason] = grouped_transposed(content.graph)
        if config.is_optimized:
            by_reason["the file ranks values (TopK)"] = ranked_nodes(content.graph)
    for reason, names in by_reason.items():
        if names:
            ctx.log(f"stay float, since {reason}: {', '.join(names)}")
    parts = float_parts(content) if config.is_optimized else []
    return [*(name for names in by_reason.values() for name in names), *parts]


def _quantize_static(
    config: QuantizeOnnxConfig, ctx: Context, content: ModelProto, data: Data, excluded: list[str], path: Path
) -> None:
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    reader = CalibrationReader(ctx, data, config.split, config.num_samples, only_batch_size(content))
    source = _saved(ctx, content)
    failed = _FAILED
    if config.format == "qoperator" and any(has_graphs(node) for node in content.graph.node):
        failed += " to `format: qoperator`, since it has graphs inside (of If or Loop): leave that to qdq"
    with closing(reader), quantizer_tools(ctx, failed):
        quantize_static(
            str(source),
            str(path),
            reader,
            quant_format=QuantFormat.QDQ if config.format == "qdq" else QuantFormat.QOperator,
            per_channel=config.per_channel,
            reduce_range=config.has_reduced_range,
            activation_type=QuantType[_TYPES[config.activation_type]],
            weight_type=QuantType[_TYPES[config.weight_type]],
            nodes_to_exclude=excluded,
            calibrate_method=CalibrationMethod[_METHODS[config.calibrate_method]],
            extra_options=_calibration_options(config),
        )
    source.unlink()


def _calibration_options(config: QuantizeOnnxConfig) -> dict[str, Any]:
    # Its percentiles would be of absolute values: half of the integers, for the outputs of a ReLU.
    return {"CalibStridedMinMax": 1, "CalibPercentile": config.percentile, "CalibTensorRangeSymmetric": False}


def _quantize_dynamic(
    config: QuantizeOnnxConfig, ctx: Context, content: ModelProto, excluded: list[str], path: Path
) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source = _saved(ctx, content)
    with quantizer_tools(ctx, _FAILED):
        quantize_dynamic(
            str(source),
            str(path),
            op_types_to_quantize=_DYNAMIC_OPERATORS,
            per_channel=config.per_channel,
            reduce_range=config.has_reduced_range,
            weight_type=QuantType[_TYPES[config.weight_type]],
            nodes_to_exclude=excluded,
        )
    source.unlink()


def _saved(ctx: Context, content: ModelProto) -> Path:
    path = ctx.scratch / "preprocessed.onnx"
    onnx.save_model(content, path)
    return path


def _is_quantized(path: Path, float_tensors: Collection[str]) -> bool:
    """Return whether a file has integer weights that are not among the float file's tensors."""
    graph = onnx.load(path, load_external_data=False).graph
    added = [tensor for tensor in graph.initializer if tensor.name not in float_tensors]
    return any(tensor.data_type in (TensorProto.INT8, TensorProto.UINT8) and len(tensor.dims) > 1 for tensor in added)


def _tidy(path: Path) -> None:
    """Keep ONNX Runtime from quantizing the weights of skipped layers after all, when it loads the file.

    Its quantizer (1.32) has sorted the nodes as if graphs inside them, as of a second If, read nothing.
    """
    content = ir.load(path)
    content.graph.sort()
    prevent_fusions(content.graph)
    ir.save(content, path)


def _kernels(ctx: Context, file: OnnxFile) -> dict[str, JSON]:
    with quantizer_tools(ctx, "ONNX Runtime can't run what its quantizer wrote"):
        kernels = Kernels.of(file.path, ctx.scratch)
    return {"num_int8_nodes": kernels.integer.total(), "num_float_nodes": kernels.float.total()}
