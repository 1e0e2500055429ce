"""What `torch.ao.quantization` knows of an int8 model. The one file of this plugin that uses torch.ao.

torch.ao warns that it will be removed; what is used here is there in torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_onnx.weights import QuantizedWeight
from ptpipe_torch.int8.fx_cache import release_networks
from ptpipe_torch.int8.int8_state import quantized_tensors, stored_as_int8

_INTEGER_TYPES = {torch.quint8: (torch.uint8, 0, 255), torch.qint8: (torch.int8, -128, 127)}


def is_prepared(module: nn.Module) -> bool:
    """Whether FX quantization has put reporters or fake quantization into the network."""
    with _silent():
        from torch.ao.quantization import FakeQuantizeBase, ObserverBase
    return isinstance(module, torch.fx.GraphModule) and any(
        isinstance(part, ObserverBase | FakeQuantizeBase) for part in module.modules()
    )


def float_network(prepared: nn.Module) -> nn.Module:
    """The prepared network as the float one that it was made of. `prepared` is used up."""
    with _silent():
        from torch.ao.quantization import disable_fake_quant, disable_observer
    return prepared.apply(disable_fake_quant).apply(disable_observer)


def reference_network(prepared: nn.Module) -> tuple[nn.Module, dict[str, QuantizedWeight]]:
    """The network with explicit quantize and dequantize operators, and its int8 weights by parameter name.

    It is what torch's int8 network is made from, with the same scales. Its weights come out as float, rounded to
    what the integers stand for, so that an exporter sees plain layers; the caller puts the integers in their place.
    `prepared` is used up.
    """
    assert isinstance(prepared, torch.fx.GraphModule), type(prepared)
    with _silent():
        from torch.ao.nn.quantized.reference.modules.utils import ReferenceQuantizedModule
        from torch.ao.quantization.quantize_fx import convert_to_reference_fx

        network = convert_to_reference_fx(prepared)
        release_networks()
        weights = {}
        for name, layer in network.named_modules():
            if isinstance(layer, ReferenceQuantizedModule):
                quantized = layer.get_quantized_weight()
                weights[f"{name}.weight"] = _quantized_weight(name, quantized)
                layer.weight = nn.Parameter(quantized.dequantize(), requires_grad=False)
                layer.get_weight = functools.partial(getattr, layer, "weight")
    _spell_out_quantization(network)
    return network.eval(), weights


def _spell_out_quantization(network: torch.fx.GraphModule) -> None:
    """Replace quantized tensors, which no exporter knows, by plain integers and their scale and zero point.

    They saturate at the ends of the integer type, also where fewer integers were observed (`reduce_range`): so do
    torch's int8 operators.
    """
    decomposed = torch.ops.quantized_decomposed
    for quantize in list(network.graph.find_nodes(op="call_function", target=torch.quantize_per_tensor)):
        value, scale, zero_point, dtype = quantize.args
        number, low, high = _INTEGER_TYPES[dtype]
        grid = (network.get_buffer(scale.target).item(), int(network.get_buffer(zero_point.target)), low, high, number)
        with network.graph.inserting_before(quantize):
            integers = network.graph.call_function(decomposed.quantize_per_tensor.default, (value, *grid))
            floats = network.graph.call_function(decomposed.dequantize_per_tensor.default, (integers, *grid))
        for dequantize in list(quantize.users):
            assert dequantize.target == "dequantize", dequantize
            dequantize.replace_all_uses_with(floats)
            network.graph.erase_node(dequantize)
        network.graph.erase_node(quantize)
    network.graph.eliminate_dead_code()
    network.recompile()


def dynamic_weights(converted: nn.Module) -> dict[str, QuantizedWeight]:
    """The int8 weights of dynamically quantized linear layers, by the float network's parameter name.

    Raises StageError for dynamically quantized layers of other types.
    """
    with _silent():
        import torch.ao.nn.quantized.dynamic as dynamic_layers
    weights = {}
    for name, layer in converted.named_modules():
        if isinstance(layer, dynamic_layers.Linear):
            weights[f"{name}.weight"] = _quantized_weight(name, layer.weight())
        elif type(layer).__module__.startswith(dynamic_layers.__name__) and "rnn" in type(layer).__module__:
            raise StageError(f"{name} ({type(layer).__name__}) can't be exported as dynamic int8: leave it float")
    return weights


def stored_weights(packed: Mapping[str, torch.Tensor], converted: nn.Module) -> dict[str, QuantizedWeight]:
    """Weights that torch computes with as float and stores as int8 (convolutions beside dynamic linear layers)."""
    with _silent(), quantized_tensors():
        stored = stored_as_int8(packed, converted.state_dict())
        return {name: _quantized_weight(name, weight) for name, weight in stored.items()}


def with_stored_weights(network: nn.Module, weights: Mapping[str, QuantizedWeight]) -> nn.Module:
    """The float network with these parameters rounded to what their integers stand for, in place."""
    with torch.no_grad():
        for name, weight in weights.items():
            network.get_parameter(name).copy_(torch.from_numpy(weight.dequantized()))
    return network


def _quantized_weight(name: str, weight: torch.Tensor) -> QuantizedWeight:
    if not weight.is_quantized or weight.dtype is not torch.qint8:
        raise StageError(f"the weight of {name} is {weight.dtype}; only int8 weights can be exported")
    per_channel = weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
    scales = weight.q_per_channel_scales() if per_channel else torch.tensor(weight.q_scale())
    zero_points = weight.q_per_channel_zero_points() if per_channel else torch.tensor(weight.q_zero_point())
    return QuantizedWeight(
        weight.int_repr().numpy(),
        scales.numpy().astype(np.float32),
        zero_points.numpy().astype(np.int8),
        weight.q_per_channel_axis() if per_channel else 0,
    )


def _silent() -> warnings.catch_warnings[None]:
    # What torch.ao says of its future, at imports and at the making of the first quantized tensor, is no news to users.
    return warnings.catch_warnings(action="ignore")
