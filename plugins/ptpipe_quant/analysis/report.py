"""What `quant.analyze` adds to a run's report."""

from __future__ import annotations

from ptpipe import Section
from ptpipe.sections import Block, Cell, Dot, DotPlot, DotSeries, Mark, Table, Text, Topic
from ptpipe_quant.analysis.layer_errors import LayerError, LayerErrors, TensorError

_MAX_SHOWN = 40


def section(stage_id: str, errors: LayerErrors) -> Section:
    """Return the table of the layers, the most harmful first, and plots of their effects and noise."""
    worst = errors.worst_first[:_MAX_SHOWN]
    blocks: tuple[Block, ...] = (Text(_summary(errors)), _table(errors, worst), _effects(errors, worst), _noise(worst))
    return Section(f"Rounding errors: {stage_id}", blocks, Topic.QUANTIZATION, stage_id)


def _summary(errors: LayerErrors) -> str:
    shown = f"The {_MAX_SHOWN} worst of {len(errors.layers)} layers" if len(errors.layers) > _MAX_SHOWN else "Layers"
    drop, low, high = (
        f"{_drop(errors, value):.3g}" for value in (errors.total.drop, errors.total.drop_low, errors.total.drop_high)
    )
    limits = f"{drop} ({low} to {high})"
    lost = f"{limits} {_unit(errors)}" if errors.is_fraction else f"{_unit(errors)} {limits}"
    before = f"{100 * errors.float_value:.2f} %" if errors.is_fraction else f"{errors.float_value:.5g}"
    return (
        f"{shown} by what each one alone costs, all others being float, on {errors.num_samples:,} samples of "
        f"{errors.split}. Limits are one-sided, at {100 * errors.confidence:g} % each, for one layer at a time. All "
        f"layers together: {lost}, from {before}."
    )


def _table(errors: LayerErrors, layers: list[LayerError]) -> Table:
    columns = (
        "layer",
        _unit(errors),
        "low",
        "high",
        "network dB",
        "weights dB",
        "output dB",
        "minimum",
        "maximum",
        "clipped %",
        "largest error / bound",
    )
    return Table(columns, tuple(_cells(errors, layer) for layer in layers), "Rounding one layer at a time")


def _cells(errors: LayerErrors, layer: LayerError) -> tuple[Cell, ...]:
    effect, output = layer.effect, layer.output
    ratios = [tensor.max_error_ratio for tensor in (layer.weight, output) if tensor is not None]
    return (
        layer.name,
        *(round(_drop(errors, value), 4) for value in (effect.drop, effect.drop_low, effect.drop_high)),
        effect.sqnr_db,
        _decibels(layer.weight),
        _decibels(output),
        None if output is None else output.minimum,
        None if output is None else output.maximum,
        None if output is None else round(100 * output.clipped_fraction, 4),
        max(ratios, default=None),
    )


def _effects(errors: LayerErrors, layers: list[LayerError]) -> DotPlot:
    dots = tuple(
        Dot(*(_drop(errors, value) for value in (of.effect.drop, of.effect.drop_low, of.effect.drop_high)))
        for of in layers
    )
    names = tuple(layer.name for layer in layers)
    return DotPlot(
        "What each layer alone costs", _unit(errors), names, (DotSeries("drop", dots),), (Mark("0", "x", 0),)
    )


def _noise(layers: list[LayerError]) -> DotPlot:
    series = (
        DotSeries("weights", tuple(Dot(_decibels(layer.weight)) for layer in layers)),
        DotSeries("output", tuple(Dot(_decibels(layer.output)) for layer in layers)),
    )
    return DotPlot("Signal-to-quantization-noise ratio", "dB", tuple(layer.name for layer in layers), series)


def _decibels(tensor: TensorError | None) -> float | None:
    return None if tensor is None else tensor.sqnr_db


def _drop(errors: LayerErrors, value: float) -> float:
    return 100 * value if errors.is_fraction else value


def _unit(errors: LayerErrors) -> str:
    name = errors.metric.replace("_", " ")
    return f"points of {name} lost" if errors.is_fraction else f"{name} worse by"
