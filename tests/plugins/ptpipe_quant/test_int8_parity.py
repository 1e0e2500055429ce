"""quant.convert proves that the engine computes what the int8 weights say, and names the layer where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import StageError
from ptpipe_quant import CalibrateConfig, ConvertConfig, PrepareConfig, calibrate, convert, prepare, transforms
from ptpipe_torch import Model, builder
from ptpipe_torch.int8.observers import observer_at

from ...processor import needs_fbgemm_fault
from .conftest import BACKENDS, make_model


def zero_bias(int8: Any) -> None:
    int8.get_submodule("4").set_weight_bias(int8.get_submodule("4").weight(), torch.zeros(16))


def shift_zero_point(int8: Any) -> None:
    """A small shift is another grid for the same values; this one cuts values off."""
    int8.get_submodule("9").zero_point += 250


def divide_scale(int8: Any) -> None:
    """Divides the range, which cuts values off, also those of 7 bits."""
    int8.get_submodule("0").scale /= 4


def negate_a_channel(int8: Any) -> None:
    layer = int8.get_submodule("11")
    integers = layer.weight().int_repr()
    integers[3] = -integers[3]
    scales, zero_points = layer.weight().q_per_channel_scales(), layer.weight().q_per_channel_zero_points()
    changed = torch._make_per_channel_quantized_tensor(integers, scales, zero_points, 0)
    layer.set_weight_bias(changed, layer.bias())


@pytest.mark.parametrize("backend", [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS])
@pytest.mark.parametrize(
    ("fault", "layer"), [(zero_bias, "4"), (shift_zero_point, "9"), (divide_scale, "0"), (negate_a_channel, "11")]
)
def test_a_fault_in_the_int8_network_is_found_with_its_layer(
    trained, digits, ctx, monkeypatch, backend, fault: Callable[[Any], None], layer
) -> None:
    ready = calibrated(trained, digits, ctx, backend)
    to_int8 = transforms.convert

    def faulty(prepared: GraphModule) -> GraphModule:
        int8 = to_int8(prepared)
        fault(int8)
        return int8

    monkeypatch.setattr(transforms, "convert", faulty)
    with pytest.raises(StageError, match=rf"{backend} computes {layer} wrongly: its output is up to \d+ steps"):
        convert(ConvertConfig(), ctx, ready)


@builder
def large_weights() -> nn.Module:
    """Build a network whose first layer has few sums within a narrow range."""
    layer = nn.Conv2d(1, 64, 1)
    with torch.no_grad():
        layer.weight.fill_(100.0)
        layer.bias.copy_(torch.linspace(-100.0, 100.0, 64))
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * 64, 10))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_that_is_rounded_by_more_than_a_step_of_the_output_is_no_fault(digits, ctx, metrics, backend) -> None:
    ready = calibrated(make_model(large_weights), digits, ctx, backend)
    prepared: Any = ready.build_prepared()
    linear = next(node for node in prepared.graph.nodes if node.target == "2")
    observer: Any = observer_at(prepared, linear.args[0])
    observer.min_val.fill_(0.0)  # as an observer may choose that clips rare values
    observer.max_val.fill_(0.5)
    convert(ConvertConfig(), ctx, ready.with_state_dict_of(prepared))
    assert metrics()["max_difference_steps"] <= 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_network_passes_and_figures_are_reported(trained, digits, ctx, metrics, backend) -> None:
    convert(ConvertConfig(), ctx, calibrated(trained, digits, ctx, backend))
    assert metrics()["max_difference_steps"] <= 1
    assert metrics()["compared_layers"] >= 5
    assert metrics()["float_layers"] == []
    assert metrics()["int8_parameters_fraction"] > 0.97


class Deviation(nn.Module):
    """The deviation of what weights of 0 or more leave, as of masked sets: no number where one is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(1, 16, 3), nn.Linear(16, 10)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x_NCHW = self.features(images_NCHW)
        weights_NCHW = images_NCHW[:, :, 1:-1, 1:-1] + 1.0
        variance_NC = (x_NCHW.square() * weights_NCHW).sum((2, 3)) / weights_NCHW.sum((2, 3))
        return self.head(torch.sqrt(variance_NC + 1e-6))


@builder
def deviation() -> nn.Module:
    return Deviation()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_number_for_inputs_that_no_data_has_is_not_compared(digits, ctx, metrics, backend) -> None:
    convert(ConvertConfig(), ctx, calibrated(make_model(deviation), digits, ctx, backend))
    assert metrics()["max_difference_steps"] <= 1
    assert metrics()["compared_layers"] >= 3


@needs_fbgemm_fault
def test_a_transposed_convolution_that_fbgemm_gets_wrong_is_found(ctx, monkeypatch, events) -> None:
    from ptpipe_quant import preparation

    from .test_preparation import upsampling

    # As if the probe of single layers had missed it.
    monkeypatch.setattr(preparation, "transposed_convolution_error", lambda *_arguments: 0.0)
    prepare(PrepareConfig(backend="fbgemm"), ctx, make_model(upsampling))
    assert any("2 stays float: fbgemm computes it wrongly" in getattr(event, "text", "") for event in events)


def calibrated(model: Model, digits: Any, ctx: Any, backend: str) -> Model:
    config = PrepareConfig(backend=backend, observer="min_max", weights="per_channel")  # type: ignore[arg-type]
    return calibrate(CalibrateConfig(), ctx, prepare(config, ctx, model), digits).model
