"""FX graph mode quantization: trace, fuse, prepare, convert, and the reference form that exporters take.

`prepare_fx`, `prepare_qat_fx` and `convert_fx` are made of the `fuse`, `prepare` and `convert` used here. They trace
the network themselves and record a stack trace at every node, which imports torch's compiler (2 s); here the traced
graph is passed in. `tests/plugins/ptpipe_torch/int8/test_fx.py` compares the results with those public functions.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe import StageError
from ptpipe_torch.int8.attribute_names import refuse_reserved_names
from ptpipe_torch.int8.biases import round_biases, weighted_part
from ptpipe_torch.int8.constructors import insert_by_copying
from ptpipe_torch.int8.decomposed import DEQUANTIZE, QUANTIZE
from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.fixed_ranges import (
    observe_behind_float,
    observe_inputs_of_layers,
    observe_pieces,
    observe_unbounded,
)
from ptpipe_torch.int8.float_operators import drop_idle_observers, fence_float_operators, remove_fences
from ptpipe_torch.int8.fx_cache import release_layers, release_networks
from ptpipe_torch.int8.layers import QuantizedWeight, has_int8_weights, quantized_weight
from ptpipe_torch.int8.moved_integers import pieces_on_one_grid, take_integers
from ptpipe_torch.int8.observers import PlaceholderObserver, is_observer, make_qconfig, observer_at
from ptpipe_torch.int8.output_scales import fold_output_scales
from ptpipe_torch.int8.reference_form import reference_form
from ptpipe_torch.int8.tracer import Scopes
from ptpipe_torch.int8.tracing import trace_graph
from ptpipe_torch.int8.transposed import copy_form
from ptpipe_torch.model.signature import TensorSpec
from ptpipe_torch.runtime import released_memory
from ptpipe_torch.traced_hooks import hooked_layers, network_of, refuse_lost_hooks

with deprecations_silenced():
    from torch.ao.nn.intrinsic import LinearReLU
    from torch.ao.nn.intrinsic.modules.fused import _FusedModule
    from torch.ao.nn.quantized import ELU as QuantizedELU  # noqa: N811  # a name in capitals, no constant
    from torch.ao.nn.quantized.reference.modules.utils import ReferenceQuantizedModule
    from torch.ao.quantization import (
        disable_fake_quant,
        disable_observer,
        get_default_qat_qconfig_mapping,
        get_default_qconfig_mapping,
    )
    from torch.ao.quantization.backend_config import (
        BackendConfig,
        BackendPatternConfig,
        DTypeConfig,
        ObservationType,
        get_native_backend_config,
    )
    from torch.ao.quantization.fx.custom_config import FuseCustomConfig
    from torch.ao.quantization.fx.fuse import fuse as fuse_graph
    from torch.ao.quantization.fx.lower_to_fbgemm import lower_to_fbgemm
    from torch.ao.quantization.fx.prepare import prepare as prepare_graph
    from torch.ao.quantization.quantize import _remove_qconfig

# Weights of these are bare tensors of the graph: torch packs them into objects that only pickle can store.
_FLOAT_FUNCTIONS = tuple(
    getattr(nn.functional, name)
    for name in ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
)
# torch's int8 kernels are up to 250 and 150 steps off (torch 2.13).
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.functional.instance_norm)
_PRELU = (nn.PReLU, nn.functional.prelu)
# No int8 kernels, or none whose weights are worth it in a classifier of images.
_FLOAT_LAYERS = (nn.Embedding, nn.EmbeddingBag, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYER_NORMS: tuple[Any, ...] = (nn.LayerNorm, nn.functional.layer_norm)
FLOAT_SCOPE = "ptpipe.float"
"""The scope of operators to leave float, in front of the module that they belong to: the name of no module."""
_GROUP_SCOPE = "ptpipe.qconfig"
_OWN_SCOPES = re.compile(r"^ptpipe\.(float|qconfig\d+)\.?")
_INTEGER_TYPES = {torch.quint8: (torch.uint8, 0, 255), torch.qint8: (torch.int8, -128, 127)}


def trace(
    module: nn.Module, inputs: Sequence[TensorSpec], leaves: Iterable[str] = (), *, keeps_gradients: bool = False
) -> tuple[GraphModule, Scopes]:
    """Trace a network into a graph; return it with the scope of each node.

    `leaves`: names of submodules not to trace into. `keeps_gradients`: nor into autograd functions with a gradient of
    their own. Raises whatever the network raises while it is traced, and ReservedNameError.
    """
    graph, scopes = trace_graph(module, inputs, leaves, keeps_gradients=keeps_gradients)
    refuse_reserved_names(graph)
    return network_of(module, graph), scopes


def pad_with_input(x: torch.Tensor, padding: Sequence[int], mode: str) -> torch.Tensor:
    """Pad with values of the input itself (mode `reflect`, `replicate`, `circular`), or zeros (mode `constant`).

    They need no range of their own: each range contains zero.

    `padding`: as `torch.nn.functional.pad` takes it.
    """
    return nn.functional.pad(x, list(padding), mode)


@functools.cache
def backend_config(*, folds_batch_norms: bool = False) -> BackendConfig:
    """Return torch's configuration, with padding and rolling, whose outputs have the scale of their input.

    `folds_batch_norms`: also with ReLU behind a linear layer's batch norm, which torch leaves on its own.
    """
    int8 = DTypeConfig(input_dtype=torch.quint8, output_dtype=torch.quint8)
    config = get_native_backend_config()
    if folds_batch_norms:
        pattern = BackendPatternConfig((nn.Linear, nn.BatchNorm1d, nn.ReLU))
        config.set_backend_pattern_config(pattern.set_fuser_method(_linear_relu).set_fused_module(LinearReLU))
    for selecting in (pad_with_input, torch.roll):
        pattern = BackendPatternConfig(selecting).set_dtype_configs([int8])
        pattern.set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
        config.set_backend_pattern_config(pattern)
    return config


def qconfig_mapping(
    backend: str, qconfig: Any, per_tensor_qconfig: Any, *, is_qat: bool, float_names: Iterable[str] = ()
) -> Any:
    """Return torch's default QConfigMapping of a backend with `qconfig` as the global QConfig.

    `per_tensor_qconfig` is for transposed convolutions, which torch can't quantize per channel; `float_names` are
    submodules to leave float.
    """
    with deprecations_silenced():
        mapping = (get_default_qat_qconfig_mapping if is_qat else get_default_qconfig_mapping)(backend)
    mapping.set_global(qconfig)
    for operator, own in _qconfigs_by_type(qconfig, per_tensor_qconfig).items():
        mapping.set_object_type(operator, own)
    for float_operator in (*_FLOAT_FUNCTIONS, *_FLOAT_LAYERS, *_INSTANCE_NORMS, *_PRELU):
        mapping.set_object_type(float_operator, None)
    for name in (FLOAT_SCOPE, *float_names):
        mapping.set_module_name(name, None)
    return mapping


def _qconfigs_by_type(qconfig: Any, per_tensor_qconfig: Any) -> dict[Any, Any]:
    norm = make_qconfig(qconfig.activation, PlaceholderObserver)  # whose weights are float
    return dict.fromkeys(_TRANSPOSED, per_tensor_qconfig) | dict.fromkeys(_LAYER_NORMS, norm)


def operator_qconfig(mapping: Any, operator: Any, qconfig: Any, per_tensor_qconfig: Any) -> Any:
    """Return what `qconfig_mapping` would give a type of layer, a function or a method where these are the QConfigs.

    None if it has one in any case: a fixed range, that of its input, or none at all.
    """
    own = _qconfigs_by_type(qconfig, per_tensor_qconfig).get(operator)
    return qconfig if own is None and operator not in mapping.object_type_qconfigs else own


def set_operator_qconfigs(mapping: Any, scopes: Scopes, qconfigs: Mapping[Node, Any]) -> None:
    """Give single operators of a traced graph a QConfig of their own, in place of `mapping` and `scopes`.

    FX finds that of a layer by its name, that of a function by its scope: `add_observers` restores the latter.
    """
    groups: dict[int, str] = {}
    for node, qconfig in qconfigs.items():
        if node.op == "call_module":
            mapping.set_module_name(str(node.target), qconfig)
        else:
            name = groups.setdefault(id(qconfig), f"{_GROUP_SCOPE}{len(mapping.module_name_qconfigs)}")
            mapping.set_module_name(name, qconfig)
            path, type_ = scopes[node.name]
            scopes[node.name] = (f"{name}.{path}", type_)


def fold_batch_norms(graph: GraphModule) -> GraphModule:
    """Fold each batch norm into the weights of the layer before it, and fuse ReLU with that layer."""
    with deprecations_silenced():
        return _fuse(graph.eval(), is_qat=False)


def add_observers(graph: GraphModule, scopes: Scopes, mapping: Any, *, is_qat: bool) -> GraphModule:
    """Fuse layers and insert observers, for QAT fake quantization, wherever the int8 network has int8 tensors."""
    with deprecations_silenced():
        graph = _fuse(graph.train(is_qat), is_qat=is_qat)
        for name in _layers_inside_leaves(graph):
            mapping.set_module_name(name, None)
        unused_inputs = (torch.zeros(1),)  # read for nested standalone modules only
        backend = backend_config()
        prepared = insert_by_copying(
            lambda: prepare_graph(graph, mapping, is_qat, scopes, unused_inputs, backend_config=backend)
        )
        observe_inputs_of_layers(prepared)
        observe_behind_float(prepared, mapping, backend)
        observe_unbounded(prepared, mapping, backend)
        observe_pieces(prepared)
    _use_module_paths(prepared)
    release_layers(prepared)
    release_networks()
    return prepared


def _use_module_paths(prepared: GraphModule) -> None:
    """Take our own prefixes off the scopes of a prepared network, which messages show."""
    attributes = prepared.meta["_observed_graph_module_attrs"]
    attributes.node_name_to_scope = {
        name: (_OWN_SCOPES.sub("", path), type_) for name, (path, type_) in attributes.node_name_to_scope.items()
    }


def _layers_inside_leaves(graph: GraphModule) -> Iterator[str]:
    """Yield the names of all layers inside a module that the graph calls as a whole (`nn.TransformerEncoder`).

    For QAT torch swaps them too, but neither observes their activations nor converts them.
    """
    for target in dict.fromkeys(str(node.target) for node in graph.graph.find_nodes(op="call_module")):
        called = graph.get_submodule(target)
        if not isinstance(called, _FusedModule):
            yield from (f"{target}.{name}" for name, _ in called.named_modules() if name)


def _fuse(graph: GraphModule, *, is_qat: bool) -> GraphModule:
    return fuse_graph(graph, is_qat, FuseCustomConfig(), backend_config(folds_batch_norms=not is_qat))


def _linear_relu(_is_qat: bool, linear: nn.Linear, norm: nn.BatchNorm1d, relu: nn.ReLU) -> LinearReLU:
    fused: LinearReLU = LinearReLU(nn.utils.fuse_linear_bn_eval(linear, norm), relu)  # type: ignore[no-untyped-call]  # torch.ao is partly typed
    return fused


def convert(prepared: GraphModule) -> GraphModule:
    """Replace layers and observers by int8 layers for the selected engine. Consumes `prepared`: its layers are gone.

    Biases are those of `round_biases`, which an ONNX file stores as integers without another rounding.

    The stack trace of a node of the result is the name of the node of `prepared` that it replaces: conversion copies
    a stack trace, and nothing else, to the int8 operators that it puts in the place of float ones.

    Raises StageError, naming the layer, if an observer or fake quantization is left, or a hook would be lost.
    """
    hooked = hooked_layers(prepared)
    fold_output_scales(prepared)
    drop_idle_observers(prepared)
    for node in prepared.graph.nodes:
        node.stack_trace = node.name
    pieces = pieces_on_one_grid(prepared)
    fence_float_operators(prepared)
    with deprecations_silenced():
        # Also called on networks whose observers saw no data, to load stored integers into.
        warnings.filterwarnings("ignore", ".*observer before calling calculate_qparams", UserWarning)
        converted = _lowered(prepared.eval())
    remove_fences(converted)
    take_integers(converted, pieces)
    _refuse_unconverted(converted)
    refuse_lost_hooks(converted, hooked)
    _store_scales(converted)
    return converted


def _lowered(prepared: GraphModule) -> GraphModule:
    """Convert in two steps, as torch's conversion does, and round biases between them."""
    attributes = prepared.meta["_observed_graph_module_attrs"]
    with released_memory():
        reference = reference_form(prepared, backend_config(), _remove_qconfig_flag=False)
        prepared._modules.clear()  # float layers, for as long as the caller refers to the network
        release_networks()
    round_biases(reference)
    converted = lower_to_fbgemm(reference, attributes.node_name_to_qconfig, attributes.node_name_to_scope)
    _remove_qconfig(converted)  # type: ignore[no-untyped-call]  # torch.ao is partly typed
    converted.delete_all_unused_submodules()
    return converted


