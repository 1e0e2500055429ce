"""`quant.analyze` on handwritten digits: networks with a layer that int8 harms, and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe.events import Notice, Progress
from ptpipe_quant import (
    AnalyzeConfig,
    CalibrateConfig,
    ConvertConfig,
    PrepareConfig,
    PrepareQatConfig,
    analyze,
    calibrate,
    convert,
    prepare,
    prepare_qat,
)
from ptpipe_quant.analysis.layer_errors import Effect, LayerError, LayerErrors, TensorError
from ptpipe_quant.analysis.measuring import spread_positions
from ptpipe_quant.analysis.rounded_network import Rounding
from ptpipe_quant.analysis.stage import _report, rounded_network
from ptpipe_quant.repairs import adaround, bias_correct
from ptpipe_quant.repairs.config import AdaroundConfig, BiasCorrectConfig
from ptpipe_torch import Data, Model, builder

from .. import planted
from ..conftest import BACKENDS, NUM_CLASSES, accuracy, logits_of, make_model, train

TRIED = [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS]
ON_TEST = AnalyzeConfig(split="test", num_samples=None)


def calibrated(model: Model, data: Data, ctx, **options) -> Model:
    return calibrate(CalibrateConfig(), ctx, prepare(PrepareConfig(**options), ctx, model), data).model


def by_name(errors: LayerErrors) -> dict[str, LayerError]:
    return {layer.name: layer for layer in errors.layers}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", TRIED)
@pytest.mark.parametrize("network", ["trained", "trained_mixed"])
def test_without_rounding_it_is_the_float_network_and_with_all_of_it_the_int8_one(
    backend, network, digits, ctx, request
) -> None:
    model = request.getfixturevalue(network)
    ready = calibrated(model, digits, ctx, backend=backend)
    batch = next(iter(digits.batches("test", batch_size=256)))
    rounded = rounded_network(ready, batch.rows(0, 4), "quant.test")
    with torch.no_grad():
        logits_NK, values = rounded.run_float(batch.args)
        rounded_NK = rounded.run_rounded(Rounding(rounded.layers, rounded.layers), values)
    float_NK = logits_of(model, digits, 256)
    # Its biases are those of the int8 network, which are rounded; the difference is 3e-7 without that.
    np.testing.assert_allclose(logits_NK.numpy(), float_NK, atol=2e-4 * np.abs(float_NK).max())
    int8_NK = logits_of(convert(ConvertConfig(), ctx, ready), digits, 256)
    step = np.diff(np.unique(rounded_NK.numpy())).min()
    # An engine may round a tie of any layer to the other side.
    assert (np.abs(int8_NK - rounded_NK.numpy()) > 1.5 * step).mean() < 0.06
    assert np.abs(rounded_NK.numpy() - float_NK).max() > step / 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", TRIED)
def test_weights_with_an_outlier_are_the_worst(backend, trained, digits, ctx, events) -> None:
    ready = calibrated(planted.with_weight_outlier(trained), digits, ctx, backend=backend, weights="per_tensor")
    errors = analyze(ON_TEST, ctx, ready, digits)
    worst = errors.worst_first[0]
    others = [layer.weight.sqnr_db for layer in errors.layers if layer.weight and layer is not worst]
    assert worst.name == planted.LAYER
    assert worst.effect.drop_low > 0.05
    # 60 dB less for the others' signal, but that of the outlier itself counts too; the network's outputs tell.
    assert worst.effect.sqnr_db < 15 < min(others)
    assert all(layer.effect.drop_low <= 0.01 for layer in errors.layers if layer is not worst)
    assert errors.total.drop_low > 0.05
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any(text.startswith(f"{planted.LAYER}: costs ") for text in notices)
    assert not any("ERROR" in text for text in notices)
    last = [event for event in events if isinstance(event, Progress)][-1]
    assert last.done == last.total


def test_scales_per_channel_cure_them(trained, digits, ctx) -> None:
    ready = calibrated(planted.with_weight_outlier(trained), digits, ctx, weights="per_channel")
    errors = analyze(ON_TEST, ctx, ready, digits)
    assert by_name(errors)[planted.LAYER].effect.drop_high < 0.02


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("backend", TRIED)
def test_an_activation_with_an_outlier_is_the_worst(backend, trained, digits, ctx) -> None:
    model = planted.with_activation_outlier(trained)
    ready = calibrated(model, digits, ctx, backend=backend, weights="per_channel", observer="min_max")
    errors = analyze(ON_TEST, ctx, ready, digits)
    worst = errors.worst_first[0]
    assert worst.name == planted.LAYER
    assert worst.weight is not None and worst.weight.sqnr_db > 40
    assert worst.output is not None and worst.output.maximum > 1000
    assert worst.effect.drop_low > 0.05


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("backend", TRIED)
def test_figures_are_those_of_the_network_that_runs(backend, trained, digits, ctx) -> None:
    ready = calibrated(planted.with_weight_outlier(trained), digits, ctx, backend=backend, weights="per_tensor")
    errors = analyze(ON_TEST, ctx, ready, digits)
    int8 = accuracy(logits_of(convert(ConvertConfig(), ctx, ready), digits), digits)
    assert errors.float_value - errors.total.drop == pytest.approx(int8, abs=0.01)
    assert errors.total.drop_low < errors.total.drop < errors.total.drop_high


def test_values_are_off_by_half_a_step_at_most(trained_mixed, digits, ctx) -> None:
    errors = analyze(ON_TEST, ctx, calibrated(trained_mixed, digits, ctx), digits)
    tensors = [tensor for layer in errors.layers for tensor in (layer.weight, layer.output) if tensor is not None]
    assert len(tensors) > len(errors.layers)
    assert all(0.5 < tensor.max_error_ratio < 1.001 for tensor in tensors)


def test_what_relu6_clips_is_no_error(trained_mixed, digits, ctx) -> None:
    ready = calibrated(trained_mixed, digits, ctx)
    stem = by_name(analyze(ON_TEST, ctx, ready, digits))["stem.0"]
    assert stem.output is not None
    assert stem.output.minimum == 0 and stem.output.maximum <= 6
    assert stem.output.sqnr_db > 40


@builder
def with_hardswish() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Hardswish(), nn.Flatten(), nn.Linear(144, 10))


@pytest.mark.parametrize("observer", ["mse", "min_max"])
def test_what_hardswish_takes_for_zero_is_no_error(observer, digits, ctx) -> None:
    model = make_model(with_hardswish)
    network = model.build()
    network.get_submodule("0").weight.data.mul_(20)
    ready = calibrated(model.with_state_dict_of(network), digits, ctx, observer=observer)
    convolution = by_name(analyze(ON_TEST, ctx, ready, digits))["0"]
    assert convolution.output is not None
    assert convolution.output.minimum == -3 and convolution.output.maximum > 10
    assert convolution.output.sqnr_db > 35


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", TRIED)
def test_a_model_from_quantization_aware_training(backend, trained_mixed, digits, ctx) -> None:
    ready = train(prepare_qat(PrepareQatConfig(backend=backend), ctx, trained_mixed), digits, lr=0.005)
    errors = analyze(ON_TEST, ctx, ready, digits)
    assert {"stem.0", "block.conv", "head"} <= by_name(errors).keys()
    assert errors.total.sqnr_db > 15


class SharedRange(nn.Module):
    """A layer's output, which ReLU reads, has the range of what it is joined with, whose values are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.side = nn.Conv2d(1, 4, 3), nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(8, NUM_CLASSES)
        nn.init.constant_(self.side.bias, -3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.relu(self.up(torch.relu(self.first(x))))
        joined = torch.cat([up.mean((2, 3)), self.side(up).mean((2, 3))], 1)
        logits_NK: torch.Tensor = self.head(joined)
        return logits_NK


@builder
def shared_range() -> nn.Module:
    """What `SharedRange` says."""
    return SharedRange()


def test_what_relu_cuts_off_is_no_error_in_a_range_that_others_share(digits, ctx, events) -> None:
    errors = analyze(ON_TEST, ctx, calibrated(make_model(shared_range), digits, ctx, observer="min_max"), digits)
    output = by_name(errors)["up"].output
    assert output is not None
    assert (output.minimum, output.clipped_fraction) == (0, 0)
    assert output.sqnr_db > 20 and output.max_error_ratio < 1.001
    assert not any("ERROR" in str(getattr(event, "text", "")) for event in events)


@builder
def with_tanh() -> nn.Module:
    """The outputs of tanh are on a grid that ends at 127/128, whatever calibration sees."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES))


def test_beyond_the_ends_of_a_fixed_grid_nothing_is_clipped(digits, ctx) -> None:
    model = make_model(with_tanh)
    network = model.build()
    network.get_submodule("1").weight.data.mul_(20)
    layers = by_name(analyze(ON_TEST, ctx, calibrated(model.with_state_dict_of(network), digits, ctx), digits))
    output = layers["2"].output
    assert output is not None and output.maximum > 0.999
    assert (output.clipped_fraction, output.max_error_ratio < 1.001) == (0, True)
    assert output.sqnr_db < 50


def test_repaired_tensors_are_measured_against_those_of_the_float_network(trained, digits, ctx, events) -> None:
    ready = calibrated(trained, digits, ctx, weights="per_tensor")
    rounded = adaround(AdaroundConfig(num_samples=64, num_iterations=20), ctx, ready, digits)
    corrected = bias_correct(BiasCorrectConfig(num_samples=4), ctx, rounded, digits)
    float_NK = logits_of(trained, digits)
    before = by_name(analyze(ON_TEST, ctx, ready, digits))
    for repaired in (rounded, corrected):
        errors = analyze(ON_TEST, ctx, repaired, digits)
        noise_NK = logits_of(convert(ConvertConfig(), ctx, repaired), digits) - float_NK
        measured_db = 10 * np.log10((float_NK**2).sum() / (noise_NK**2).sum())
        assert errors.total.sqnr_db == pytest.approx(measured_db, abs=0.3)  # an engine rounds ties its own way
        assert errors.float_value == accuracy(float_NK, digits)
        for name, layer in by_name(errors).items():
            if layer.weight is not None:
                assert layer.weight.sqnr_db == pytest.approx(before[name].weight.sqnr_db, abs=3)
                assert 0.25 < layer.weight.max_error_ratio <= 1.001
    assert not any("ERROR" in str(getattr(event, "text", "")) for event in events)


def test_a_model_that_has_no_ranges_is_refused(trained, digits, ctx) -> None:
    with pytest.raises(StageError, match="got a model that is float"):
        analyze(ON_TEST, ctx, trained, digits)
    with pytest.raises(StageError, match="observers saw no data"):
        analyze(ON_TEST, ctx, prepare(PrepareConfig(), ctx, trained), digits)


def test_an_empty_split_is_refused_and_others_are_named(trained, digits, ctx) -> None:
    ready = calibrated(trained, digits, ctx)
    with pytest.raises(StageError, match="split 'val' is empty; set `split` to one of train, test, calibration"):
        analyze(AnalyzeConfig(), ctx, ready, digits)


def test_samples_are_spread_over_the_split(digits) -> None:
    positions_N = spread_positions(digits, "train", 3, "quant.test")
    assert positions_N.tolist() == [0, round(1199 / 2), 1199]


def test_a_value_that_breaks_the_bound_is_reported_loudly(ctx, events) -> None:
    effect = Effect(30.0, 0.0, -0.01, 0.01)
    broken = LayerError("conv1", TensorError(30.0, -1.0, 1.0, 0.0, 1.5), None, effect)
    _report(ctx, LayerErrors((broken,), effect, "accuracy", True, 0.9, "test", 8, 0.95))
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices[-1].startswith("ERROR in ptpipe")
    assert notices[-1].endswith("rounding changes the weights of conv1 by up to 1.5 times what it can at most")


def test_a_layer_that_costs_nothing_costs_no_minus_zero(ctx, events) -> None:
    """A metric where lower is better has drops of -0.0."""
    effect = Effect(30.0, -0.0, -0.0, 0.01)
    layer = LayerError("conv1", TensorError(30.0, -1.0, 1.0, 0.0, 0.9), None, effect)
    _report(ctx, LayerErrors((layer,), effect, "error", False, 0.9, "test", 8, 0.95))
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices[0].startswith("all layers rounded: costs 0 in error (0 to 0.01), ")
