"""Fake quantization for QAT: round to the int8 grid forward, straight-through gradient backward.

Values and gradients equal those of torch's reference, the fake-quantize operators of ATen, bit for bit, in a quarter
of the time on a CPU: whole-tensor operators use vector instructions, and the mask of clipped values is kept as the
rounded numbers themselves. All arithmetic is float32; under autocast only the result has the input's dtype.

Formula: B. Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference, CVPR 2018, section 3; straight-through gradient: Y. Bengio et al., arXiv 1308.3432, section 4.

A learned range is a part of the observed one: a trained parameter of each end is the logarithm of the part that is
kept. Gradients are those of S. Esser et al., Learned Step Size Quantization, ICLR 2020, with offsets, Y. Bhalgat et
al., LSQ+, CVPR workshops 2020; the logarithm is from S. Jain et al., Trained Quantization Thresholds, MLSys 2020: steps
stay positive, and an optimizer changes them by a fraction. Relative to the observed range they follow the size of
folded weights, which batch norm's statistics change in every step. They end at most where the observed range does:
integers beyond are unused, and an int8 network has no ReLU6 whose end the range of its input has.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import nn

from ptpipe_torch.int8.hardswish_grids import has_whole_steps, whole_steps
from ptpipe_torch.int8.observers import (
    ACTIVATION_FORMAT,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    make_qconfig,
    weight_format,
)
from ptpipe_torch.int8.read_ranges import limit_of
from ptpipe_torch.int8.straight_through import FoldedWeights, Grid, LearnedRange, StraightThrough
from ptpipe_torch.protocols import RangeReducer

Range: TypeAlias = tuple[torch.Tensor, torch.Tensor]
_FARTHER = torch.minimum, torch.maximum
_LOG_PARTS = math.log(1 / 8), 0.0
"""Logarithms of the smallest and the largest part of an observed range that a learned one is."""
_MIN_STEP_RATIO = 1 / 16
"""Of a channel's step to the mean of its layer: a nearly dead channel's would make its gradient any size."""


class ActivationFakeQuant(FusedMovingAvgObsFakeQuantize):
    """Fake quantization of activations with one scale per tensor; it observes the range in training only.

    The range is a moving average of each micro-batch's minimum and maximum, but never less than the last one's: half of
    the batches exceed their average, and would be cut off. It is frozen after the fraction `freeze_at` of the training.
    All state is in the state dict, under the names of torch's `FusedMovingAvgObsFakeQuantize`.
    """

    observer_enabled: torch.Tensor

    def __init__(self, freeze_at: float = 1.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.freeze_at = freeze_at
        self.all_reduce_range: RangeReducer | None = None
        """See `ptpipe_torch.RangeObserver`."""
        self._previous: Range | None = None  # before this forward pass
        self._current: Range | None = None  # of the calls in this forward pass

    def on_progress(self, fraction: float) -> None:
        """See `ptpipe_torch.TrainingCallback`."""
        self.observer_enabled.fill_(fraction < self.freeze_at)

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        """Fake-quantize `x`. `first`: whether this is the first of several calls in a forward pass; None: only one."""
        if x.device.type != "cpu":
            return self._forward_without_waiting(x, first)
        if self.training and self.observer_enabled.item():
            self._observe(x.detach(), first is not False)
        return self._round(x) if self.fake_quant_enabled.item() and self.has_range() else x

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        return _straight_through(x, self._grid(self.scale, self.zero_point))

    def _grid(self, scale: torch.Tensor, zero_point: torch.Tensor) -> Grid:
        return _grid_of(self.activation_post_process, scale, zero_point)

    def has_range(self) -> bool:
        """Return whether any batch was observed; until then values pass unchanged."""
        observer = self.activation_post_process
        return bool(observer.min_val <= observer.max_val)

    def _observe(self, x: torch.Tensor, first: bool, enabled: torch.Tensor | None = None) -> None:
        """Include a tensor in the range; where `enabled` is given and false, leave the range as it is."""
        observer = self.activation_post_process
        low, high = (limit.to(observer.min_val.dtype) for limit in torch.aminmax(x))
        if (read := limit_of(observer)) is not None:
            low, high = low.clamp(*read), high.clamp(*read)
        if self.all_reduce_range:
            low, high = self.all_reduce_range(low, high)
        limits = observer.min_val, observer.max_val
        if first or self._previous is None or self._current is None:
            self._previous = limits[0].clone(), limits[1].clone()
        else:  # the calls of one forward pass count as one batch
            low, high = torch.minimum(low, self._current[0]), torch.maximum(high, self._current[1])
        self._current = low, high
        rate = observer.averaging_constant
        for limit, before, now, farther in zip(limits, self._previous, (low, high), _FARTHER, strict=True):
            new = farther(before * (1 - rate) + now * rate, now)  # `before` is infinite at first
            limit.copy_(new if enabled is None else torch.where(enabled, new, limit))
        self._record_grid()

    def _record_grid(self) -> None:
        observer = self.activation_post_process
        self._record(observer.min_val.clamp(max=0), observer.max_val.clamp(min=0))

    def _record(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Record the grid of a range that includes zero."""
        observer = self.activation_post_process
        # The arithmetic of the observer's `calculate_qparams`, which reads values back.
        scale = torch.maximum((high - low) / float(observer.quant_max - observer.quant_min), observer.eps)
        zero_point = observer.quant_min - torch.round(low / scale)
        if has_whole_steps(observer):
            scale, zero_point = whole_steps(scale, zero_point, low, observer.quant_min)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point.clamp(observer.quant_min, observer.quant_max))

    def _forward_without_waiting(self, x: torch.Tensor, first: bool | None) -> torch.Tensor:
        """Fake-quantize `x` as `forward` does, and read nothing back: that would wait for the accelerator."""
        if self.training:
            self._observe(x.detach(), first is not False, self.observer_enabled.bool().squeeze())
        return self._round_without_waiting(x)

    def _round_without_waiting(self, x: torch.Tensor) -> torch.Tensor:
        if has_whole_steps(self.activation_post_process):  # torch's fused operator has grids of its own
            return self._rounded_if_observed(x)
        switch: torch.Tensor = self.observer_enabled
        self.observer_enabled = torch.zeros_like(switch)
        try:
            result: torch.Tensor = super().forward(x.float()).to(x.dtype)
        finally:
            self.observer_enabled = switch
        return result

    def _rounded_if_observed(self, x: torch.Tensor) -> torch.Tensor:
        observer = self.activation_post_process
        is_rounded = self.fake_quant_enabled.bool().squeeze() & (observer.min_val <= observer.max_val)
        return torch.where(is_rounded, self._round_on_device(x), x)

    def _round_on_device(self, x: torch.Tensor) -> torch.Tensor:
        return _round_on_device(self, x)


