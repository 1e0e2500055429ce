"""AdaRound: learn for each weight whether to round it up or down, so that the layer's output changes least.

Source: M. Nagel et al., Up or Down? Adaptive Rounding for Post-Training Quantization, ICML 2020, equations 21 to 25,
and section 5 for the hyperparameters.

The result is stored as float weights on the int8 grid, and quant.convert rounds to the nearest: to the same integers,
if it finds the same scale. A scale comes from the largest weight alone, so this one stays as it is, and no other one
is rounded beyond it.

Shape legend: as the weight (O, ...); its scales broadcast to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from ptpipe import Context, StageError
from ptpipe_quant.repaired import with_repaired
from ptpipe_quant.repairs.bias_correct import shared_layers
from ptpipe_quant.repairs.config import AdaroundConfig
from ptpipe_quant.repairs.lockstep import LayerPair, QuantizedPair
from ptpipe_quant.repairs.network_inputs import network_inputs
from ptpipe_torch import Data, Model
from ptpipe_torch.runtime import torch_threads

_LOW, _HIGH = -0.1, 1.1
"""Limits of the stretched sigmoid, equation 23."""
_LEARNING_RATE, _REGULARIZER = 1e-2, 1e-2
_WARMUP = 0.2
"""Fraction of the steps without regularizer."""
_FIRST_BETA, _LAST_BETA = 20.0, 2.0
"""Exponent of the regularizer, equation 24: small at the end, where every weight must decide."""


@torch.no_grad()
def adaround(config: AdaroundConfig, ctx: Context, model: Model, data: Data) -> Model:
    """Implement `quant.adaround`."""
    pair = QuantizedPair(ctx, model)
    shared = shared_layers(pair.float_network)
    weights, before_repair = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    gains, num_flipped = dict[str, float](), 0
    random = np.random.default_rng(ctx.seed)
    with torch_threads(None):
        batches = list(network_inputs(ctx, model, data, config.split, config.num_samples))
        for number, layer in enumerate(pair.layers(batches)):
            if layer.name not in shared:
                rounding = _Rounding(layer)
                before, after = rounding.learn(config, random)
                gains[layer.user_name] = after / before if before else 1.0
                weights[f"{layer.name}.weight"] = rounding.stored_weight()
                before_repair[f"{layer.name}.weight"] = layer.float_layer.weight.detach()
                num_flipped += rounding.num_flipped()
                layer.quantized_layer.weight.copy_(rounding.rounded_weight())
            ctx.progress(number + 1, len(pair.weights), "layers")
    if not weights:
        raise StageError(f"{ctx.kind}: no layer has weights of its own to round")
    ctx.metric(
        rounded_layers=len(weights),
        changed_weights=num_flipped,
        mean_squared_error_ratio=float(np.mean(list(gains.values()))),
    )
    return with_repaired(model, weights, before_repair)


class _Rounding:
    """The rounding of one layer's weight."""

    def __init__(self, pair: LayerPair) -> None:
        self._pair = pair
        self._weight = pair.float_layer.weight.detach()
        quantized, axis = pair.weight, pair.weight.axis
        shape = [-1 if quantized.per_channel and index == axis else 1 for index in range(self._weight.dim())]
        self._scale = torch.from_numpy(quantized.scales.copy()).reshape(shape)
        axes = [index for index in range(self._weight.dim()) if not (quantized.per_channel and index == axis)]
        peak = self._weight.abs().amax(axes, keepdim=True)
        self._is_fixed = self._weight.abs() == peak
        self._nearest = torch.from_numpy(quantized.integers.astype(np.float32))
        # Of the others, none beyond the largest weight, which decides on the scale.
        self._limit = torch.floor(peak / self._scale * (1 - 1e-6))
        self._floor = torch.floor(self._weight / self._scale)
        rest = (self._weight / self._scale - self._floor).clamp(1e-4, 1 - 1e-4)
        self._variables = -torch.log((_HIGH - _LOW) / (rest - _LOW) - 1)
        self._integers = self._nearest

    def learn(self, config: AdaroundConfig, random: np.random.Generator) -> tuple[float, float]:
        """Learn the rounding; return the mean squared error before and after. Nearest stays where it is no worse."""
        targets = [self._output(self._weight, batch) for batch in self._pair.float_inputs]
        axis = -1 if isinstance(self._pair.float_layer, nn.Linear) else 1
        with torch.enable_grad():
            variables = self._variables.clone().requires_grad_(True)
            optimizer = torch.optim.Adam([variables], _LEARNING_RATE)
            for step in range(config.num_iterations):
                batch = int(random.integers(len(targets)))
                rows = torch.from_numpy(random.integers(len(targets[batch]), size=config.batch_size))
                up = _rectified_sigmoid(variables)
                output = self._output(self._soft(up) * self._scale, self._pair.quantized_inputs[batch][rows])
                loss = (output - targets[batch][rows]).square().sum(axis).mean()
                loss = loss + self._regularizer(up, step / config.num_iterations)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        before = self._error(targets)
        nearest, self._integers = self._integers, self._soft((_rectified_sigmoid(variables) >= 0.5).float())
        after = self._error(targets)
        if not after < before:
            self._integers, after = nearest, before
        return before, after

    def _regularizer(self, up: torch.Tensor, fraction: float) -> Any:
        if fraction < _WARMUP:
            return 0.0
        beta = _LAST_BETA + (_FIRST_BETA - _LAST_BETA) * (1 - (fraction - _WARMUP) / (1 - _WARMUP))
        return _REGULARIZER * (1 - (2 * up - 1).abs().pow(beta)).sum()

    def _soft(self, up: torch.Tensor) -> torch.Tensor:
        """Return the integers, not yet whole numbers, if weights are rounded up by these fractions."""
        return torch.where(self._is_fixed, self._nearest, (self._floor + up).clamp(-self._limit, self._limit))

    def _error(self, targets: Sequence[torch.Tensor]) -> float:
        outputs = (self._output(self.rounded_weight(), batch) for batch in self._pair.quantized_inputs)
        differences = [
            (output - target).square().mean().item() for output, target in zip(outputs, targets, strict=True)
        ]
        return float(np.mean(differences))

    def _output(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        layer = self._pair.float_layer
        y: torch.Tensor = functional_call(layer, {"weight": weight}, (x,))
        return y.relu() if self._pair.relu else y

    def rounded_weight(self) -> torch.Tensor:
        """Return the weight as int8 has it."""
        return self._integers * self._scale

    def stored_weight(self) -> torch.Tensor:
        """Return the float weight that quant.convert rounds to the same integers."""
        return torch.where(self._is_fixed, self._weight, self.rounded_weight())

    def num_flipped(self) -> int:
        """Return how many weights are not rounded to the nearest integer."""
        return int((self._integers != self._nearest).sum())


def _rectified_sigmoid(variables: torch.Tensor) -> torch.Tensor:
    return (torch.sigmoid(variables) * (_HIGH - _LOW) + _LOW).clamp(0, 1)
