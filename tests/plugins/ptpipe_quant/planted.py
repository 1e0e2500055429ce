"""The trained small network with one layer that int8 harms, and the same function in float."""

from __future__ import annotations

import torch

from ptpipe_torch import Data, Model

LAYER, NEXT_LAYER = "9", "11"
"""The hidden linear layer, and the one behind it."""


def with_weight_outlier(trained: Model) -> Model:
    """Make one unit's weights 1,000 times as large, and its bias so low that it is 0, in float and int8."""
    network = trained.build()
    hidden = network.get_submodule(LAYER)
    with torch.no_grad():
        hidden.weight[0] *= 1000
        hidden.bias[0] = -1e5
    return trained.with_state_dict_of(network)


def with_activation_outlier(trained: Model) -> Model:
    """Make one unit's output 1,000 times as large; the layer behind it takes that back."""
    network = trained.build()
    hidden, head = network.get_submodule(LAYER), network.get_submodule(NEXT_LAYER)
    unit = int(hidden.weight.abs().sum(1).argmax())
    with torch.no_grad():
        hidden.weight[unit] *= 1000
        hidden.bias[unit] *= 1000
        head.weight[:, unit] /= 1000
    return trained.with_state_dict_of(network)


def with_rare_spike(trained: Model, data: Data) -> Model:
    """Let one unit, which nothing reads, fire for a single calibration sample, 1,000 times as strongly as others."""
    network = trained.build().eval()
    hidden, head = network.get_submodule(LAYER), network.get_submodule(NEXT_LAYER)
    (batch,) = data.batches("calibration", batch_size=len(data.splits["calibration"]))
    with torch.no_grad():
        outputs_NK = network[: int(LAYER) + 1](batch.inputs["images"]) - hidden.bias
        first_K, second_K = outputs_NK.topk(2, dim=0).values
        unit = int((first_K - second_K).argmax())
        factor = 1000 * outputs_NK.abs().max() / (first_K - second_K)[unit]
        hidden.weight[unit] *= 2 * factor
        hidden.bias[unit] = -factor * (first_K + second_K)[unit]
        head.weight[:, unit] = 0
    return trained.with_state_dict_of(network)