class FixedFakeQuant(FixedQParamsFakeQuantize):
    """Fake quantization whose grid is given. On an accelerator it reads nothing back; torch's own does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantize `x`."""
        if x.device.type != "cpu":
            return torch.where(self.fake_quant_enabled.bool(), _round_on_device(self, x), x)
        if not self.fake_quant_enabled.item():
            return x
        return _straight_through(x, _grid_of(self.activation_post_process, self.scale, self.zero_point))


def use_fixed_grids(prepared: nn.Module) -> None:
    """Let fake quantization whose grid is given be `FixedFakeQuant`, in place."""
    for layer in prepared.modules():
        if type(layer) is FixedQParamsFakeQuantize:
            layer.__class__ = FixedFakeQuant


class WeightFakeQuant(FusedMovingAvgObsFakeQuantize):
    """Symmetric fake quantization of weights, always enabled; the range is always that of the current weights."""

    observer_enabled: torch.Tensor

    def __init__(self, freeze_at: float = 1.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.freeze_at = freeze_at

    def on_progress(self, fraction: float) -> None:
        """See `ptpipe_torch.TrainingCallback`. Only records the state: it is a layer's batch norm that freezes."""
        self.observer_enabled.fill_(fraction < self.freeze_at)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Fake-quantize the weights of a layer."""
        return self._round(weight, self._max_abs(weight))

    def folded(self, weight: torch.Tensor, factor: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
        """Return the weights times a factor, fake-quantized, and divided by `divisor` unless that is None."""
        with torch.no_grad():
            scaled = weight * factor
            grid = self._grid(scaled, self._max_abs(scaled))
        result: torch.Tensor = FoldedWeights.apply(weight, factor, divisor, scaled, grid)  # type: ignore[no-untyped-call]  # torch's
        return result

    def _max_abs(self, weight: torch.Tensor) -> torch.Tensor:
        channels = [self.ch_axis] if self.is_per_channel else []
        others = [axis for axis in range(weight.dim()) if axis not in channels]
        return weight.detach().abs().amax(others)

    def _round(self, weight: torch.Tensor, max_abs: torch.Tensor) -> torch.Tensor:
        return _straight_through(weight, self._grid(weight, max_abs))

    def _grid(self, weight: torch.Tensor, limit: torch.Tensor) -> Grid:
        """Return the grid of the range -`limit` to `limit`, one for each channel or one alone, and record both."""
        scale = self._step(limit)
        self._record(limit, scale)
        scale, observer = self._along_channels(scale, weight), self.activation_post_process
        return Grid(scale.reciprocal(), scale, observer.quant_min, observer.quant_max)

    def _step(self, limit: torch.Tensor) -> torch.Tensor:
        observer = self.activation_post_process
        return torch.maximum(limit / ((observer.quant_max - observer.quant_min) / 2), observer.eps)

    def _along_channels(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self.is_per_channel:
            return values
        return values.reshape([-1 if axis == self.ch_axis else 1 for axis in range(weight.dim())])

    def _record(self, max_abs: torch.Tensor, scale: torch.Tensor) -> None:
        observer, scale = self.activation_post_process, scale.reshape(-1)
        if observer.min_val.shape != max_abs.shape or self.scale.shape != scale.shape:
            observer.min_val.resize_(max_abs.shape)
            observer.max_val.resize_(max_abs.shape)
            self.scale.resize_(scale.shape)
            self.zero_point.resize_(scale.shape)
        observer.max_val.copy_(max_abs)
        torch.neg(observer.max_val, out=observer.min_val)
        self.scale.copy_(scale)
        self.zero_point.zero_()


class LearnedActivationFakeQuant(ActivationFakeQuant):
    """Fake quantization of activations whose range is learned: at each end a part of the observed one."""

    undecayed = ("log_part",)
    """See `ptpipe_torch.Undecayed`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log_part = nn.Parameter(torch.zeros(2))

    def on_progress(self, fraction: float) -> None:
        """See `ptpipe_torch.TrainingCallback`."""
        super().on_progress(fraction)
        _project(self.log_part)

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]  # as torch's
        """Return scale and zero point of the learned range."""
        observer: Any = self.activation_post_process
        limits = self._limits() if self.has_range() else (observer.min_val, observer.max_val)
        found: tuple[torch.Tensor, torch.Tensor] = observer._calculate_qparams(*(limit.detach() for limit in limits))
        return found

    def _limits(self) -> Range:
        observer, (low, high) = self.activation_post_process, _part(self.log_part)
        return observer.min_val.clamp(max=0) * low, observer.max_val.clamp(min=0) * high

    def _round_without_waiting(self, x: torch.Tensor) -> torch.Tensor:
        return self._rounded_if_observed(x)

    def _round_on_device(self, x: torch.Tensor) -> torch.Tensor:
        return self._round(x)

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self._limits()
        self._record(low.detach(), high.detach())
        grid = self._grid(self.scale, self.zero_point) if x.device.type == "cpu" else self._grid_on_device(x.dim())
        num_features = x.shape[1:].numel()  # of a sample: the loss is a mean over samples
        factor = _gradient_factor(num_features, self.activation_post_process.quant_max, self.scale).reshape(())
        return _learned(x, low, high, grid, factor)

    def _grid_on_device(self, num_dims: int) -> Grid:
        """Return the recorded grid for a tensor of `num_dims` axes, without reading it back."""
        observer, scale = self.activation_post_process, self.scale.squeeze()
        # An axis makes numbers of 16 bits comparable with it in float32; a tensor without one would get one.
        offset = self.zero_point.float().reshape([1] * min(1, num_dims))
        return Grid(scale.reciprocal(), scale, observer.quant_min - offset, observer.quant_max - offset)


