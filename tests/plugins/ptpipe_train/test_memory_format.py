"""`memory_format: auto` is channels-last for every network that convolves images, and only for these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import StageError
from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch import FunctionRef, builder

from .conftest import NUM_CLASSES, SIDE, Lab, assert_same_bits

NUM_VALUES = 4 * SIDE * SIDE


class Functional(nn.Module):
    """Calls the convolution as a function: it has no convolutional layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1, 3, 3) / 3)
        self.fc = nn.Linear(NUM_VALUES, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(F.conv2d(x, self.weight, padding=1)).flatten(1))


class Viewing(nn.Module):
    """Flattens with `view`, which needs contiguous memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(NUM_VALUES, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv(x))
        return self.fc(x.view(x.size(0), -1))


@builder
def functional_net() -> nn.Module:
    return Functional()


@builder
def viewing_net() -> nn.Module:
    return Viewing()


@builder
def transposed_net() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(1, 4, 3, padding=1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(NUM_VALUES, NUM_CLASSES)
    )


@builder
def linear_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, NUM_CLASSES))


@builder
def one_dimensional_net() -> nn.Module:
    """Convolves sequences, not images."""
    convolution = nn.Conv1d(1, 2, 3)
    return nn.Sequential(
        nn.Flatten(), nn.Unflatten(1, (1, -1)), convolution, nn.Flatten(), nn.Linear(2 * (SIDE * SIDE - 2), NUM_CLASSES)
    )


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (functional_net, "channels_last"),
        (transposed_net, "channels_last"),
        (linear_net, "contiguous"),
        (one_dimensional_net, "contiguous"),
        (viewing_net, "contiguous"),
    ],
)
def test_what_auto_resolves_to(lab: Lab, network: Any, expected: str) -> None:
    model, data = lab.make_model(FunctionRef.to(network)), lab.make_data(40)
    auto = lab.train_afresh(model, data, epochs=1)
    chosen = lab.train_afresh(model, data, epochs=1, memory_format=expected)
    assert auto.metrics["memory_format"] == expected
    assert_same_bits(auto.model, chosen.model)  # the trial leaves no trace in weights, statistics or random numbers


@pytest.mark.parametrize("batch_norm", ["fold", "train"])
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_a_network_prepared_for_quantization_is_trained_in_channels_last(
    lab: Lab, batch_norm: str, backend: str
) -> None:
    config = PrepareQatConfig.model_validate({"backend": backend, "batch_norm": batch_norm})
    prepared = prepare_qat(config, lab.context(), lab.make_model(norm=True))
    trained = lab.train(prepared, lab.make_data(40), epochs=1)
    assert trained.metrics["memory_format"] == "channels_last"


def test_a_network_that_needs_contiguous_memory_is_trained_and_the_log_says_why(lab: Lab) -> None:
    model, data = lab.make_model(FunctionRef.to(viewing_net)), lab.make_data(100, 40)
    trained = lab.train(model, data, epochs=3)
    assert trained.metrics["val_accuracy"] > 0.5
    (line,) = trained.log
    assert line.startswith("memory_format contiguous: the network's forward pass fails in channels_last")
    assert trained.notices == []


def test_channels_last_where_a_view_forbids_it_names_the_line_and_the_remedy(lab: Lab) -> None:
    model, data = lab.make_model(FunctionRef.to(viewing_net)), lab.make_data(16)
    with pytest.raises(StageError, match=r"test_memory_format.py:\d+: .*x\.view\(.*use reshape, or memory_format auto"):
        lab.train(model, data, epochs=1, memory_format="channels_last")


def strided(num_channels: int) -> nn.Module:
    """A 1x1 convolution with a stride, as beside others in FastViT."""
    layers = nn.Conv2d(1, num_channels, 3, padding=1), nn.Conv2d(num_channels, 2, 1, 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * (SIDE // 2) ** 2, NUM_CLASSES))


@builder
def narrow_strided_net() -> nn.Module:
    return strided(4)


@builder
def wide_strided_net() -> nn.Module:
    return strided(16)


def test_gradients_that_onednn_computes_wrongly_in_channels_last_are_avoided(lab: Lab) -> None:
    model, data = lab.make_model(FunctionRef.to(narrow_strided_net)), lab.make_data(16)
    trained = lab.train_afresh(model, data, epochs=1)
    assert trained.metrics["memory_format"] == "contiguous"
    assert trained.log[0].startswith(
        "memory_format contiguous: oneDNN's gradient of 1, a 1x1 convolution with a stride"
    )
    with pytest.raises(StageError, match=r"memory_format: oneDNN's gradient of 1, .*set contiguous"):
        lab.train_afresh(model, data, epochs=1, memory_format="channels_last")
    prepared = prepare_qat(PrepareQatConfig(backend="fbgemm"), lab.context(), model)
    assert lab.train_afresh(prepared, data, epochs=1).metrics["memory_format"] == "contiguous"
    wide = lab.train_afresh(lab.make_model(FunctionRef.to(wide_strided_net)), data, epochs=1)
    assert wide.metrics["memory_format"] == "channels_last"


def test_an_explicit_memory_format_is_taken(lab: Lab) -> None:
    data = lab.make_data(16)
    contiguous = lab.train_afresh(lab.make_model(), data, epochs=1, memory_format="contiguous")
    channels_last = lab.train_afresh(
        lab.make_model(FunctionRef.to(linear_net)), data, epochs=1, memory_format="channels_last"
    )
    assert contiguous.metrics["memory_format"] == "contiguous"
    assert channels_last.metrics["memory_format"] == "channels_last"
