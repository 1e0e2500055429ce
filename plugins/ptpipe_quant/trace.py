"""Trace a network into an FX graph, normalized for quantization, and resolve the patterns of `skip`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe import StageError, nearest
from ptpipe_quant.activations import use_activations
from ptpipe_quant.affine_folding import fold_affine
from ptpipe_quant.attention import derived_attention, layer_types, write_out_attention
from ptpipe_quant.computed_weights import store_computed_weights
from ptpipe_quant.float_nodes import layers_left_float, operators_to_leave_float, products_without_kernel
from ptpipe_quant.functional_attention import write_out_functional_attention
from ptpipe_quant.functional_weights import transposed_layers, use_layers
from ptpipe_quant.functionalize import ChangedViewError, functionalize
from ptpipe_quant.layer_forms import transposed_of_size, use_foldable_batch_norms, use_output_padding
from ptpipe_quant.movement import use_known_moves
from ptpipe_quant.normalize import normalize, pass_inputs_by_position
from ptpipe_quant.own_gradients import detach_without_gradients, recorded_functions
from ptpipe_quant.products import use_matmul
from ptpipe_quant.shared_layers import separate_calls, tie_weights
from ptpipe_quant.silu import write_out_silu
from ptpipe_quant.swin_attention import use_window_attention
from ptpipe_quant.transformer_layers import use_traceable_layers
from ptpipe_quant.weighted_einsum import use_matrices
from ptpipe_torch.errors import ON_VALUES, depends_on_values, first_line
from ptpipe_torch.int8.attribute_names import ReservedNameError, reserved_name_in
from ptpipe_torch.int8.fx import FLOAT_SCOPE, trace
from ptpipe_torch.int8.tracer import SOURCE_LINE, DataDependentError, Scopes
from ptpipe_torch.model.reparametrized import remove_parametrizations
from ptpipe_torch.model.signature import TensorSpec
from ptpipe_torch.torch_export import place_of_error
from ptpipe_torch.traced_autocast import remove_autocast_regions

_BRANCH_REMEDY = (
    "No route traces a branch or a loop that depends on values: write it with torch.where, move it out of forward"
)
_NO_PRODUCT = "torch has int8 products of matrices, and of batches of one shape, alone"
_OPEN_SIZE = "its output_size depends on an axis of an input that is of any size"
_OWN_GRADIENT = "its backward pass is not the derivative of its forward pass, so it is not traced into"


def float_names(module: nn.Module, skip: Sequence[str]) -> list[str]:
    """Return the names of the submodules that match `skip`, without those inside others. See `matching_names`."""
    found = matching_names(module, skip, "skip")
    return [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]


def matching_names(module: nn.Module, patterns: Sequence[str], option: str) -> list[str]:
    """Return the submodules that match a pattern, by name (`features.0`, `layer4.*`) or type (`Linear`).

    The layers that attention is going to be written out as can be named too, and parameters that no layer of torch
    owns, which count as layers of type `Parameter`. Raises StageError for a pattern without a match, with the nearest
    name or type. `option`: that has the patterns.
    """
    named = skippable_names(module)
    found: dict[str, None] = {}
    for pattern in patterns:
        matches = [name for name, type_ in named.items() if fnmatchcase(name, pattern) or fnmatchcase(type_, pattern)]
        if not matches:
            hint = nearest(pattern, [*named, *dict.fromkeys(named.values())])
            suggestion = f"; did you mean {hint!r}?" if hint else ""
            raise StageError(f"{option}: no layer of this network has the name or type {pattern!r}{suggestion}")
        found |= dict.fromkeys(matches)
    return list(found)


def float_modules(module: nn.Module, skip: Sequence[str]) -> list[nn.Module]:
    """Return the submodules that match `skip`; names of parameters, and of layers that are yet to be made, are none."""
    modules = dict(module.named_modules(remove_duplicate=False))
    return [modules[name] for name in float_names(module, skip) if name in modules]


def skippable_names(module: nn.Module) -> dict[str, str]:
    """Return all that `skip` may name, with its type."""
    return layer_types(module) | dict.fromkeys(_own_parameters(module), "Parameter")


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that modules of the user's own have."""
    return {
        f"{path}.{name}".lstrip("."): parameter
        for path, owner in module.named_modules()
        if isinstance(owner, nn.ParameterList | nn.ParameterDict) or not type(owner).__module__.startswith("torch.nn.")
        for name, parameter in owner.named_parameters(recurse=False)
    }


