"""Exponential moving average of the weights over the optimizer steps of a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ptpipe_train.dtensor import to_local


class WeightAverage:
    """The moving average of the parameters that this worker trains; of sharded ones, that of its shards.

    After step t, counted from 1: average = d * average + (1 - d) * parameter, with d = min(decay, (1 + t) / (10 + t)).
    Before the first step the average is the parameter. B. Polyak and A. Juditsky, Acceleration of Stochastic
    Approximation by Averaging, 1992; the lower decay of the first steps is that of TensorFlow's
    `ExponentialMovingAverage` and of diffusers' `EMAModel`: without it the average of a short training would be mostly
    the initial weights. Buffers, such as running statistics and ranges of fake quantization, are not averaged.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        """`parameters`: all of this worker, in an order that a resumed training has too."""
        self._parameters, self._decay = parameters, decay
        self._averages = [to_local(parameter.detach()).clone() for parameter in parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the parameters after that optimizer step, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        if self._averages:
            torch._foreach_lerp_(self._averages, self._shards(), 1 - decay)

    def clear(self, parameter: nn.Parameter, keep: torch.Tensor) -> None:
        """Set the average of a parameter to zero where `keep` is false."""
        number = next(number for number, other in enumerate(self._parameters) if other is parameter)
        self._averages[number].mul_(keep)

    def _shards(self) -> list[torch.Tensor]:
        return [to_local(parameter.detach()) for parameter in self._parameters]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the parameters for their averages inside the `with`."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the parameters and their averages."""
        for shard, average in zip(self._shards(), self._averages, strict=True):
            value = shard.clone()
            shard.copy_(average)
            average.copy_(value)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The averages, by the parameter's index."""
        return {str(number): average for number, average in enumerate(self._averages)}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `tensors`."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])