class LearnedWeightFakeQuant(WeightFakeQuant):
    """Symmetric fake quantization of weights whose range is learned: a part of that of the current weights."""

    undecayed = ("log_part",)
    """See `ptpipe_torch.Undecayed`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log_part = nn.Parameter(torch.zeros(1))

    def on_progress(self, fraction: float) -> None:
        """See `ptpipe_torch.TrainingCallback`."""
        super().on_progress(fraction)
        _project(self.log_part)

    def fit(self, weight: torch.Tensor) -> None:
        """Make room for the channels of the weights, before anything is learned."""
        if self.is_per_channel:
            self.log_part = nn.Parameter(torch.zeros(weight.shape[self.ch_axis]))

    def _round(self, weight: torch.Tensor, max_abs: torch.Tensor) -> torch.Tensor:
        limit = (max_abs * _part(self.log_part)).reshape(max_abs.shape)
        grid = self._grid(weight, limit.detach())
        num_values, quant_max = weight.numel() / max_abs.numel(), self.activation_post_process.quant_max
        factor = _gradient_factor(num_values, quant_max, self._step(limit.detach())).reshape(limit.shape)
        limit, factor = self._along_channels(limit, weight), self._along_channels(factor, weight)
        return _learned(weight, -limit, limit, grid, factor)


def fit_learned_ranges(prepared: nn.Module) -> None:
    """Give each learned range of a prepared network the shape that its layer's weights require, in place."""
    for layer in prepared.modules():
        if isinstance(fake_quant := getattr(layer, "weight_fake_quant", None), LearnedWeightFakeQuant):
            fake_quant.fit(layer.weight)  # type: ignore[arg-type]  # a layer with fake quantization has weights


