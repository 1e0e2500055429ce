"""ONNX export: export.onnx. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ptpipe import Check, Context, Stage, hookimpl, stage
from ptpipe_onnx.config import ExportConfig
from ptpipe_torch import Data, Model, OnnxFile


def _unsupported_opset(config: ExportConfig) -> Iterable[str]:
    from ptpipe_onnx.checks import unsupported_opset

    message = unsupported_opset(config.opset, config.ir_version)
    return [message] if message else []


@stage("export.onnx", packages=("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime"), preflight=_unsupported_opset)
def export_onnx(config: ExportConfig, ctx: Context, model: Model, data: Data) -> OnnxFile:
    """Export a float or int8 model to one ONNX file, and compare it with the torch model on real samples.

    Input `images` (N, C, H, W), output `logits` (N, K), for any N. int8 weights are stored as int8. The file's
    metadata has mean, std, class names and the origin of the model. The stage fails, with figures, if the file's
    logits differ from torch's by more than rounding explains. It reports which layers ONNX Runtime computes in
    integers, and which can saturate on x86 processors without VNNI. Beside the file, `model.vectors.npz` has samples
    and their outputs, for `ptpipe check` on the target.
    """
    from ptpipe_onnx.export import export_file

    return export_file(config, ctx, model, data)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Return the kinds of this plugin."""
    return [export_onnx]


@hookimpl
def ptpipe_doctor() -> Iterable[Check]:
    """Check the ONNX libraries, and run a small file."""
    from ptpipe_onnx.doctor import run_checks

    return run_checks()
