"""All that is used of `torch.ao.quantization`, in one place.

torch.ao warns that it will be removed (it is still in torch 2.15); this file alone imports it and silences that
warning, and replacing it is a change to this file. `tests/plugins/ptpipe_quant/test_torch_ao.py` fails when
something of it moves. What is used: FX graph mode's `fuse`, `prepare` and `convert`, which `prepare_fx`,
`prepare_qat_fx` and `convert_fx` are made of. The latter trace the network themselves and record a stack trace at
every node, which imports torch's compiler (2 s); here the traced graph is handed in.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from ptpipe_torch.int8.fx_cache import release_networks
from ptpipe_torch.int8.int8_state import quantized_tensors


@contextmanager
def quietly() -> Iterator[None]:
    """Silence torch.ao's announcement of its removal inside the `with`."""
    with quantized_tensors():
        warnings.filterwarnings("ignore", r"(?s).*torch\.ao\.quantization is deprecated", DeprecationWarning)
        yield


with quietly():
    import torch.ao.nn.intrinsic.qat as fused_qat_layers
    import torch.ao.nn.qat as qat_layers
    import torch.ao.nn.quantized.dynamic as dynamic_layers
    from torch.ao.nn.quantized.modules.utils import WeightedQuantizedModule
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
        get_default_qat_qconfig_mapping,
        get_default_qconfig_mapping,
    )
    from torch.ao.quantization import fx as graph_mode
    from torch.ao.quantization.backend_config import get_native_backend_config
    from torch.ao.quantization.fx.custom_config import FuseCustomConfig
    from torch.ao.quantization.fx.tracer import QuantizationTracer

__all__ = [
    "FakeQuantizeBase",
    "FusedMovingAvgObsFakeQuantize",
    "HistogramObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "ObserverBase",
    "QConfig",
    "Scopes",
    "add_counts",
    "add_observers",
    "convert",
    "counts_over",
    "extremes_of",
    "fold_batch_norms",
    "folded_weight",
    "fused_relu",
    "greatest_level",
    "has_int8_weights",
    "int8_weight",
    "is_range",
    "is_range_observer",
    "is_watching",
    "qconfig_mapping",
    "quietly",
    "static_qconfig",
    "swap_dynamic_linears",
    "trace",
    "watches_range",
]

Scopes: TypeAlias = Mapping[str, tuple[str, Any]]
"""For each node of a graph: path and type of the module that it stands in."""

ACTIVATION_OBSERVERS = {
    "min_max": MinMaxObserver,
    "moving_average": MovingAverageMinMaxObserver,
    "histogram": HistogramObserver,
}

