"""From torch to ONNX: export.onnx. Importing this imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from ptpipe import Check, Context, Stage, StageConfig, hookimpl, stage
from ptpipe_torch import Data, Model, OnnxFile


class ExportConfig(StageConfig):
    """Options of `export.onnx`."""

    opset: int = Field(
        18, ge=18, le=23, description="version of ONNX's operators; torch's exporter speaks 18 and converts to others"
    )
    split: Literal["test", "val", "calibration", "train"] = Field(
        "test", description="samples to compare the file with the torch model on (no labels are looked at)"
    )
    num_samples: int = Field(512, ge=1, description="how many samples to compare on, at most")


def _missing(config: ExportConfig) -> Iterable[str]:
    from ptpipe_onnx.checks import missing

    return missing(config.opset)


@stage("export.onnx", packages=("torch", "onnx", "onnxscript", "onnxruntime"), preflight=_missing)
def export(config: ExportConfig, ctx: Context, model: Model, data: Data) -> OnnxFile:
    """Write a float or int8 model as one ONNX file, and compare it with the torch model on real samples.

    Input `images` (N, C, H, W), output `logits` (N, K), any N. int8 weights are stored as int8. Mean, std, class
    names and where the model came from are in the file's metadata. The stage fails, with figures, where the file's
    logits differ from torch's by more than rounding explains.
    """
    from ptpipe_onnx.export_file import export_file

    return export_file(config, ctx, model, data)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Offer the kinds of this plugin."""
    return [export]


@hookimpl
def ptpipe_doctor() -> Iterable[Check]:
    """Look at the ONNX libraries, and run a small file."""
    from ptpipe_onnx.diagnosis import findings

    return findings()
