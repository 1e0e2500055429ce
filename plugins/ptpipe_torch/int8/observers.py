"""Observers and fake quantization of `torch.ao`: which ones a QConfig has, and which modules of a network they are."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_torch.int8.constructors import copying_constructor
from ptpipe_torch.int8.count_observers import EntropyObserver, MseObserver, PercentileObserver
from ptpipe_torch.int8.engine import deprecations_silenced

with deprecations_silenced():
    from torch.ao.quantization import (
        FakeQuantizeBase,
        FixedQParamsFakeQuantize,
        FixedQParamsObserver,
        FusedMovingAvgObsFakeQuantize,
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
        ObserverBase,
        PerChannelMinMaxObserver,
        PlaceholderObserver,
        QConfig,
    )

# Re-exported from torch.ao.
__all__ = ["FixedQParamsFakeQuantize", "FusedMovingAvgObsFakeQuantize", "MovingAverageMinMaxObserver"]
__all__ += ["MovingAveragePerChannelMinMaxObserver", "PlaceholderObserver"]

ACTIVATION_OBSERVERS: dict[str, Any] = {
    "min_max": MinMaxObserver,
    "moving_average": MovingAverageMinMaxObserver,
    "mse": MseObserver,
    "percentile": PercentileObserver,
    "entropy": EntropyObserver,
    "histogram": MseObserver,  # its former name, in the recipes of shipped models
}

ACTIVATION_FORMAT = {"dtype": torch.quint8, "qscheme": torch.per_tensor_affine, "quant_min": 0, "quant_max": 255}
"""The arguments by which observers make integers of activations."""
NARROW = 64
"""Largest integer of weights where sums have 16 bits: 2 * 255 * 64 = 32,640 < 2^15."""

_USUAL = 2.0**-10
_SMALLEST_STEP = 1e-30
"""Its products with other steps are normal numbers of float32."""


def make_qconfig(activation: Any, weight: Any) -> Any:
    """Return the QConfig of these observer factories."""
    constructors = map(copying_constructor, (activation, weight))
    return QConfig(*constructors)  # type: ignore[no-untyped-call]  # torch.ao is partly typed


def weight_format(*, per_channel: bool, narrow: bool = False) -> dict[str, Any]:
    """Return the arguments by which observers make integers of weights (qint8, symmetric).

    `per_channel`: one scale for each output channel. `narrow`: integers of -64 to 64, so that two products with 8-bit
    activations add up within 16 bits; else -127 to 127. The largest weight is the last integer: with -128, the range
    would end between two, and float32's noise would decide which of them a negative one becomes.
    """
    qscheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    quant_max = NARROW if narrow else 127
    return {"dtype": torch.qint8, "qscheme": qscheme, "quant_min": -quant_max, "quant_max": quant_max}


def static_qconfig(observer: str, *, per_channel: bool, narrow_weights: bool = False, **options: float) -> Any:
    """Return the observers of activations and weights for calibration.

    `observer`: a key of `ACTIVATION_OBSERVERS`; `options`: its own. For the others see `weight_format`.
    """
    activation = ACTIVATION_OBSERVERS[observer].with_args(**options, **ACTIVATION_FORMAT)
    return make_qconfig(activation, weight_observer(per_channel=per_channel, narrow=narrow_weights))


def weight_observer(*, per_channel: bool, narrow: bool = False) -> Any:
    """Return the factory of observers of weights; the parameters are those of `weight_format`."""
    observer: Any = _fine_per_channel_observer if per_channel else fine_min_max_observer
    return observer.with_args(**weight_format(per_channel=per_channel, narrow=narrow))


def is_observer(module: nn.Module) -> bool:
    """Return whether a module is an observer or a fake quantization: in a prepared graph it marks an int8 tensor."""
    return isinstance(module, ObserverBase | FakeQuantizeBase)


def observer_at(prepared: GraphModule, node: Node) -> nn.Module | None:
    """Return the observer or fake quantization that a node of a prepared graph calls, None for other nodes."""
    module = prepared.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if module is not None and is_observer(module) else None


def operator_at(network: GraphModule, node: Node) -> Any:
    """Return what a node computes: the type of the module that it calls, a function, or the name of a method."""
    return type(network.get_submodule(str(node.target))) if node.op == "call_module" else node.target


def mix_in(observer: Any, mixin: type) -> None:
    """Let an observer be of its present class and, before that, of `mixin`, in place."""
    if not isinstance(observer, mixin):
        observer.__class__ = _mixed(mixin, observer.__class__)


class _FineSteps:
    """Mixin of an observer: torch's smallest step, 1.2e-7, falls with the largest value, where that is below 0.001.

    A weight of 1e-8, as that of targets in SI units, would be no step. Zeros alone keep torch's.
    """

    eps: torch.Tensor

    def _calculate_qparams(self, min_val: torch.Tensor, max_val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = torch.stack([min_val, max_val]).abs().max()
        usual = self.eps
        if 0 < largest < _USUAL:
            self.eps = (usual * (largest / _USUAL)).clamp(min=_SMALLEST_STEP).to(usual.dtype)
        try:
            qparams: tuple[torch.Tensor, torch.Tensor] = super()._calculate_qparams(min_val, max_val)  # type: ignore[misc]  # torch.ao's
        finally:
            self.eps = usual
        return qparams


@functools.cache
def _mixed(mixin: type, type_: Any) -> Any:
    return type(type_.__name__, (mixin, type_), {"__module__": mixin.__module__})  # else that of the metaclass


fine_min_max_observer, _fine_per_channel_observer = (
    _mixed(_FineSteps, type_) for type_ in (MinMaxObserver, PerChannelMinMaxObserver)
)
"""Types of observers."""


def observer_calls(prepared: GraphModule) -> dict[nn.Module, list[Node]]:
    """Return the nodes that call each observer or fake quantization of a prepared graph: tensors may share one."""
    calls: dict[nn.Module, list[Node]] = defaultdict(list)
    for node in prepared.graph.find_nodes(op="call_module"):
        if (observer := observer_at(prepared, node)) is not None:
            calls[observer].append(node)
    return calls


def use_observer(prepared: GraphModule, calls: Iterable[Node], observer: nn.Module) -> None:
    """Let these nodes call another observer, in place."""
    for call in calls:
        prepared.set_submodule(str(call.target), observer)


def observes_range(module: nn.Module) -> bool:
    """Return whether a module is an observer, or fake quantization with one, whose range comes from data.

    The range of some operators is fixed instead: a sigmoid's is 0 to 1.
    """
    observer = getattr(module, "activation_post_process", module)
    is_from_data = fixed_grid(module) is None and hasattr(observer, "min_val")
    return is_observer(module) and isinstance(observer, ObserverBase) and is_from_data


def observes_activation_range(module: nn.Module) -> bool:
    """Return whether `observes_range` holds of a module, and its integers are those of activations."""
    return observes_range(module) and getattr(module, "dtype", None) is torch.quint8


def fixed_grid(module: nn.Module) -> tuple[float, int] | None:
    """Return scale and zero point of an observer or fake quantization whose range does not come from data."""
    observer = getattr(module, "activation_post_process", module)
    if not isinstance(observer, FixedQParamsObserver):
        return None
    return float(observer.scale), int(observer.zero_point)
