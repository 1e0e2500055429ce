"""From float to int8: quant.dynamic, quant.prepare, quant.calibrate, quant.prepare_qat, quant.convert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from pydantic import Field

from ptpipe import JSON, Check, Context, Stage, StageConfig, hookimpl, stage
from ptpipe_quant.cpu import Backend, wants_reduced_range
from ptpipe_torch import Data, Model, Ranges

if TYPE_CHECKING:
    from ptpipe import Plan, Problem

Weights: TypeAlias = Literal["auto", "per_channel", "per_tensor"]


class BackendConfig(StageConfig):
    """Options of every stage that decides on int8."""

    backend: Backend = Field(
        "fbgemm",
        description="torch's int8 engine: fbgemm, x86 and onednn for servers and PCs, qnnpack for ARM and phones",
    )
    weights: Weights = Field(
        "auto",
        description="one scale for each output channel's weights or one for all; auto: per_tensor on qnnpack, else "
        "per_channel",
    )
    skip: tuple[str, ...] = Field(
        (), description="layers to leave float, by name (`classifier`, `layer4.*`) or type (`Linear`, `BasicBlock`)"
    )


class ActivationConfig(BackendConfig):
    """Options of the stages that decide on the integers of activations."""

    reduce_range: Literal["auto"] | bool = Field(
        "auto",
        description="keep activations to 7 bits, where 8 make sums overflow: x86 processors without VNNI. auto: as "
        "this processor needs it; set true if the model will run on older ones",
    )


class DynamicConfig(ActivationConfig):
    """Options of `quant.dynamic`."""

    convolutions: Literal["store_int8", "float"] = Field(
        "store_int8",
        description="store_int8: round convolution weights to int8 and store them so, a quarter of the size; they are "
        "float again when the model runs. float: leave them as they are",
    )


class PrepareConfig(ActivationConfig):
    """Options of `quant.prepare`."""

    observer: Literal["histogram", "min_max", "moving_average"] = Field(
        "histogram",
        description="how a range follows from what is seen: least rounding error over a histogram, all values, or a "
        "moving average of each batch's extremes",
    )


class PrepareQatConfig(ActivationConfig):
    """Options of `quant.prepare_qat`."""

    batch_norm: Literal["fold", "train"] = Field(
        "fold",
        description="fold: into the layer before it, for good, which is what int8 does and trains fastest; train: "
        "batch statistics while training, frozen from freeze_at on",
    )
    freeze_at: float = Field(
        0.75, ge=0, le=1, description="share of the training from which on ranges and batch norm statistics stay fixed"
    )


class CalibrateConfig(StageConfig):
    """Options of `quant.calibrate`."""

    split: Literal["calibration", "train", "val"] = Field("calibration", description="the samples to show")
    num_samples: int | None = Field(2000, gt=0, description="how many of them, at most; null: all")
    workers: int = Field(
        1,
        ge=1,
        le=4096,
        description="processes that share the samples, batch by batch; the result is that of one process. For several "
        "machines: on one, the threads of a single process are as quick",
    )


class ConvertConfig(StageConfig):
    """Options of `quant.convert`; it has none: backend and ranges are the model's."""


class Calibration(NamedTuple):
    """Outputs of `quant.calibrate`."""

    model: Model
    ranges: Ranges


def _processor(config: ActivationConfig) -> JSON:
    if config.reduce_range != "auto":
        return None
    return {"reduce_range": wants_reduced_range(config.backend)[0]}


def _offered(config: BackendConfig) -> Iterable[str]:
    from ptpipe_quant.backends import missing_backend

    return missing_backend(config.backend)


@stage("quant.dynamic", packages=("torch",), preflight=_offered, fingerprint=_processor)
def dynamic(config: DynamicConfig, ctx: Context, model: Model) -> Model:
    """Give linear layers int8 weights, and quantize their inputs at run time.

    Needs no data and no calibration. Convolutions work in float; their weights are stored as int8. Ends with an error
    where the model is not float or has no layer to quantize.
    """
    from ptpipe_quant import stages

    return stages.dynamic(config, ctx, model)


@stage("quant.prepare", packages=("torch",), preflight=_offered, fingerprint=_processor)
def prepare(config: PrepareConfig, ctx: Context, model: Model) -> Model:
    """Fold batch norms and add reporters, for quant.calibrate and quant.convert to follow.

    Ends with an error that names the line of the network that can't be traced into a graph, or the pattern of `skip`
    that fits no layer.
    """
    from ptpipe_quant import stages

    return stages.prepare(config, ctx, model)


@stage("quant.prepare_qat", packages=("torch",), preflight=_offered, fingerprint=_processor)
def prepare_qat(config: PrepareQatConfig, ctx: Context, model: Model) -> Model:
    """Add fake quantization, for a short train.supervised and quant.convert to follow.

    A learning rate a tenth of the first training's, or less, keeps what was learnt there. Weights and activations
    are rounded as int8 will round them, in float32 also under bf16; gradients pass straight through. Dropout stays
    while training. Ends with an error as quant.prepare does.
    """
    from ptpipe_quant import stages

    return stages.prepare_qat(config, ctx, model)


def _num_workers(config: CalibrateConfig) -> int:
    return config.workers


@stage("quant.calibrate", packages=("torch",), workers=_num_workers)
def calibrate(config: CalibrateConfig, ctx: Context, model: Model, data: Data) -> Calibration:
    """Show samples to the reporters of a prepared model.

    Gives the model, which now knows its ranges, and the ranges for a person to read. Ends with an error where the
    split is empty, or a layer's output is not finite (the layer is named).
    """
    from ptpipe_quant import stages

    return Calibration(*stages.calibrate(config, ctx, model, data))


@stage("quant.convert", packages=("torch",))
def convert(config: ConvertConfig, ctx: Context, model: Model) -> Model:
    """Make the int8 model of a calibrated one, or of one from quantization-aware training.

    It is for the backend that it was prepared for, and runs on no other. Ends with an error where an observer saw no
    data, where nothing would become int8, or where this machine does not offer the backend.
    """
    from ptpipe_quant import stages

    return stages.convert(ctx, model)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Offer the kinds of this plugin."""
    return [dynamic, prepare, prepare_qat, calibrate, convert]


@hookimpl
def ptpipe_check(plan: Plan) -> Iterable[Problem]:
    """Find models that come to a quant stage in a state that it can't use."""
    from ptpipe_quant.checks import order_problems

    return order_problems(plan)


@hookimpl
def ptpipe_doctor() -> Iterable[Check]:
    """Try every int8 engine that torch offers here."""
    from ptpipe_quant.diagnosis import findings

    return findings()