def layers_to_quantize(module: nn.Module, skip: Sequence[str], *types: type[nn.Module]) -> list[str]:
    """Return the names of the layers of exactly these types that no pattern of `skip` matches."""
    left_float = tuple(f"{name}." for name in float_names(module, skip))
    return [
        name for name, layer in module.named_modules() if type(layer) in types and not f"{name}.".startswith(left_float)
    ]


@dataclass(frozen=True)
class TracedNetwork:
    """A traced network, normalized for quantization."""

    graph: GraphModule
    scopes: Scopes
    """For each node: path and type of the module that it belongs to, behind `FLOAT_SCOPE` if it must stay float."""
    float_names: list[str]
    """Layers that must stay float."""
    kept_float: Mapping[str, str]
    """Attention, and functions with weights by the line that calls them, that stay float, and why."""
    computed_weights: list[str]
    """Parameters that have the value of what was computed from them in the forward pass; see `computed_weights`."""


class UntraceableError(StageError):
    """A line of a network that can't be traced."""

    def __init__(self, message: str, *, layer: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.layer = layer
        """The innermost module that the line belongs to; empty: the network itself."""
        self.reason = reason
        """The line, and why."""


def trace_network(
    module: nn.Module,
    inputs: Sequence[TensorSpec],
    leaves: Sequence[str] = (),
    route: str = "fx",
    float_operators: Sequence[str] = (),
    *,
    purpose: Literal["static", "qat", "repair"] = "static",
) -> TracedNetwork:
    """Trace the network's forward pass in eval mode, for these inputs, and normalize it.

    The result is the same function, without what it does not return. Submodules named by `leaves` are not traced into
    and stay float. Weights are plain parameters, in-place operators out of place, each layer is called once, padding
    other than with zeros is an operator of its own; attention is linear layers and products, which are `torch.matmul`;
    each ReLU, function or module, is a separate module, which fuses with the layer before it; other activations that
    are written out are functions of torch; `nn.Flatten` is a function, which has an int8 form; dropout is an
    `nn.Identity` that keeps it as `_for_training`.

    `route`: how it is traced, see `TracedConfig`. `float_operators`: further ones to leave float, by their names in the
    graph. `purpose`: `qat` keeps what matters in training alone, as far as tracing finds it: where autocast is switched
    off, and with `route: fx` gradients of the network's own; for all but `repair`, weights that are computed from
    parameters alone become parameters.

    Raises UntraceableError with the line of the model that can't be traced, or can't be made out of place.
    """
    masked = remove_parametrizations(module)
    kept_float = {name: reason for name, reason in _opaque(module).items() if name not in leaves}
    leaves = [*leaves, *kept_float]
    use_traceable_layers(module, leaves)
    use_window_attention(module, leaves)
    graph, scopes = _traced(module.eval(), inputs, leaves, route, purpose == "qat")
    pass_inputs_by_position(graph)
    _make_functional(graph, scopes, inputs)
    if purpose == "qat":
        detach_without_gradients(graph, scopes)
    use_matrices(graph, scopes)
    computed = [*masked, *store_computed_weights(graph, scopes, leaves)] if purpose != "repair" else []
    reasons = use_layers(graph, scopes, leaves)
    kept_float |= write_out_attention(graph, scopes, leaves)
    use_matmul(graph, scopes)
    use_known_moves(graph, scopes)
    copies = separate_calls(graph)
    use_foldable_batch_norms(graph)
    use_output_padding(graph, inputs)
    use_activations(graph, scopes)
    normalize(graph, scopes, for_training=purpose == "qat")
    if purpose == "static":
        fold_affine(graph)
    float_names = [*leaves, *(copy for copy, original in copies.items() if original in leaves)]
    write_out_silu(graph, scopes, float_names)
    kept_float |= _reasons(graph, reasons)
    named = [node for node in graph.graph.nodes if node.name in float_operators]
    left_float = dict.fromkeys([*operators_to_leave_float(graph), *transposed_of_size(graph), *named])
    float_names += leave_float(left_float, scopes)
    _finish(graph, ties=purpose != "repair")
    return TracedNetwork(graph, scopes, float_names, kept_float, computed)


def _opaque(module: nn.Module) -> dict[str, str]:
    """Return the modules that can't be traced, and why; of those inside others the outer ones."""
    scripts = [name for name, part in module.named_modules() if name and isinstance(part, torch.jit.ScriptModule)]
    outer = [name for name in scripts if not name.startswith(tuple(f"{other}." for other in scripts))]
    return derived_attention(module) | dict.fromkeys(outer, "it is TorchScript, which torch.fx can't trace")


def _finish(graph: GraphModule, *, ties: bool) -> None:
    """Drop what is not called. `ties`: functions read the weights of layers under names of their own."""
    if ties:
        tie_weights(graph)
    graph.delete_all_unused_submodules()
    graph.graph.lint()
    graph.recompile()


def _reasons(graph: GraphModule, known: Mapping[str, str]) -> dict[str, str]:
    """Return why layers, and functions by the lines that call them, stay float; `known`: reasons by node."""
    lines = {node.name: str(node.meta.get(SOURCE_LINE, node.name)) for node in graph.graph.nodes}
    by_reason = {_NO_PRODUCT: products_without_kernel(graph), _OWN_GRADIENT: recorded_functions(graph)}
    reasons = {node.name: reason for reason, nodes in by_reason.items() for node in nodes} | dict(known)
    sized = {str(node.target): _OPEN_SIZE for node in transposed_of_size(graph)}
    return {lines[name]: reason for name, reason in reasons.items()} | layers_left_float(graph) | sized


def leave_float(nodes: Iterable[Node], scopes: Scopes) -> Iterator[str]:
    """Yield the names of layers, of these nodes; move functions to `FLOAT_SCOPE`, in place."""
    for node in nodes:
        if node.op == "call_module":
            yield str(node.target)
        else:
            path, type_ = scopes[node.name]
            scopes[node.name] = (f"{FLOAT_SCOPE}.{path}", type_)


def _traced(
    module: nn.Module, inputs: Sequence[TensorSpec], leaves: Sequence[str], route: str, for_training: bool
) -> tuple[GraphModule, Scopes]:
    try:
        if route == "fx":
            graph, scopes = trace(module, inputs, leaves, keeps_gradients=for_training)
        else:
            from ptpipe_torch.int8.exported import trace_by_export  # torch's compiler takes seconds to import

            graph, scopes = trace_by_export(module, inputs)
        if not for_training:
            remove_autocast_regions(graph.graph)
        return graph, scopes
    except ReservedNameError:
        raise
    except Exception as error:  # a network may raise anything while it is traced
        if name := reserved_name_in(str(error), module):
            raise ReservedNameError(name) from error
        raise (_not_exported if route == "export" else _untraceable)(module, error) from error


def _make_functional(graph: GraphModule, scopes: Scopes, inputs: Sequence[TensorSpec]) -> None:
    try:
        functionalize(graph, inputs)
        graph.graph.eliminate_dead_code()  # heads whose outputs are not returned, sizes that are not used
        if write_out_functional_attention(graph, scopes):
            functionalize(graph, inputs)  # records types and shapes of the new nodes
    except ChangedViewError as error:
        if layer := scopes[error.node.name][0]:
            raise UntraceableError(str(error), layer=layer, reason=str(error)) from error
        raise


def functional_transposed(
    module: nn.Module, inputs: Sequence[TensorSpec], leaves: Sequence[str], route: str
) -> dict[str, Any]:
    """Return the transposed convolutions of a network that calls some as functions, by the names that `skip` takes."""
    if not any(parameter.dim() > 2 for parameter in _own_parameters(module).values()):
        return {}  # spares most networks the tracing
    network = trace_network(copy.deepcopy(module), inputs, leaves, route)
    return transposed_layers(network.graph, network.scopes)


def _untraceable(module: nn.Module, error: Exception) -> UntraceableError:
    """Return the error for the line and the layer of the model where tracing stopped."""
    place, layer = _place(module, error)
    stopped = f"{place} can't be traced into a graph ({first_line(error)})"
    left_float = f"leave that layer float: skip: [{layer}]" if layer else "into a submodule, which then stays float"
    if isinstance(error, DataDependentError):
        remedy = f"{_BRANCH_REMEDY}, or {left_float}"
        hint = "torch.where in its place could become int8"
    else:
        otherwise = f"write it otherwise, or {left_float}" if layer else "or write it otherwise"
        remedy = f"Let torch.export trace it (route: export), {otherwise}"
        hint = "route: export may trace it"
    return UntraceableError(f"{stopped}. {remedy}", layer=layer, reason=f"{stopped}; {hint}")


def _not_exported(module: nn.Module, error: Exception) -> StageError:
    """Return the error for the line and the layer of the model where torch.export stopped."""
    place, layer = _place(module, error)
    where = f"{place} in {layer}" if layer else place
    left_float = "leaves that layer float" if layer else "leaves a submodule with it float"
    is_branch = depends_on_values(error)
    reason = ON_VALUES if is_branch else first_line(error)
    remedy = _BRANCH_REMEDY if is_branch else "Write it otherwise"
    return StageError(f"torch.export can't trace {where} ({reason}). {remedy}, or take route: fx, which {left_float}")


def _place(module: nn.Module, error: Exception) -> tuple[str, str]:
    place = place_of_error(module, error, __file__)
    return place.line or "the network", place.module
