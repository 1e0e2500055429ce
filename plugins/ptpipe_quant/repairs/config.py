"""Options of the stages that repair a network for quantization."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ptpipe import JSON, StageConfig, host


class EqualizeConfig(StageConfig):
    """Options of `quant.equalize`."""

    absorb_bias: bool = Field(
        False,
        description="also move the part of a channel that ReLU almost never cuts off (mean less three standard "
        "deviations, by its batch norm) into the bias of the next layer, where that layer does not pad. Narrows the "
        "ranges of activations, and changes the outputs where a value is below that",
    )
    skip: tuple[str, ...] = Field(
        (), description="layers to leave as they are, by name (`features.0`) or type (`Conv2d`); they are not traced"
    )


class CalibrationDataConfig(StageConfig):
    """Options of the stages that run calibration data."""

    split: Literal["calibration", "train", "val"] = Field("calibration", description="split to take samples from")

    def resolved_options(self) -> dict[str, JSON]:
        """Return the number of threads here: the last bits of what the network computes depend on it."""
        return {"num_threads": host.num_threads()}


class SmoothConfig(CalibrationDataConfig):
    """Options of `quant.smooth`."""

    alpha: float = Field(
        0.5,
        ge=0,
        le=1,
        description="how much of the differences between channels moves from activations to weights: 0 evens out the "
        "weights alone, 1 the activations alone",
    )
    num_samples: int = Field(512, ge=2, description="maximum number of samples")
    skip: tuple[str, ...] = Field(
        (), description="layers to leave as they are, by name (`head`) or type (`Linear`); they are not traced"
    )


class BiasCorrectConfig(CalibrationDataConfig):
    """Options of `quant.bias_correct`."""

    num_samples: int = Field(
        256, ge=2, description="maximum number of samples; the activations of all are in memory at the same time"
    )


class AdaroundConfig(CalibrationDataConfig):
    """Options of `quant.adaround`."""

    num_samples: int = Field(
        256, ge=2, description="maximum number of samples; the activations of all are in memory at the same time"
    )
    num_iterations: int = Field(1000, gt=0, description="optimizer steps of each layer")
    batch_size: int = Field(32, gt=0, description="samples of a step")
