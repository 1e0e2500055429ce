"""Finish a quantized file: metadata, checks, figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import helper

from ptpipe import JSON, Context
from ptpipe_onnx.metadata import origin_of
from ptpipe_onnx.quantization.agreement import agreement
from ptpipe_onnx.quantization.config import QuantizerConfig
from ptpipe_onnx.quantization.nodes import has_graphs
from ptpipe_onnx.quantization.tools import quantizer_tools
from ptpipe_torch import Data, OnnxFile
from ptpipe_torch.ort import ort

_OF_THE_FLOAT_FILE = {"precision", "reduce_range", "exact_integer_sums_on_x86"}
"""Metadata that would be untrue."""


def finished(
    config: QuantizerConfig, ctx: Context, float_file: OnnxFile, file: OnnxFile, data: Data, facts: Mapping[str, JSON]
) -> OnnxFile:
    """Return the file with its metadata, after comparing it with the float one. `facts`: further metrics.

    Raises StageError where it is no valid ONNX file, doesn't run, or is of no use.
    """
    _rewrite(float_file.path, file, origin_of(ctx, config))
    with quantizer_tools(ctx, "ONNX Runtime's quantizer wrote an invalid file"):
        onnx.checker.check_model(str(file.path), full_check=True)
    figures = agreement(config, ctx, float_file, file, data)
    size_bytes = {"size_bytes": file.size_bytes, "float_size_bytes": float_file.size_bytes}
    ctx.metric(**size_bytes, **facts, **figures)
    return OnnxFile(file.path, file.signature, file.precision, figures)


def _rewrite(source: Path, file: OnnxFile, origin: Mapping[str, str]) -> None:
    """Copy what the float file says of itself, add how this one was made, and declare no operators that it has not."""
    stored = onnx.load(source, load_external_data=False).metadata_props
    metadata = {entry.key: entry.value for entry in stored if entry.key not in _OF_THE_FLOAT_FILE}
    content = onnx.load(file.path, load_external_data=False)
    del content.metadata_props[:]
    made_by = {"precision": file.precision, "quantizer": f"onnxruntime {ort.__version__}"}
    helper.set_model_props(content, {**metadata, **made_by, **origin})
    if not any(has_graphs(node) for node in content.graph.node):  # ONNX Runtime declares all that it knows
        used = {node.domain for node in content.graph.node} | {""}
        kept = [(own.domain, own.version) for own in content.opset_import if own.domain in used]
        del content.opset_import[:]
        content.opset_import.extend(helper.make_opsetid(*own) for own in kept)
    onnx.save_model(content, file.path)
