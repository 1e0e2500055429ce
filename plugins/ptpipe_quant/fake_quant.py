"""Fake quantization for training: round to the int8 grid forward, pass the gradient straight through backward.

The results are those of torch's reference (`torch.fake_quantize_per_tensor_affine`, `_per_channel_affine`), bit for
bit, values and gradients, in a quarter of its time on a CPU: whole-tensor operators that use vector instructions,
and a mask of clipped values kept as the rounded numbers themselves. All arithmetic is float32 whatever comes in;
under autocast only the result goes back to the incoming type.

Formula: B. Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference, CVPR 2018, section 3; straight-through gradient: Y. Bengio et al., arXiv 1308.3432, section 4.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from ptpipe_quant.torch_ao import (
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    QConfig,
    greatest_level,
)
from ptpipe_torch.protocols import RangeReducer

Range: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class StraightThrough(torch.autograd.Function):  # type: ignore[misc]  # torch comes without types
    """`clamp(round(x / scale), low, high) * scale`, whose gradient is 1 where nothing was clipped and 0 elsewhere.

    `low` and `high` are the integer range shifted by the zero point. `inverse` is 1 / `scale` rounded to float32,
    and the division is a product with it, as in torch's int8 kernels. Both are numbers, or tensors that broadcast.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, inverse: float | torch.Tensor, scale: float | torch.Tensor, low: int, high: int
    ) -> torch.Tensor:
        # empty_like keeps the strides also where a single channel leaves the layout open: the convolution that
        # comes next would otherwise fall back to the slow one.
        exact = x.dtype in (torch.float32, torch.float64)
        rounded = torch.empty_like(x, dtype=x.dtype if exact else torch.float32)
        if exact:
            torch.mul(x, inverse, out=rounded).round_()
            result = torch.clamp(rounded, low, high, out=torch.empty_like(x)).mul_(scale)
        else:
            rounded.copy_(x).mul_(inverse).round_()
            result = torch.empty_like(x).copy_(rounded.clamp(low, high).mul_(scale))
            # bfloat16 holds every integer to 256, and rounding further out moves none across `low` or `high`.
            rounded = torch.empty_like(x).copy_(rounded)
        ctx.save_for_backward(rounded)
        ctx.inside = (low - 0.5, high + 0.5)
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch comes without types
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (rounded,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(gradient, rounded, *ctx.inside), None, None, None, None


class ActivationFakeQuant(FusedMovingAvgObsFakeQuantize):  # type: ignore[misc]  # torch comes without types
    """Fake quantization of activations, one scale a tensor; it watches the range in training only.

    The range is a moving average of each micro-batch's least and greatest value. From the share `freeze_at` of the
    training on it stays as it is. All state is in the state dict, under the names that torch.ao gives it.
    """

    observer_enabled: torch.Tensor

    def __init__(self, freeze_at: float = 1.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.freeze_at = freeze_at
        self.all_reduce_range: RangeReducer | None = None
        """See `ptpipe_torch.RangeObserver`."""
        self._before: Range | None = None
        self._seen: Range | None = None

    def on_progress(self, fraction: float) -> None:
        """See `ptpipe_torch.TrainingCallback`."""
        self.observer_enabled.fill_(fraction < self.freeze_at)

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        """Fake-quantize `x`. `first`: of several calls in one forward pass, whether it is the first; None: the only."""
        if x.device.type != "cpu" and first is None and self.all_reduce_range is None:
            return self._forward_in_one_kernel(x)
        if self.training and self.observer_enabled.item():
            self._watch(x.detach(), first is not False)
        if not (self.fake_quant_enabled.item() and self.has_range()):
            return x
        zero_point, observer = int(self.zero_point.item()), self.activation_post_process
        low, high = observer.quant_min - zero_point, observer.quant_max - zero_point
        inverse, scale = self.scale.reciprocal().item(), self.scale.item()
        result: torch.Tensor = StraightThrough.apply(x, inverse, scale, low, high)
        return result

    def has_range(self) -> bool:
        """Whether anything was seen; until then values go through as they are."""
        observer = self.activation_post_process
        return bool(observer.min_val <= observer.max_val)

    def _watch(self, x: torch.Tensor, first: bool) -> None:
        observer = self.activation_post_process
        low, high = (extreme.to(observer.min_val.dtype) for extreme in torch.aminmax(x))
        if self.all_reduce_range:
            low, high = self.all_reduce_range(low, high)
        if first or self._before is None or self._seen is None:
            self._before = observer.min_val.clone(), observer.max_val.clone()
        else:
            low, high = torch.minimum(low, self._seen[0]), torch.maximum(high, self._seen[1])
        self._seen = low, high
        before_low, before_high = self._before
        if before_low <= before_high:
            low = before_low + observer.averaging_constant * (low - before_low)
            high = before_high + observer.averaging_constant * (high - before_high)
        observer.min_val.copy_(low)
        observer.max_val.copy_(high)
        scale, zero_point = observer.calculate_qparams()
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def _forward_in_one_kernel(self, x: torch.Tensor) -> torch.Tensor:
        # Reading a number back would make an accelerator wait: there torch's fused operator is the quicker one.
        switch: torch.Tensor = self.observer_enabled
        if not self.training:
            self.observer_enabled = torch.zeros_like(switch)
        try:
            result: torch.Tensor = super().forward(x.float()).to(x.dtype)
        finally:
            self.observer_enabled = switch
        return result


class WeightFakeQuant(FusedMovingAvgObsFakeQuantize):  # type: ignore[misc]  # torch comes without types
    """Fake quantization of weights, symmetric, always on; the range is always that of the weights as they are."""

    def __init__(self, freeze_at: float = 1.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.freeze_at = freeze_at

    def on_progress(self, fraction: float) -> None:
        """See `ptpipe_torch.TrainingCallback`. Nothing freezes here: a layer's batch norm does when this says so."""
        self.observer_enabled.fill_(fraction < self.freeze_at)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Fake-quantize the weights of a layer."""
        observer = self.activation_post_process
        channels = [self.ch_axis] if self.is_per_channel else []
        others = [axis for axis in range(weight.dim()) if axis not in channels]
        greatest = weight.detach().abs().amax(others)
        scale = torch.maximum(greatest / ((observer.quant_max - observer.quant_min) / 2), observer.eps)
        self._keep(greatest, scale)
        if self.is_per_channel:
            scale = scale.reshape([-1 if axis in channels else 1 for axis in range(weight.dim())])
        bounds = observer.quant_min, observer.quant_max
        result: torch.Tensor = StraightThrough.apply(weight, scale.reciprocal(), scale, *bounds)
        return result

    def _keep(self, greatest: torch.Tensor, scale: torch.Tensor) -> None:
        observer, scale = self.activation_post_process, scale.reshape(-1)
        if observer.min_val.shape != greatest.shape or self.scale.shape != scale.shape:
            observer.min_val.resize_(greatest.shape)
            observer.max_val.resize_(greatest.shape)
            self.scale.resize_(scale.shape)
            self.zero_point.resize_(scale.shape)
        observer.max_val.copy_(greatest)
        torch.neg(observer.max_val, out=observer.min_val)
        self.scale.copy_(scale)
        self.zero_point.zero_()


def qat_qconfig(*, per_channel: bool, reduce_range: bool, freeze_at: float) -> Any:
    """Fake quantization of activations (quint8, affine) and weights (qint8, symmetric)."""
    activation = ActivationFakeQuant.with_args(
        observer=MovingAverageMinMaxObserver,
        quant_min=0,
        quant_max=greatest_level(reduce_range=reduce_range),
        dtype=torch.quint8,
        qscheme=torch.per_tensor_affine,
        freeze_at=freeze_at,
    )
    weight = WeightFakeQuant.with_args(
        observer=MovingAveragePerChannelMinMaxObserver if per_channel else MovingAverageMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
        freeze_at=freeze_at,
    )
    return QConfig(activation=activation, weight=weight)