def _part(log_part: torch.Tensor) -> torch.Tensor:
    limited = log_part.detach().clamp(*_LOG_PARTS)
    # Training begins at a limit, where the gradient of a clamp is 1 or, from torch 2.14 on, 0.
    return torch.where(log_part == limited, log_part, limited).exp()


def _project(log_part: nn.Parameter) -> None:
    """Bring what an optimizer has moved outside of its limits back to them, in place: there it has no gradient."""
    log_part.detach().clamp_(*_LOG_PARTS)


def _gradient_factor(num_values: float, quant_max: int, step: torch.Tensor) -> torch.Tensor:
    """Return what the gradient of a range is multiplied by, so that a step of SGD is that of LSQ.

    LSQ multiplies the gradient of a step s by g = 1 / sqrt(`num_values` * `quant_max`) (section 2.2). That of log s is
    s times that of s, and log s has to change by 1 / s times what s does: g / s**2 in all.
    """
    floor = _MIN_STEP_RATIO * step.mean()
    return 1 / (math.sqrt(num_values * quant_max) * torch.maximum(step, floor).square())


def qat_qconfig(
    *,
    per_channel: bool,
    freeze_at: float,
    narrow_weights: bool = False,
    learned_step_size: bool = False,
) -> Any:
    """Return the fake quantization of activations and weights.

    `per_channel`: one scale for each output channel of a weight. `freeze_at`: fraction of the training after which
    activation ranges are frozen. `narrow_weights`: see `weight_format`. `learned_step_size`: learn ranges.
    """
    activation = _factory(
        LearnedActivationFakeQuant if learned_step_size else ActivationFakeQuant,
        observer=MovingAverageMinMaxObserver,
        **ACTIVATION_FORMAT,
        freeze_at=freeze_at,
    )
    weight = _factory(
        LearnedWeightFakeQuant if learned_step_size else WeightFakeQuant,
        observer=MovingAveragePerChannelMinMaxObserver if per_channel else MovingAverageMinMaxObserver,
        **weight_format(per_channel=per_channel, narrow=narrow_weights),
        freeze_at=freeze_at,
    )
    return make_qconfig(activation, weight)


def _factory(type_: Any, **arguments: Any) -> Any:
    return type_.with_args(**arguments)


def _grid_of(observer: Any, scale: torch.Tensor, zero_point: torch.Tensor) -> Grid:
    """Return the grid as numbers; they are read back."""
    offset = int(zero_point.item())
    return Grid(scale.reciprocal().item(), scale.item(), observer.quant_min - offset, observer.quant_max - offset)


def _round_on_device(fake_quant: Any, x: torch.Tensor) -> torch.Tensor:
    observer = fake_quant.activation_post_process
    grid = fake_quant.scale, fake_quant.zero_point, observer.quant_min, observer.quant_max
    return torch.fake_quantize_per_tensor_affine(x.float(), *grid).to(x.dtype)


def _straight_through(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    result: torch.Tensor = StraightThrough.apply(x, grid)  # type: ignore[no-untyped-call]  # torch's
    return result


def _learned(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, grid: Grid, factor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = LearnedRange.apply(x, low, high, grid, factor)  # type: ignore[no-untyped-call]  # torch's
    return result