# Weights of these are bare tensors of the graph: torch packs them into objects that only pickle can store.
_FLOAT_FUNCTIONS = tuple(
    getattr(nn.functional, name)
    for name in ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
)
# No int8 kernels, or none whose weights are worth it in a classifier of images.
_FLOAT_LAYERS = (nn.Embedding, nn.EmbeddingBag, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_QAT_LAYERS = {
    getattr(home, name + dimensions): "ReLU" in name
    for home, name in (
        (qat_layers, "Conv"),
        (fused_qat_layers, "ConvReLU"),
        (fused_qat_layers, "ConvBn"),
        (fused_qat_layers, "ConvBnReLU"),
    )
    for dimensions in ("1d", "2d", "3d")
    if hasattr(home, name + dimensions)
} | {qat_layers.Linear: False, fused_qat_layers.LinearReLU: True, fused_qat_layers.LinearBn1d: False}


def trace(module: nn.Module, leaves: Iterable[str] = ()) -> tuple[torch.fx.GraphModule, dict[str, tuple[str, Any]]]:
    """Record the network as a graph; `leaves` are submodules not to look into. What the network raises is raised."""
    tracer = QuantizationTracer(list(leaves), [])
    tracer.record_stack_traces = False
    graph = torch.fx.GraphModule(module, tracer.trace(module))
    return graph, tracer.node_name_to_scope


def greatest_level(*, reduce_range: bool) -> int:
    """Greatest integer of an activation: 255, or 127 where products of full bytes would overflow 16 bits."""
    return 127 if reduce_range else 255


def static_qconfig(observer: str, *, per_channel: bool, reduce_range: bool) -> Any:
    """Observers of activations (quint8, affine) and weights (qint8, symmetric) for calibration."""
    activation = ACTIVATION_OBSERVERS[observer].with_args(
        dtype=torch.quint8,
        qscheme=torch.per_tensor_affine,
        quant_min=0,
        quant_max=greatest_level(reduce_range=reduce_range),
    )
    return QConfig(activation=activation, weight=_weight_observer(per_channel=per_channel))


def qconfig_mapping(
    backend: str, qconfig: Any, per_tensor_qconfig: Any, *, is_qat: bool, float_names: Iterable[str] = ()
) -> Any:
    """Say which layer gets which reporters: torch's table for this backend, with `qconfig` as the common case.

    `per_tensor_qconfig` is for transposed convolutions, which torch can't quantize per channel.
    """
    with quietly():
        mapping = (get_default_qat_qconfig_mapping if is_qat else get_default_qconfig_mapping)(backend)
    mapping.set_global(qconfig)
    layer_norm = QConfig(activation=qconfig.activation, weight=PlaceholderObserver)
    for type_ in _TRANSPOSED:
        mapping.set_object_type(type_, per_tensor_qconfig)
    for type_ in (nn.LayerNorm, nn.functional.layer_norm):
        mapping.set_object_type(type_, layer_norm)
    for type_ in (*_FLOAT_FUNCTIONS, *_FLOAT_LAYERS):
        mapping.set_object_type(type_, None)
    for name in float_names:
        mapping.set_module_name(name, None)
    return mapping


def fold_batch_norms(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Fold each batch norm into the layer before it, for good, and join ReLU to it."""
    with quietly():
        return _fused(graph.eval(), is_qat=False)


def add_observers(graph: torch.fx.GraphModule, scopes: Scopes, mapping: Any, *, is_qat: bool) -> torch.fx.GraphModule:
    """Fuse layers and put reporters (or fake quantization) at every place where int8 will be."""
    with quietly():
        graph = _fused(graph.train(is_qat), is_qat=is_qat)
        unused_inputs = (torch.zeros(1),)  # looked at for nested standalone modules only
        backend = get_native_backend_config()
        prepared = graph_mode.prepare(graph, mapping, is_qat, scopes, unused_inputs, backend_config=backend)
    release_networks()
    return prepared


def _fused(graph: torch.fx.GraphModule, *, is_qat: bool) -> torch.fx.GraphModule:
    return graph_mode.fuse(graph, is_qat, FuseCustomConfig(), get_native_backend_config())


def convert(prepared: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Replace layers and reporters by int8 layers for the engine set now. `prepared` is used up."""
    with quietly():
        # Also run on a network whose reporters saw nothing, to be filled with stored integers.
        warnings.filterwarnings("ignore", ".*must run observer before calling calculate_qparams", UserWarning)
        converted = graph_mode.convert(prepared.eval(), backend_config=get_native_backend_config())
    release_networks()
    return converted


class FullRangeLinear(dynamic_layers.Linear):  # type: ignore[misc]  # torch comes without types
    """A dynamic int8 linear layer whose inputs take all of 8 bits; torch's own always keeps them to 7."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to float activations."""
        packed = self._packed_params._packed_params
        return torch.ops.quantized.linear_dynamic(x, packed, reduce_range=False).to(x.dtype)


def swap_dynamic_linears(
    module: nn.Module, names: Iterable[str], *, per_channel: bool, reduce_range: bool
) -> nn.Module:
    """Replace these linear layers by ones of int8 weights whose inputs are quantized at run time."""
    activation = PlaceholderObserver.with_args(dtype=torch.quint8, is_dynamic=True)
    layer_type = dynamic_layers.Linear if reduce_range else FullRangeLinear
    with quietly():
        for name in names:
            linear = module.get_submodule(name)
            linear.qconfig = QConfig(activation=activation, weight=_weight_observer(per_channel=per_channel))
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, layer_type.from_float(linear))
    return module


def int8_weight(weight: torch.Tensor, *, per_channel: bool, axis: int) -> torch.Tensor:
    """Weights as a quantized tensor, symmetric, with a scale for all or one for each index along `axis`."""
    with quietly():
        observer = _weight_observer(per_channel=per_channel)(**({"ch_axis": axis} if per_channel else {}))
        observer(weight)
        scales, zero_points = observer.calculate_qparams()
        if per_channel:
            return torch.quantize_per_channel(weight, scales, zero_points, axis, torch.qint8)
        return torch.quantize_per_tensor(weight, scales.item(), int(zero_points.item()), torch.qint8)


def _weight_observer(*, per_channel: bool) -> Any:
    if per_channel:
        return PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
    return MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)


