"""Options of export.onnx."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ptpipe import StageConfig
from ptpipe_torch import InputForm


class ExportConfig(StageConfig):
    """Options of `export.onnx`."""

    opset: int = Field(
        18, ge=18, le=23, description="ONNX opset version; torch exports opset 18 and converts to later ones"
    )
    ir_version: int = Field(
        10, ge=8, le=13, description="version of the file format (IR); ONNX Runtime 1.18 and later read 10"
    )
    preprocessing: Literal["none", "nhwc", "nchw"] = Field(
        "none",
        description="what the file takes: `none`, normalized values; else raw ones, which it normalizes itself: images "
        "as uint8, channels last (`nhwc`) or first (`nchw`), and a table's numbers as float64",
    )
    resize: bool = Field(
        False,
        description="with `nhwc` or `nchw`: take images of any height and width, which the file resizes and crops as "
        "the data set did",
    )
    postprocessing: bool = Field(
        False,
        description="add the outputs `probabilities` and, of a classification, `classes` (int64) to the model's own",
    )
    split: Literal["test", "val", "calibration", "train"] = Field(
        "test", description="split of the samples to compare the file with the torch model on (labels are not read)"
    )
    num_samples: int = Field(
        512,
        ge=1,
        description="maximum number of samples to compare on; fewer where outputs are large, such as pictures",
    )
    num_test_vectors: int = Field(
        8,
        ge=0,
        le=1024,
        description="number of these samples that are stored beside the file with their outputs, for `ptpipe check`; "
        "everyone who gets the file gets them too: 0 stores none",
    )

    @model_validator(mode="after")
    def _takes_images(self) -> Self:
        if self.resize and self.preprocessing == "none":
            raise ValueError("resize: the file takes normalized values; set preprocessing to nhwc or nchw")
        return self

    @property
    def input_form(self) -> InputForm:
        """What the file takes."""
        return "normalized" if self.preprocessing == "none" else self.preprocessing

    @property
    def has_interface(self) -> bool:
        """Whether the file has more inside than the network."""
        return self.postprocessing or self.preprocessing != "none"
