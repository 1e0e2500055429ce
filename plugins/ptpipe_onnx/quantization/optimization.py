"""The passes around ONNX Runtime's quantizer, each with a check that it changed nothing that matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import ModelProto

from ptpipe import Context, StageError
from ptpipe_onnx.quantization.agreement import PairedRows, paired_rows
from ptpipe_onnx.quantization.config import QuantizeOnnxConfig
from ptpipe_onnx.quantization.float_passes import write_whole_operators
from ptpipe_onnx.quantization.integer_passes import write_with_quicker_kernels
from ptpipe_onnx.quantization.nodes import name_nodes
from ptpipe_onnx.quantization.tools import quantizer_tools
from ptpipe_torch import Data, OnnxFile
from ptpipe_torch.parity.parity import FLOAT_TOLERANCE

_NUM_SAMPLES = 16


def optimized_float(
    config: QuantizeOnnxConfig, ctx: Context, float_file: OnnxFile, data: Data, content: ModelProto
) -> ModelProto:
    """Return the content of a float file after `write_whole_operators`; as it was where that is impossible."""
    path = ctx.scratch / "whole_operators.onnx"
    result = ModelProto()

    def write() -> OnnxFile:
        result.CopyFrom(write_whole_operators(content))
        name_nodes(result.graph)
        onnx.save_model(result, path)
        return OnnxFile(path, float_file.signature, float_file.precision)

    def tolerance(name: str, pair: PairedRows) -> float:
        return FLOAT_TOLERANCE * float(np.abs(pair.first_NK).max())

    is_done = _is_kept(config, ctx, data, float_file, write, tolerance)
    path.unlink(missing_ok=True)
    return result if is_done else content


def optimized_int8(
    config: QuantizeOnnxConfig, ctx: Context, float_file: OnnxFile, data: Data, file: OnnxFile
) -> OnnxFile:
    """Return what `write_with_quicker_kernels` makes of a quantized file; the file where that is impossible.

    Outputs may differ as those of `ptpipe_torch.parity`: each rounding may fall otherwise.
    """
    path = ctx.scratch / "quicker.onnx"
    quicker = OnnxFile(path, file.signature, file.precision)
    errors = _pairs(config, ctx, data, (float_file, file))

    def write() -> OnnxFile:
        write_with_quicker_kernels(file.path, path)
        return quicker

    def tolerance(name: str, pair: PairedRows) -> float:
        own = errors[name]
        return math.sqrt(2) * _rms(own) + FLOAT_TOLERANCE * float(np.abs(own.first_NK).max())

    if _is_kept(config, ctx, data, file, write, tolerance):
        return quicker
    path.unlink(missing_ok=True)
    return file


def _is_kept(
    config: QuantizeOnnxConfig,
    ctx: Context,
    data: Data,
    before: OnnxFile,
    write: Callable[[], OnnxFile],
    tolerance: Callable[[str, PairedRows], float],
) -> bool:
    """Return whether a file can be rewritten, and its outputs differ by no more than the tolerance, root mean square.

    Files come from anywhere: where it can't, they stay as they are, and the log says why.
    """
    try:
        with quantizer_tools(ctx, "the file can't be rewritten"):
            pairs = _pairs(config, ctx, data, (before, write()))
    except StageError as error:
        ctx.log(f"optimize: {error}; it stays as it is")
        return False
    for name, pair in pairs.items():
        if not _rms(pair) <= tolerance(name, pair):
            ctx.notice(
                f"optimize would change {name} by {_rms(pair):.3g}, and roundings explain {tolerance(name, pair):.3g}: "
                "the file stays as the quantizer writes it"
            )
            return False
    return True


def _pairs(
    config: QuantizeOnnxConfig, ctx: Context, data: Data, files: tuple[OnnxFile, OnnxFile]
) -> Mapping[str, PairedRows]:
    return paired_rows(ctx, files, data, config.compare_split, _NUM_SAMPLES, is_reported=False)


def _rms(pair: PairedRows) -> float:
    return float(np.sqrt(np.square(pair.second_NK - pair.first_NK, dtype=np.float64).mean()))