def is_watching(module: nn.Module) -> bool:
    """Whether it is an observer or a fake quantization, which in a graph stands where int8 will be."""
    return isinstance(module, ObserverBase | FakeQuantizeBase)


def is_range_observer(module: nn.Module) -> bool:
    """Whether it is an observer that must see data: not one of a range known beforehand (a sigmoid's 0 to 1)."""
    return (
        isinstance(module, ObserverBase) and not isinstance(module, FixedQParamsObserver) and hasattr(module, "min_val")
    )


def watches_range(module: nn.Module) -> bool:
    """Whether it is such an observer, or fake quantization with one."""
    return is_watching(module) and is_range_observer(getattr(module, "activation_post_process", module))


def extremes_of(x: torch.Tensor, observer: nn.Module) -> torch.Tensor:
    """Least and greatest value that an observer would find, of shape (2,); (inf, -inf) where it would find none."""
    if not x.numel():
        return torch.tensor([torch.inf, -torch.inf])
    extremes = torch.stack(torch.aminmax(x))
    if isinstance(observer, HistogramObserver) and extremes.isinf().any():  # which it leaves out
        return extremes_of(x[x.abs() != torch.inf], observer)
    return extremes


def is_range(extremes: torch.Tensor) -> bool:
    """Whether anything was found."""
    return not extremes[0] > extremes[1]


def counts_over(x: torch.Tensor, observer: HistogramObserver, limits: torch.Tensor) -> torch.Tensor:
    """How many values lie in each bin of a histogram from `limits[0]` to `limits[1]`."""
    if not is_range(limits):
        return torch.zeros(observer.bins)
    low, high = limits.tolist()
    # What is outside isn't counted; but for an empty range histc takes that of the tensor.
    return torch.histc(x[x.abs() != torch.inf] if low == high else x, observer.bins, min=low, max=high)


def add_counts(observer: HistogramObserver, limits: torch.Tensor, counts: torch.Tensor) -> None:
    """Do what the observer does when it sees values with these counts; `limits`: its range from then on, shape (2,)."""
    low, high = limits
    if observer.min_val <= observer.max_val:
        before = observer.histogram, observer.min_val.clone(), observer.max_val.clone()
        counts = observer._combine_histograms(*before, counts, low, high)
    observer.histogram.detach_().resize_(counts.shape).copy_(counts)
    observer.min_val.copy_(low)
    observer.max_val.copy_(high)


def fused_relu(layer: nn.Module) -> bool | None:
    """Whether a layer that fake-quantizes its weights ends in ReLU; None for all other layers."""
    return _QAT_LAYERS.get(type(layer))


def folded_weight(layer: nn.Module) -> torch.Tensor:
    """The weights that int8 will have, not yet rounded: with the layer's batch norm folded in."""
    with quietly():
        folded = layer.to_float()
    return (folded[0] if isinstance(folded, nn.Sequential) else folded).weight


def has_int8_weights(module: nn.Module) -> bool:
    """Whether it is a convolution or linear layer of int8 weights, dynamic ones included."""
    return isinstance(module, WeightedQuantizedModule)
