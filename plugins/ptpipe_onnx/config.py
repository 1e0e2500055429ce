"""Options of export.onnx."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ptpipe import StageConfig


class ExportConfig(StageConfig):
    """Options of `export.onnx`."""

    opset: int = Field(
        18, ge=18, le=23, description="ONNX opset version; torch exports opset 18 and converts to later ones"
    )
    split: Literal["test", "val", "calibration", "train"] = Field(
        "test", description="split of the samples to compare the file with the torch model on (labels are not read)"
    )
    num_samples: int = Field(512, ge=1, description="maximum number of samples to compare on")
