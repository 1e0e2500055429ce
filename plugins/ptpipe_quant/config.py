"""Options of the quant stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from ptpipe import JSON, StageConfig, host
from ptpipe_quant.cpu import Backend, default_backend

Granularity: TypeAlias = Literal["per_channel", "per_tensor"]
Observer: TypeAlias = Literal["mse", "min_max", "moving_average", "percentile", "entropy"]


class BackendConfig(StageConfig):
    """Options of every stage that chooses how layers become int8."""

    backend: Literal["auto", Backend] = Field(
        "auto",
        description="quantized engine of torch: fbgemm, x86 and onednn for servers and PCs, qnnpack for ARM and "
        "phones. auto: fbgemm on an x86 processor, qnnpack on others",
    )
    weights: Granularity = Field(
        "per_channel",
        description="granularity of weight scales: one per output channel, or one per tensor, for runtimes that have "
        "no other kernels. In static quantization and QAT for fbgemm and x86, weights of depthwise 3x3 and 5x5 "
        "convolutions have 7 bits: sums of their products overflow with 8",
    )
    reduce_range: Literal["auto"] | bool = Field(
        "auto",
        description="quantize weights to 7 bits, because sums of 8-bit products overflow on x86 processors without "
        "VNNI. auto: only if this processor requires it for the backend; set true if the model will run on older ones",
    )
    skip: tuple[str, ...] = Field(
        (),
        description="layers to keep float, by name (`classifier`, `layer4.*`) or type (`Linear`, `BasicBlock`); a "
        "weight that a function takes, by the parameter's name",
    )

    @property
    def engine(self) -> Backend:
        """The quantized engine that `backend` stands for on this machine."""
        return default_backend() if self.backend == "auto" else self.backend


class DynamicConfig(BackendConfig):
    """Options of `quant.dynamic`."""

    convolutions: Literal["store_int8", "float"] = Field(
        "store_int8",
        description="store_int8: round convolution weights to int8 and store them as int8, a quarter of the size; "
        "they are dequantized when the model is loaded. float: leave them unchanged",
    )


class TracedConfig(BackendConfig):
    """Options of the stages that trace the network."""

    route: Literal["fx", "export"] = Field(
        "fx",
        description="how the network is traced. fx: its code runs once with proxies in the place of tensors; export: "
        "torch.export runs it with tensors, also through what proxies can't follow (networks of transformers), for "
        "some seconds longer at every stage. What it does in training alone is not in the graph, but dropout is",
    )


def _current_observer(observer: object) -> object:
    if observer == "histogram":
        raise ValueError("histogram was renamed to mse")
    return observer


class LayerConfig(StageConfig):
    """Options of some layers; null: as all others."""

    weights: Granularity | None = Field(None, description="granularity of weight scales")

    @model_validator(mode="after")
    def _has_an_option(self) -> Self:
        if not self.own_options():
            raise ValueError(f"give {' or '.join(type(self).model_fields)}")
        return self

    def own_options(self) -> dict[str, JSON]:
        """Return the options that are not null."""
        return {name: value for name, value in self.keyed_options().items() if value is not None}


class CalibratedLayerConfig(LayerConfig):
    """Options of some layers of `quant.prepare`; null: as all others."""

    observer: Annotated[Observer | None, BeforeValidator(_current_observer)] = Field(
        None, description="how ranges of their outputs are chosen, and of inputs that no int8 layer has computed"
    )
    percentile: float | None = Field(None, gt=50, le=100, description="of observer percentile")


def own_options_of(layers: Mapping[str, LayerConfig]) -> list[JSON]:
    """Return pairs of a pattern and its options, in order."""
    return [[pattern, layer.own_options()] for pattern, layer in layers.items()]


class PrepareConfig(TracedConfig):
    """Options of `quant.prepare`."""

    observer: Annotated[Observer, BeforeValidator(_current_observer)] = Field(
        "mse",
        description="how ranges are chosen. min_max: the minimum and maximum of all values; moving_average: a moving "
        "average of each batch's; by exact counts of all values, mse: the range of least squared quantization error, "
        "percentile: without a fraction of values at each end, entropy: of least divergence from the float values. "
        "What the network returns has min_max in any case, but for `layers`",
    )
    percentile: float | None = Field(
        None,
        gt=50,
        le=100,
        description="of observer percentile: the range's upper end, as a percentile of the values other than zero; "
        "the lower end is its counterpart, 0.01 for 99.99. null: 99.99",
    )
    layers: dict[str, CalibratedLayerConfig] = Field(
        {},
        description="options of single layers, by name or type as in `skip`: `{head: {observer: percentile}}`; the "
        "first pattern that matches a layer, or a module around it, counts",
    )

    @model_validator(mode="after")
    def _has_percentile_observer(self) -> Self:
        if self.percentile is not None and "percentile" not in self.observers():
            raise ValueError("percentile has an effect with observer: percentile alone")
        for pattern, layer in self.layers.items():
            if layer.percentile is not None and (layer.observer or self.observer) != "percentile":
                raise ValueError(f"layers: percentile of {pattern!r} has an effect with observer: percentile alone")
        return self

    def observers(self) -> tuple[str, ...]:
        """Return the observers of layers without options of their own."""
        return (self.observer,)

    def keyed_options(self) -> dict[str, JSON]:
        """Return what enters the key: with `layers` as pairs, because their order counts."""
        return super().keyed_options() | {"layers": own_options_of(self.layers)}


class PrepareQatConfig(TracedConfig):
    """Options of `quant.prepare_qat`."""

    batch_norm: Literal["train", "fold"] = Field(
        "train",
        description="train: normalize by batch statistics during training, by frozen running statistics from freeze_at "
        "on; fold: fold batch norms permanently into the preceding layers, and parallel branches into one convolution "
        "(RepVGG, MobileOne), as in int8: steps are faster, about a tenth without branches, but deep networks need a "
        "learning rate of at most a tenth of the float training's",
    )
    freeze_at: float = Field(
        0.75,
        ge=0,
        le=1,
        description="fraction of the training after which observed activation ranges and batch norm statistics are "
        "frozen; what learned_step_size learns is trained to the end, as weights are",
    )
    learned_step_size: bool = Field(
        False,
        description="train the ranges of weights and activations, and with them the steps of int8, by gradient "
        "(LSQ+): each end of an activation's range, and the range of each weight scale, is a learned part of the "
        "observed one, 1/8 or more",
    )
    layers: dict[str, LayerConfig] = Field(
        {},
        description="options of single layers, by name or type as in `skip`: `{head: {weights: per_tensor}}`; the "
        "first pattern that matches a layer, or a module around it, counts",
    )

    def keyed_options(self) -> dict[str, JSON]:
        """Return what enters the key: with `layers` as pairs, because their order counts."""
        return super().keyed_options() | {"layers": own_options_of(self.layers)}


class CalibrateConfig(StageConfig):
    """Options of `quant.calibrate`."""

    split: Literal["calibration", "train", "val"] = Field("calibration", description="split to calibrate on")
    num_samples: int | None = Field(2000, ge=2, description="maximum number of samples; null: all")
    workers: int = Field(
        1,
        ge=1,
        le=4096,
        description="number of processes that split the samples batch by batch; the result equals that of one "
        "process. Meant for several machines: on one machine, the threads of a single process are as fast",
    )

    def resolved_options(self) -> dict[str, JSON]:
        """Return the number of threads here: the last bits of what the network computes depend on it."""
        return {"num_threads": host.num_threads()}


class ConvertConfig(StageConfig):
    """Options of `quant.convert`: none, because backend and ranges come with the model."""