def _refuse_unconverted(converted: GraphModule) -> None:
    """Raise StageError if a layer still imitates int8 in float: it is neither small nor fast."""
    left = [(name, part) for name, part in converted.named_modules() if is_observer(part)]
    left += [(f"{name}.weight", layer) for name, layer in _reference_layers(converted)]
    if left:
        name, part = left[0]
        layer = name.rpartition(".")[0] or name
        raise StageError(
            f"{layer} can't become int8: its {type(part).__name__} is left after the conversion. Leave it float: "
            f"skip: [{layer}] of quant.prepare or quant.prepare_qat"
        )


def _store_scales(converted: GraphModule) -> None:
    """Make the output grid of each ELU part of its state, as that of all other layers is (torch 2.13)."""
    for part in converted.modules():
        if isinstance(part, QuantizedELU):
            for name in ("scale", "zero_point"):
                value = part.__dict__.pop(name)
                part.register_buffer(name, torch.tensor(value))


def is_prepared(module: nn.Module) -> bool:
    """Return whether a network is a graph with observers or fake quantization."""
    return isinstance(module, GraphModule) and any(is_observer(part) for part in module.modules())


def float_network(prepared: nn.Module) -> nn.Module:
    """Remove observers and fake quantization of activations, and switch that of weights off, in place."""
    if isinstance(prepared, GraphModule):
        for node in prepared.graph.find_nodes(op="call_module"):
            if observer_at(prepared, node) is not None:
                node.replace_all_uses_with(node.args[0])
                prepared.graph.erase_node(node)
        prepared.recompile()
    return prepared.apply(disable_fake_quant).apply(disable_observer)


