"""Options of export.executorch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ptpipe import StageConfig


class ExecuTorchConfig(StageConfig):
    """Options of `export.executorch`."""

    max_batch_size: int = Field(
        64,
        ge=1,
        description="largest batch that the file takes, for which it reserves memory; 1: a file of one sample. Larger "
        "batches are predicted in pieces",
    )
    max_length: int = Field(
        512, ge=2, description="largest size of every other axis that may have any, such as the length of texts"
    )
    split: Literal["test", "val", "calibration", "train"] = Field(
        "test", description="split of the samples to compare the file with the torch model on (labels are not read)"
    )
    num_samples: int = Field(
        512,
        ge=1,
        description="maximum number of samples to compare on; fewer where outputs are large, such as pictures",
    )
