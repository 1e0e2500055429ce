"""Implementation of export.openvino.

How far the outputs may differ from ONNX Runtime's: those of a float file by as much as those of torch (see `parity`),
since here too only the order of additions differs. An int8 file's sums are the same integers, whose roundings may
differ in every layer; the worst case is that all are independent, and the root mean square of the difference sqrt(2)
times quantization's own error, which `export.onnx` has recorded. Of other int8 files that error is unknown: their
difference is recorded, and gates decide.

Shape legend: N samples, K columns of an output.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ptpipe import JSON, Context, StageError
from ptpipe_onnx.added_channels import drop_depthwise_padding
from ptpipe_onnx.barriers import drop_views
from ptpipe_onnx.graph import remove_unused, write
from ptpipe_onnx.hardswish_pass import use_float_hardswish
from ptpipe_onnx.layer_norms import write_channel_norms_out
from ptpipe_onnx.linear_pass import use_products
from ptpipe_onnx.openvino.config import OpenVinoConfig
from ptpipe_onnx.openvino.model import GRAPH, OpenVinoModel, errors_in_one_line, import_openvino
from ptpipe_onnx.openvino.recurrent import use_float_weights
from ptpipe_onnx.openvino.resizing import check_sizes, use_pillows
from ptpipe_onnx.probes import rankings_named
from ptpipe_onnx.quantization.agreement import PairedRows, paired_rows
from ptpipe_onnx.upsampling import use_resizing
from ptpipe_onnx.volumes import write_as_volumes
from ptpipe_torch import Data, OnnxFile
from ptpipe_torch.parity.comparison import figures_of
from ptpipe_torch.parity.parity import FLOAT_TOLERANCE


def convert(config: OpenVinoConfig, ctx: Context, file: OnnxFile, data: Data) -> OpenVinoModel:
    """Implement the stage `export.openvino`."""
    data.info.check_fit("the file", file.signature)
    if not len(data.splits[config.split]):
        raise StageError(f"{ctx.kind}: the data has no samples in {config.split}: choose another `split`")
    runtime = import_openvino()
    ctx.progress(1, None, "step", doing="converting the file")
    with errors_in_one_line(f"can't convert {file.path.name}"):
        source = _source(ctx, file)
        content = runtime.Core().read_model(str(source))
        resizes = use_pillows(runtime, content)
        runtime.save_model(content, str(ctx.scratch / GRAPH), compress_to_fp16=False)
    if source != file.path:
        source.unlink()
    model = OpenVinoModel(ctx.scratch, file.signature, file.precision, file.input_form)
    ctx.metric(size_bytes=model.size_bytes)
    _report_operators(ctx, model)
    outputs = paired_rows(ctx, (file.with_exact_sums(), model), data, config.split, config.num_samples)
    ctx.metric(**figures_of(outputs))
    for name, pair in outputs.items():
        prefix = "" if len(outputs) == 1 else f"{name}."
        with rankings_named(file.path):
            _check(ctx, file, name, pair, file.parity.get(f"{prefix}rms_quantization_error"))
    if resizes:
        check_sizes(ctx, file, model, data, config.split)
    return model


def _source(ctx: Context, file: OnnxFile) -> Path:
    """Return a file without what `export.onnx` writes for ONNX Runtime, and slows OpenVINO down."""
    model = ir.load(file.path)
    undone = [write_channel_norms_out(model.graph), use_float_weights(model.graph)]
    if file.precision.startswith("int8"):
        undoing = (
            use_products,
            drop_views,
            drop_depthwise_padding,
            use_float_hardswish,
            write_as_volumes,
            use_resizing,
        )
        undone += [undo(model.graph) for undo in undoing]
    if not any(undone):
        return file.path
    remove_unused(model)
    path = ctx.scratch / "source.onnx"
    write(model, path)
    return path


def _report_operators(ctx: Context, model: OpenVinoModel) -> None:
    counts = model.operators()
    for precision, is_int8 in (("int8", True), ("float", False)):
        own = Counter({type_: count for (type_, in_int8), count in counts.items() if in_int8 is is_int8})
        ctx.metric(**{f"num_{precision}_operators": own.total()})
        if model.precision != "float32":
            listed = ", ".join(f"{count} {type_}" for type_, count in sorted(own.items()))
            ctx.log(f"OpenVINO computes in {precision}: {listed or 'nothing'}")


def _check(ctx: Context, file: OnnxFile, name: str, pair: PairedRows, error: JSON) -> None:
    """Raise StageError if an output differs by more than its tolerance. `error`: quantization's, if it is known."""
    expected_NK, found_NK = pair.first_NK, pair.second_NK
    if not np.isfinite(found_NK).all():
        raise StageError(f"{ctx.kind}: OpenVINO's {name} has values that are not finite")
    difference_NK = np.abs(found_NK - expected_NK).astype(np.float64)
    rounding = FLOAT_TOLERANCE * float(np.abs(expected_NK).max())
    if "float" in file.precision:
        measure, found, allowed = "maximum", float(difference_NK.max()), rounding
    elif isinstance(error, float):
        rms = math.sqrt(float(np.square(difference_NK).mean()))
        measure, found, allowed = "rms", rms, math.sqrt(2) * error + rounding
    else:
        ctx.log(f"{name}: its difference from ONNX Runtime's is recorded, not judged: quantization's error is unknown")
        return
    if found > allowed:
        raise StageError(
            f"{ctx.kind}: {name} differs from ONNX Runtime's by {found:.4g} ({measure} over {len(found_NK)} rows), "
            f"where {allowed:.4g} is allowed"
        )