def reference_network(
    prepared: nn.Module, int8: nn.Module | None = None
) -> tuple[GraphModule, dict[str, QuantizedWeight]]:
    """Convert to explicit quantize and dequantize operators; return int8 weights by parameter name as well.

    It has the scales of torch's int8 network. Its weights and biases are float, rounded to what the integers stand for,
    so that an exporter sees plain layers; the caller puts the integers in their place. `meta["scopes"]` of the result
    has the path of the module that each node belongs to. Consumes `prepared`.

    `int8`: the int8 network, whose weights and biases it gets: conversion may change what the prepared network has.
    """
    assert isinstance(prepared, GraphModule), type(prepared)
    scopes = prepared.meta["_observed_graph_module_attrs"].node_name_to_scope
    fold_output_scales(prepared)
    drop_idle_observers(prepared)
    with warnings.catch_warnings(action="ignore"):
        network = reference_form(prepared, backend_config())
        release_networks()
        weights = _use_rounded_parameters(network) if int8 is None else _use_parameters_of(int8, network)
    for _, layer in _reference_layers(network):
        layer.get_weight = functools.partial(getattr, layer, "weight")
    _spell_out_quantization(network)
    network.meta["scopes"] = {name: path for name, (path, _type) in scopes.items()}
    return network.eval(), weights


