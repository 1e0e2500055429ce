"""Options of quant.onnx and quant.weight_only."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ptpipe import StageConfig
from ptpipe_torch.model.exact_session import may_saturate

_STATIC_OPTIONS = ("format", "activation_type", "calibrate_method", "percentile", "split", "num_samples")
"""That dynamic quantization has no use for."""


class QuantizerConfig(StageConfig):
    """Options of every stage that quantizes an ONNX file."""

    skip: tuple[str, ...] = Field(
        (),
        description="nodes to keep float, by the name of their layer (`head.0`, `layers.1.*`), by their own "
        "(`node_Conv_38`) or by operator (`Softmax`)",
    )
    compare_split: Literal["test", "val", "calibration", "train"] = Field(
        "test", description="split of the samples to compare the file with the float one on (labels are not read)"
    )
    compare_samples: int = Field(
        512,
        ge=2,
        description="maximum number of samples to compare on; fewer where outputs are large, such as pictures",
    )


class QuantizeOnnxConfig(QuantizerConfig):
    """Options of `quant.onnx`."""

    mode: Literal["static", "dynamic"] = Field(
        "static",
        description="static: weights and activations, with ranges from calibration; dynamic: weights, and activations "
        "at run time, of matrix products and LSTMs: convolutions stay float",
    )
    format: Literal["qdq", "qoperator"] = Field(
        "qdq",
        description="qdq: QuantizeLinear and DequantizeLinear around float operators, which runtimes fuse; qoperator: "
        "integer operators such as QLinearConv. ONNX Runtime recommends qdq",
    )
    per_channel: bool = Field(True, description="a scale for each output channel of a weight, instead of one for all")
    activation_type: Literal["uint8", "int8"] = Field(
        "uint8", description="uint8 for x86 processors; int8, which ARM processors prefer, needs int8 weights"
    )
    weight_type: Literal["int8", "uint8"] = Field("int8", description="type of the weights")
    reduce_range: Literal["auto"] | bool = Field(
        "auto",
        description="quantize weights to 7 bits, because sums of 8-bit products overflow on x86 processors without "
        "VNNI. auto: only if this processor requires it for int8 weights; set true if the file will run on older ones",
    )
    calibrate_method: Literal["min_max", "entropy", "percentile"] = Field(
        "min_max",
        description="how ranges are computed: minimum and maximum of all values; least divergence from their "
        "histogram; or the range that holds `percentile` of them",
    )
    percentile: float = Field(99.999, gt=50, le=100, description="percent of the values that a range holds")
    optimize: bool = Field(
        True,
        description="static qdq: write HardSwish, GELU, layer norms and linear layers in the forms that ONNX Runtime "
        "has its quickest kernels for, which also rounds less; false: the file as its quantizer makes it",
    )
    split: Literal["calibration", "train", "val"] = Field("calibration", description="split to calibrate on")
    num_samples: int | None = Field(2000, ge=2, description="maximum number of samples to calibrate on; null: all")

    @property
    def is_optimized(self) -> bool:
        """Whether the file is rewritten before and behind the quantizer."""
        return self.optimize and (self.mode, self.format) == ("static", "qdq")

    @property
    def has_reduced_range(self) -> bool:
        """Whether weights are to have 7 bits. ONNX Runtime's sums of products with uint8 weights don't overflow."""
        if self.reduce_range == "auto":
            return self.weight_type == "int8" and may_saturate()
        return self.reduce_range

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        fields = type(self).model_fields
        changed = [name for name in _STATIC_OPTIONS if getattr(self, name) != fields[name].default]
        if self.mode == "dynamic" and changed:
            raise ValueError(f"mode dynamic doesn't calibrate, and has no use for {', '.join(changed)}")
        if self.calibrate_method != "percentile" and "percentile" in changed:
            raise ValueError("percentile is an option of calibrate_method percentile")
        if self.mode == "static" and (self.activation_type, self.weight_type) == ("int8", "uint8"):
            raise ValueError("activation_type int8 needs weight_type int8: ONNX Runtime has no kernels for both")
        return self


class WeightOnlyConfig(QuantizerConfig):
    """Options of `quant.weight_only`."""

    bits: Literal[4, 8] = Field(4, description="bits of a weight")
    block_size: Literal[16, 32, 64, 128, 256] = Field(
        32, description="number of a row's weights that have a scale of their own; fewer are more exact and larger"
    )
    symmetric: bool = Field(
        False, description="without zero points: smaller by as many bits as a weight for each block, less exact"
    )
    accuracy_level: Literal[0, 1, 4] = Field(
        0,
        description="precision of activations in the products, an attribute of MatMulNBits: 0 leaves it to the runtime "
        "(float32 on CPUs), 1 is float32, 4 rounds them to int8, which is faster",
    )
