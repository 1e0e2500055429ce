"""Fake quantization for QAT: round to the int8 grid forward, straight-through gradient backward.

Values and gradients equal those of torch's reference, the fake-quantize operators of ATen, bit for bit, in a quarter
of the time on a CPU: whole-tensor operators use vector instructions, and the mask of clipped values is kept as the
rounded numbers themselves. All arithmetic is float32; under autocast only the result has the input's dtype.

Formula: B. Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference, CVPR 2018, section 3; straight-through gradient: Y. Bengio et al., arXiv 1308.3432, section 4.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from ptpipe_torch.int8.observers import (
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    make_qconfig,
    max_activation_level,
    weight_limits,
)
from ptpipe_torch.protocols import RangeReducer

Range: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class StraightThrough(torch.autograd.Function):
    """`clamp(round(x / scale), minimum, maximum) * scale`, whose gradient is 1 where nothing was clipped, else 0.

    `minimum` and `maximum` are the integer range shifted by the zero point. `inverse` is 1 / `scale` rounded to
    float32: x is multiplied by it, as in torch's int8 kernels. Both are numbers, or tensors that broadcast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        inverse: float | torch.Tensor,
        scale: float | torch.Tensor,
        minimum: int,
        maximum: int,
    ) -> torch.Tensor:
        # empty_like keeps the strides also for a single channel, whose layout is ambiguous: the next convolution
        # would otherwise fall back to the slower layout.
        exact = x.dtype in (torch.float32, torch.float64)
        rounded = torch.empty_like(x, dtype=x.dtype if exact else torch.float32)
        if exact:
            torch.mul(x, inverse, out=rounded).round_()
            result = torch.clamp(rounded, minimum, maximum, out=torch.empty_like(x)).mul_(scale)
        else:
            rounded.copy_(x).mul_(inverse).round_()
            result = torch.empty_like(x).copy_(rounded.clamp(minimum, maximum).mul_(scale))
            # bfloat16 represents every integer to 256, and rounding larger ones moves none across the limits.
            rounded = torch.empty_like(x).copy_(rounded)
        ctx.save_for_backward(rounded)
        ctx.unclipped = (minimum - 0.5, maximum + 0.5)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (rounded,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(gradient, rounded, *ctx.unclipped), None, None, None, None


class ActivationFakeQuant(FusedMovingAvgObsFakeQuantize):
    """Fake quantization of activations with one scale per tensor; it observes the range in training only.

    The range is a moving average of each micro-batch's minimum and maximum, frozen after the fraction `freeze_at` of
    the training. All state is in the state dict, under the names of torch's `FusedMovingAvgObsFakeQuantize`.
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
        if x.device.type != "cpu" and first is None and self.all_reduce_range is None:
            return self._forward_in_one_kernel(x)
        if self.training and self.observer_enabled.item():
            self._observe(x.detach(), first is not False)
        if not (self.fake_quant_enabled.item() and self.has_range()):
            return x
        zero_point, observer = int(self.zero_point.item()), self.activation_post_process
        bounds = observer.quant_min - zero_point, observer.quant_max - zero_point
        return _fake_quantize(x, self.scale.reciprocal().item(), self.scale.item(), bounds)

    def has_range(self) -> bool:
        """Return whether any batch was observed; until then values pass unchanged."""
        observer = self.activation_post_process
        return bool(observer.min_val <= observer.max_val)

    def _observe(self, x: torch.Tensor, first: bool) -> None:
        observer = self.activation_post_process
        min_val, max_val = (limit.to(observer.min_val.dtype) for limit in torch.aminmax(x))
        if self.all_reduce_range:
            min_val, max_val = self.all_reduce_range(min_val, max_val)
        if first or self._previous is None or self._current is None:
            self._previous = observer.min_val.clone(), observer.max_val.clone()
        else:  # the calls of one forward pass count as one batch
            min_val, max_val = torch.minimum(min_val, self._current[0]), torch.maximum(max_val, self._current[1])
        self._current = min_val, max_val
        previous_min, previous_max = self._previous
        if previous_min <= previous_max:
            min_val = previous_min + observer.averaging_constant * (min_val - previous_min)
            max_val = previous_max + observer.averaging_constant * (max_val - previous_max)
        observer.min_val.copy_(min_val)
        observer.max_val.copy_(max_val)
        scale, zero_point = observer.calculate_qparams()
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def _forward_in_one_kernel(self, x: torch.Tensor) -> torch.Tensor:
        # Reading a scalar back synchronizes the accelerator, so torch's fused operator is faster there.
        switch: torch.Tensor = self.observer_enabled
        if not self.training:
            self.observer_enabled = torch.zeros_like(switch)
        try:
            result: torch.Tensor = super().forward(x.float()).to(x.dtype)
        finally:
            self.observer_enabled = switch
        return result


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
        observer = self.activation_post_process
        channels = [self.ch_axis] if self.is_per_channel else []
        others = [axis for axis in range(weight.dim()) if axis not in channels]
        max_abs = weight.detach().abs().amax(others)
        scale = torch.maximum(max_abs / ((observer.quant_max - observer.quant_min) / 2), observer.eps)
        self._record(max_abs, scale)
        if self.is_per_channel:
            scale = scale.reshape([-1 if axis in channels else 1 for axis in range(weight.dim())])
        return _fake_quantize(weight, scale.reciprocal(), scale, (observer.quant_min, observer.quant_max))

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


def qat_qconfig(*, per_channel: bool, reduce_range: bool, freeze_at: float, narrow_weights: bool = False) -> Any:
    """Return the fake quantization of activations (quint8, affine) and weights (qint8, symmetric).

    `per_channel`: one scale for each output channel of a weight. `reduce_range`: 7-bit activations. `freeze_at`:
    fraction of the training after which activation ranges are frozen. `narrow_weights`: see `weight_observer`.
    """
    weight_min, weight_max = weight_limits(narrow=narrow_weights)
    activation = _factory(
        ActivationFakeQuant,
        observer=MovingAverageMinMaxObserver,
        quant_min=0,
        quant_max=max_activation_level(reduce_range=reduce_range),
        dtype=torch.quint8,
        qscheme=torch.per_tensor_affine,
        freeze_at=freeze_at,
    )
    weight = _factory(
        WeightFakeQuant,
        observer=MovingAveragePerChannelMinMaxObserver if per_channel else MovingAverageMinMaxObserver,
        quant_min=weight_min,
        quant_max=weight_max,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
        freeze_at=freeze_at,
    )
    return make_qconfig(activation, weight)


def _factory(type_: Any, **arguments: Any) -> Any:
    return type_.with_args(**arguments)


def _fake_quantize(
    x: torch.Tensor, inverse: float | torch.Tensor, scale: float | torch.Tensor, bounds: tuple[int, int]
) -> torch.Tensor:
    result: torch.Tensor = StraightThrough.apply(x, inverse, scale, *bounds)  # type: ignore[no-untyped-call]  # torch's
    return result
