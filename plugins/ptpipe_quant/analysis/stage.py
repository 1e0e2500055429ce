"""Implementation of `quant.analyze`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ptpipe import Context
from ptpipe_quant.analysis.config import AnalyzeConfig
from ptpipe_quant.analysis.layer_errors import Effect, LayerError, LayerErrors, TensorError
from ptpipe_quant.analysis.measuring import Measurement, OutputRecord, spread_positions
from ptpipe_quant.analysis.rounded_network import RoundedLayer, RoundedNetwork, Rounding
from ptpipe_quant.analysis.tensor_error import TOLERANCE, weight_error
from ptpipe_quant.dry_run import freeze_ranges
from ptpipe_quant.stages import calibrated_network, names_to_store
from ptpipe_torch import Batch, Data, Model
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.quality.drops import finite_limits, primary_drops, primary_value
from ptpipe_torch.runtime import freed_memory_kept, released_memory, torch_threads

_NUM_NAMED = 3
_SHOWN_FRACTION = 1e-4


def analyze(config: AnalyzeConfig, ctx: Context, model: Model, data: Data) -> LayerErrors:
    """Implement `quant.analyze`."""
    data.info.check_fit("the model", model.signature)
    positions_N = spread_positions(data, config.split, config.num_samples, ctx.kind)
    with released_memory(), freed_memory_kept(), torch_threads(None):
        network = rounded_network(model, next(iter(data.batches(config.split, order_N=positions_N[:4]))), ctx.kind)
        roundings = [Rounding([layer], [layer]) for layer in network.layers]
        everything = Rounding(network.layers, network.layers)
        measurement = Measurement(network, data.info.task, model.signature, [*roundings, everything])
        batches = data.batches(config.split, order_N=positions_N)
        measurement.run(batches, _progress(ctx, len(positions_N) * (len(roundings) + 2)))
    effects = _effects(measurement, data, config.confidence, ctx.seed)
    weights = [_weight_error(layer) for layer in network.layers]
    layers = tuple(
        LayerError(layer.name, weight, output.result() if (output := measurement.output_error(layer)) else None, effect)
        for layer, weight, effect in zip(network.layers, weights, effects[:-1], strict=True)
    )
    metric = data.info.task.primary_metric
    value = primary_value(data.info.task, measurement.unrounded.sums)
    facts = (metric.name, metric.is_fraction, value, config.split, len(positions_N), config.confidence)
    errors = LayerErrors(layers, effects[-1], *facts)
    _report(ctx, errors)
    return errors


def rounded_network(model: Model, samples: Batch, kind: str) -> RoundedNetwork:
    """Return the network of a calibrated model. Raises StageError for any other model.

    `samples`: a few, to find operators that change no value.
    """
    prepared = calibrated_network(model, kind)
    freeze_ranges(prepared)
    stored = names_to_store(model, prepared)
    with quantized_engine(model.recipe.backend), torch.no_grad():
        network = RoundedNetwork.of(prepared, stored)
        network.merge_passed_on(samples.args)
    return network


def _progress(ctx: Context, total: int) -> Callable[[int], None]:
    done = 0

    def on_pass(num_samples: int) -> None:
        nonlocal done
        done += num_samples
        ctx.progress(done, total, "samples")

    return on_pass


def _weight_error(layer: RoundedLayer) -> TensorError | None:
    """Return the error of the noisiest of a layer's weights; a recurrent layer has several."""
    errors = [
        weight_error(weight.before, weight.quantized, is_learned=weight.is_learned)
        for weight in layer.weights
        if weight.quantized is not None
    ]
    found = [error for error in errors if error is not None]
    return min(found, key=lambda error: float("inf") if error.sqnr_db is None else error.sqnr_db, default=None)


def _effects(measurement: Measurement, data: Data, confidence: float, seed: int) -> list[Effect]:
    records: Sequence[OutputRecord] = measurement.rounded
    drops = primary_drops(data.info.task, measurement.unrounded.sums, [record.sums for record in records], seed)
    effects = []
    for record, drop in zip(records, drops, strict=True):
        low, high = finite_limits(data.info.task, drop, confidence)
        effects.append(Effect(record.sqnr_db, drop.drop, low, high))
    return effects


def _report(ctx: Context, errors: LayerErrors) -> None:
    """Report the figures that a terminal shows: the whole, the worst layers, and values that broke the bound."""
    worst = errors.worst_first
    ctx.metric(
        num_layers=len(errors.layers),
        num_samples=errors.num_samples,
        worst_layer=worst[0].name if worst else None,
        layers=[dict(errors.row(layer)) for layer in worst],
    )
    ctx.metric(**errors.total.costs(errors.drop_name), **{f"float_{errors.metric}": errors.float_value})
    ctx.notice(
        f"all layers rounded: {_effect_text(errors, errors.total)} on {errors.num_samples:,} samples of "
        f"{errors.split}; each alone, worst first:"
    )
    for layer in worst[:_NUM_NAMED]:
        ctx.notice(f"{layer.name}: {_effect_text(errors, layer.effect)}; {_tensor_texts(layer)}")
    for layer in errors.layers:
        for what, tensor in (("weights", layer.weight), ("output", layer.output)):
            if tensor is not None and tensor.max_error_ratio > 1 + TOLERANCE:
                ctx.notice(
                    f"ERROR in ptpipe, please report it: rounding changes the {what} of {layer.name} by up to "
                    f"{tensor.max_error_ratio:.3g} times what it can at most"
                )


def _effect_text(errors: LayerErrors, effect: Effect) -> str:
    """Return `costs 4.20 points of accuracy (3.10 to 5.40), outputs 12.3 dB`."""
    name = errors.metric.replace("_", " ")
    size, *limits = (_number(errors, value) for value in (effect.drop, effect.drop_low, effect.drop_high))
    unit = f"points of {name}" if errors.is_fraction else f"in {name}"
    return f"costs {size} {unit} ({' to '.join(limits)}), outputs {_decibel_text(effect.sqnr_db)}"


def _number(errors: LayerErrors, value: float) -> str:
    return f"{100 * value + 0.0:.2f}" if errors.is_fraction else f"{value + 0.0:.3g}"  # + 0.0: never `-0`


def _tensor_texts(layer: LayerError) -> str:
    parts = []
    if layer.weight is not None:
        parts.append(f"weights {_decibel_text(layer.weight.sqnr_db)}")
    if layer.output is not None:
        low, high = layer.output.minimum, layer.output.maximum
        fraction = layer.output.clipped_fraction
        clipped = f", {100 * fraction:.2f} % clipped" if fraction >= _SHOWN_FRACTION else ""
        parts.append(f"output {_decibel_text(layer.output.sqnr_db)} in {low:.3g} to {high:.3g}{clipped}")
    return ", ".join(parts)


def _decibel_text(value: float | None) -> str:
    return "exact" if value is None else f"{round(value, 1) + 0.0:.1f} dB"  # + 0.0: never `-0.0`
