"""Observers and fake quantization of `torch.ao`, and what calibration on several workers needs to know of observers.

Shape legend: C histogram bins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ptpipe_torch.int8.engine import deprecations_silenced

with deprecations_silenced():
    from torch.ao.quantization import (
        FakeQuantizeBase,
        FixedQParamsObserver,
        FusedMovingAvgObsFakeQuantize,
        HistogramObserver,
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
        ObserverBase,
        PerChannelMinMaxObserver,
        PlaceholderObserver,
        QConfig,
    )

# Re-exported from torch.ao.
__all__ = ["FusedMovingAvgObsFakeQuantize", "HistogramObserver", "MovingAverageMinMaxObserver"]
__all__ += ["MovingAveragePerChannelMinMaxObserver", "PlaceholderObserver"]

ACTIVATION_OBSERVERS: dict[str, Any] = {
    "min_max": MinMaxObserver,
    "moving_average": MovingAverageMinMaxObserver,
    "histogram": HistogramObserver,
}


def make_qconfig(activation: Any, weight: Any) -> Any:
    """Return the QConfig of these observer factories."""
    return QConfig(activation=activation, weight=weight)  # type: ignore[no-untyped-call]  # torch.ao is partly typed


def max_activation_level(*, reduce_range: bool) -> int:
    """Return the largest integer of an activation: 255, or 127 to keep sums of byte products within 16 bits."""
    return 127 if reduce_range else 255


def static_qconfig(observer: str, *, per_channel: bool, reduce_range: bool) -> Any:
    """Return the observers of activations (quint8, affine) and weights (qint8, symmetric) for calibration.

    `observer`: a key of `ACTIVATION_OBSERVERS`. `per_channel`: one scale for each output channel of a weight.
    """
    activation = ACTIVATION_OBSERVERS[observer].with_args(
        dtype=torch.quint8,
        qscheme=torch.per_tensor_affine,
        quant_min=0,
        quant_max=max_activation_level(reduce_range=reduce_range),
    )
    return make_qconfig(activation, weight_observer(per_channel=per_channel))


def weight_observer(*, per_channel: bool) -> Any:
    """Return the factory of observers of weights (qint8, symmetric)."""
    if per_channel:
        return PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
    return MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)


def is_observer(module: nn.Module) -> bool:
    """Return whether a module is an observer or a fake quantization: in a prepared graph it marks an int8 tensor."""
    return isinstance(module, ObserverBase | FakeQuantizeBase)


def observes_range(module: nn.Module) -> bool:
    """Return whether a module is an observer, or fake quantization with one, whose range comes from data.

    The range of some operators is fixed instead: a sigmoid's is 0 to 1.
    """
    observer = getattr(module, "activation_post_process", module)
    is_fixed = isinstance(observer, FixedQParamsObserver)
    return is_observer(module) and isinstance(observer, ObserverBase) and not is_fixed and hasattr(observer, "min_val")


def min_max_of(x: torch.Tensor, observer: nn.Module) -> torch.Tensor:
    """Return the minimum and maximum that an observer finds in `x`, shape (2,); (inf, -inf) if it finds no value."""
    if not x.numel():
        return torch.tensor([torch.inf, -torch.inf])
    limits = torch.stack(torch.aminmax(x))
    if isinstance(observer, HistogramObserver) and limits.isinf().any():  # which histograms ignore
        return min_max_of(x[x.abs() != torch.inf], observer)
    return limits


def has_range(limits: torch.Tensor) -> bool:
    """Return whether `limits`, of shape (2,), are the minimum and maximum of at least one value (NaN included)."""
    return not limits[0] > limits[1]


def histogram_counts(x: torch.Tensor, observer: HistogramObserver, limits: torch.Tensor) -> torch.Tensor:
    """Return the counts (C,) of the values of `x` in the observer's bins between `limits[0]` and `limits[1]`."""
    if not has_range(limits):
        return torch.zeros(observer.bins)
    min_val, max_val = limits.tolist()
    # Values outside the range aren't counted, but for an empty range histc takes the tensor's own.
    finite = x[x.abs() != torch.inf] if min_val == max_val else x
    return torch.histc(finite, observer.bins, min=min_val, max=max_val)


def merge_histogram(observer: HistogramObserver, limits: torch.Tensor, counts_C: torch.Tensor) -> None:
    """Update a histogram as if it had observed values with these counts.

    `limits`: the observer's range including these values, shape (2,).
    """
    min_val, max_val = limits
    if observer.min_val <= observer.max_val:
        before = observer.histogram, observer.min_val.clone(), observer.max_val.clone()
        counts_C = observer._combine_histograms(*before, counts_C, min_val, max_val)
    observer.histogram.detach_().resize_(counts_C.shape).copy_(counts_C)
    observer.min_val.copy_(min_val)
    observer.max_val.copy_(max_val)