def _use_rounded_parameters(network: GraphModule) -> dict[str, QuantizedWeight]:
    round_biases(network)
    weights = {}
    for name, layer in _reference_layers(network):
        quantized = layer.get_quantized_weight()
        layer.weight = nn.Parameter(quantized.dequantize(), requires_grad=False)
        weights[f"{name}.weight"] = quantized_weight(name, quantized)
    return weights


def _reference_layers(network: GraphModule) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in network.named_modules() if isinstance(part, ReferenceQuantizedModule))


def _use_parameters_of(int8: nn.Module, network: GraphModule) -> dict[str, QuantizedWeight]:
    weights = {}
    for name, layer in int8.named_modules():
        if not has_int8_weights(layer):
            continue
        part: Any = weighted_part(network.get_submodule(name))
        prefix = name if part is network.get_submodule(name) else f"{name}.0"
        copy_form(part, layer)
        weight, bias = layer._weight_bias()  # unpacked once
        weights[f"{prefix}.weight"] = quantized_weight(name, weight)
        # Engines return weights with channels last, for which exporters write other operators. Those of a pointwise
        # convolution are contiguous either way, and `contiguous` would keep them.
        part.weight = nn.Parameter(torch.empty(weight.shape), requires_grad=False)  # lets go of the present one
        part.weight.copy_(weight.dequantize())
        if part.bias is not None:
            part.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return weights


def _spell_out_quantization(network: GraphModule) -> None:
    """Replace quantized tensors, which no exporter knows, by plain integers with their scale and zero point.

    They saturate at the ends of the integer type, also where fewer integers were observed (`reduce_range`): so do
    torch's int8 operators.
    """
    for quantize in list(network.graph.find_nodes(op="call_function", target=torch.quantize_per_tensor)):
        value, scale, zero_point, dtype = quantize.args
        integer_dtype, minimum, maximum = _INTEGER_TYPES[dtype]
        offset = int(network.get_buffer(zero_point.target))
        grid = (network.get_buffer(scale.target).item(), offset, minimum, maximum, integer_dtype)
        with network.graph.inserting_before(quantize):
            integers = network.graph.call_function(QUANTIZE, (value, *grid))
            floats = network.graph.call_function(DEQUANTIZE, (integers, *grid))
        for dequantize in list(quantize.users):
            assert dequantize.target == "dequantize", dequantize
            dequantize.replace_all_uses_with(floats)
            network.graph.erase_node(dequantize)
        network.graph.erase_node(quantize)
    network.graph.eliminate_dead_code()
    network.recompile()
