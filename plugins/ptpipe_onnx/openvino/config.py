"""Options of export.openvino."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ptpipe import StageConfig


class OpenVinoConfig(StageConfig):
    """Options of `export.openvino`."""

    split: Literal["test", "val", "calibration", "train"] = Field(
        "test", description="split of the samples to compare the model with the ONNX file on (labels are not read)"
    )
    num_samples: int = Field(
        512,
        ge=1,
        description="maximum number of samples to compare on; fewer where outputs are large, such as pictures",
    )
