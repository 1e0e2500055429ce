"""Quantization to int8: the kinds `quant.*`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ptpipe import JSON, Check, Context, Stage, hookimpl, stage
from ptpipe_quant.analysis.config import AnalyzeConfig
from ptpipe_quant.analysis.layer_errors import LayerErrors
from ptpipe_quant.config import (
    BackendConfig,
    CalibrateConfig,
    ConvertConfig,
    DynamicConfig,
    PrepareConfig,
    PrepareQatConfig,
)
from ptpipe_quant.cpu import wants_reduced_range
from ptpipe_quant.repairs import STAGES as REPAIRS
from ptpipe_quant.tuning.config import TuneConfig
from ptpipe_quant.tuning.trials import Trials
from ptpipe_torch import Data, Model, Ranges

if TYPE_CHECKING:
    from ptpipe import Artifact, Plan, Problem, RunFinished, Section


class Calibration(NamedTuple):
    """Outputs of `quant.calibrate`."""

    model: Model
    ranges: Ranges


class Tuning(NamedTuple):
    """Outputs of `quant.tune`."""

    model: Model
    trials: Trials


def _chosen_here(config: BackendConfig) -> JSON:
    """Return what options that are `auto` stand for on this machine."""
    chosen: dict[str, JSON] = {}
    if config.backend == "auto":
        chosen["backend"] = config.engine
    if config.reduce_range == "auto":
        chosen["reduce_range"] = wants_reduced_range(config.engine)[0]
    return chosen or None


def _unsupported_backend(config: BackendConfig) -> Iterable[str]:
    from ptpipe_torch.int8.engine import unsupported_engine

    message = unsupported_engine(config.engine)
    return [message] if message else []


@stage("quant.dynamic", packages=("torch",), preflight=_unsupported_backend, fingerprint=_chosen_here)
def dynamic(config: DynamicConfig, ctx: Context, model: Model) -> Model:
    """Quantize linear, LSTM and GRU layers to int8: weights now, inputs and states at run time.

    Needs no data and no calibration. The linear layers of `nn.MultiheadAttention` are among them. Convolutions and
    embeddings compute in float; their weights are stored as int8. An input's scale is that of its whole batch, so a
    sample's logits depend slightly on the others of its batch. Fails if the model is not float or has no layer to
    quantize.
    """
    from ptpipe_quant import stages

    return stages.dynamic(config, ctx, model)


@stage("quant.prepare", packages=("torch",), preflight=_unsupported_backend, fingerprint=_chosen_here)
def prepare(config: PrepareConfig, ctx: Context, model: Model) -> Model:
    """Fold batch norms and insert observers, before quant.calibrate and quant.convert.

    A submodule with a line that can't be traced into a graph stays float, and so does an operator that the backend
    can't run or computes wrongly; notices name them. Fails, with the line, if the network's own forward pass can't be
    traced, or if a pattern of `skip` matches no layer or one of `layers` decides nothing.
    """
    from ptpipe_quant import stages

    return stages.prepare(config, ctx, model)


@stage("quant.prepare_qat", packages=("torch",), preflight=_unsupported_backend, fingerprint=_chosen_here)
def prepare_qat(config: PrepareQatConfig, ctx: Context, model: Model) -> Model:
    """Insert fake quantization, before a short train.supervised and quant.convert.

    Use at most a tenth of the first training's learning rate, to keep what it learnt. Weights and activations are
    rounded as in int8, in float32 also under bf16; gradients pass straight through. Weights of embeddings and recurrent
    layers are rounded by quant.convert alone. Dropout stays active in training. Fails as quant.prepare does.
    """
    from ptpipe_quant import stages

    return stages.prepare_qat(config, ctx, model)


def _num_workers(config: CalibrateConfig) -> int:
    return config.workers


@stage("quant.calibrate", packages=("torch",), workers=_num_workers)
def calibrate(config: CalibrateConfig, ctx: Context, model: Model, data: Data) -> Calibration:
    """Run samples through a prepared model, so that its observers record the ranges of activations.

    Returns the calibrated model, and the ranges for inspection. Fails if the split is empty, or if a layer's output
    is not finite (the layer is named).
    """
    from ptpipe_quant import stages

    return Calibration(*stages.calibrate(config, ctx, model, data))


@stage("quant.convert", packages=("torch",))
def convert(config: ConvertConfig, ctx: Context, model: Model) -> Model:
    """Convert a calibrated model, or one from quantization-aware training, to int8.

    Embeddings and recurrent layers compute in float; their weights are stored as int8, with a scale for each row. The
    result runs only on the backend that it was prepared for. Fails if an observer saw no data, if no layer would become
    int8, or if this machine does not support the backend.
    """
    from ptpipe_quant import stages

    return stages.convert(ctx, model)


@stage("quant.analyze", packages=("torch",))
def analyze(config: AnalyzeConfig, ctx: Context, model: Model, data: Data) -> LayerErrors:
    """Measure what rounding does to each layer of a calibrated model, or of one trained for int8.

    For each layer: the signal-to-quantization-noise ratio of its weights and of its output, in dB; the output's range
    and how much of it is clipped; and what the layer alone costs the primary metric, all others being float, with an
    interval. Names the most harmful layers, to keep float with `skip`. Fails if the split is empty, or if an observer
    saw no data.
    """
    from ptpipe_quant.analysis import stage

    return stage.analyze(config, ctx, model, data)


@stage("quant.tune", packages=("torch",), preflight=_unsupported_backend, fingerprint=_chosen_here)
def tune(config: TuneConfig, ctx: Context, model: Model, data: Data) -> Tuning:
    """Keep the most harmful layers of a float model float until the int8 model loses at most `max_drop`.

    Ranks the layers by the noise that rounding each one makes in the outputs, then bisects that ranking: each trial is
    a model that is prepared, calibrated, converted and run on the backend, on as many samples as decide. On backends
    with a scale per tensor it tries scales per channel first; `remedies` may name others to try for the layers that it
    finds. Returns the calibrated model, for quant.convert, and the trials; where none meets the budget, the closest,
    with a notice. A killed search resumes from its last trial.
    """
    from ptpipe_quant.tuning import stage

    return Tuning(*stage.tune(config, ctx, model, data))


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Return the kinds of this plugin."""
    return [dynamic, prepare, prepare_qat, calibrate, analyze, tune, convert, *REPAIRS]


@hookimpl
def ptpipe_check(plan: Plan) -> Iterable[Problem]:
    """Find models that reach a quant stage in a state it can't use."""
    from ptpipe_quant.checks import order_problems

    return order_problems(plan)


@hookimpl
def ptpipe_doctor() -> Iterable[Check]:
    """Test every quantized engine that torch supports on this machine."""
    from ptpipe_quant.doctor import run_checks

    return run_checks()


@hookimpl
def ptpipe_report_sections(plan: Plan, run: RunFinished, load: Callable[[str, str], Artifact]) -> Iterable[Section]:
    """Add the ranges of every calibration, the errors of analyzed layers, and trials."""
    from ptpipe_quant.report import report_sections

    return report_sections(plan, run, load)
