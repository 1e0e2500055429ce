"""Trace a network into an FX graph, normalized for quantization, and resolve the patterns of `skip`."""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe import StageError, nearest
from ptpipe_torch.int8.fx import Scopes, trace

F = nn.functional

_RELU_FUNCTIONS = (torch.relu, torch.relu_, F.relu, F.relu_)
_RELU_METHODS = ("relu", "relu_")
_DROPOUT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# By name, because torchvision's stochastic_depth is not imported here.
_DROPOUT_FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "stochastic_depth")


def float_names(module: nn.Module, skip: Sequence[str]) -> list[str]:
    """Return the names of the submodules that match `skip`, by name (`features.0`, `layer4.*`) or type (`Linear`).

    Raises StageError for a pattern without a match, with the nearest name or type.
    """
    named = {name: type(part).__name__ for name, part in module.named_modules() if name}
    found: dict[str, None] = {}
    for pattern in skip:
        matches = [name for name, type_ in named.items() if fnmatchcase(name, pattern) or fnmatchcase(type_, pattern)]
        if not matches:
            hint = nearest(pattern, [*named, *dict.fromkeys(named.values())])
            suggestion = f"; did you mean {hint!r}?" if hint else ""
            raise StageError(f"skip: no layer of this network has the name or type {pattern!r}{suggestion}")
        found |= dict.fromkeys(matches)
    return [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]


def layers_to_quantize(module: nn.Module, skip: Sequence[str], *types: type[nn.Module]) -> list[str]:
    """Return the names of the layers of exactly these types that no pattern of `skip` matches."""
    left_float = tuple(f"{name}." for name in float_names(module, skip))
    return [
        name for name, layer in module.named_modules() if type(layer) in types and not f"{name}.".startswith(left_float)
    ]


def trace_network(module: nn.Module, leaves: Iterable[str] = ()) -> tuple[GraphModule, Scopes]:
    """Trace the network's forward pass in eval mode; return the graph and the scope of each node.

    Submodules named by `leaves` are not traced into. Each ReLU, function or module, becomes a separate module, which
    fuses with the layer before it; `nn.Flatten` becomes a function, which has an int8 form; dropout becomes an
    `nn.Identity` that keeps it as `dropout`. Raises StageError with the line of the model that can't be traced.
    """
    try:
        graph, scopes = trace(module.eval(), leaves)
    except Exception as error:  # a network may raise anything while it is traced
        raise StageError(_untraceable(module, error)) from error
    normalizer = _Normalizer(graph, scopes)
    for node in list(graph.graph.nodes):
        normalizer.normalize(node)
    graph.delete_all_unused_submodules()
    graph.graph.lint()
    graph.recompile()
    return graph, scopes


class _Normalizer:
    """Replaces nodes one by one, keeping their scopes."""

    def __init__(self, graph: GraphModule, scopes: Scopes) -> None:
        self.graph, self.scopes = graph, scopes

    def normalize(self, node: Node) -> None:
        layer: Any = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        is_function = node.target in _RELU_FUNCTIONS or (node.op == "call_method" and node.target in _RELU_METHODS)
        if is_function or type(layer) is nn.ReLU:  # one per call: fusing one must not affect the others
            self._replace(node, nn.ReLU())
        elif type(layer) is nn.Flatten:
            self._replace(node, torch.flatten, layer.start_dim, layer.end_dim)
        elif isinstance(layer, _DROPOUT_LAYERS):
            self._replace(node, _disabled(layer))
        elif node.op == "call_function" and getattr(node.target, "__name__", "") in _DROPOUT_FUNCTIONS:
            self._replace_dropout_function(node)

    def _replace_dropout_function(self, node: Node) -> None:
        # Traced in eval mode, so a training flag that is still True is deliberate: that dropout stays.
        parameters = (
            ("input", "p", "mode", "training") if _name(node) == "stochastic_depth" else ("input", "p", "training")
        )
        arguments: dict[str, Any] = dict(zip(parameters, node.args, strict=False)) | dict(node.kwargs)
        if arguments.get("training", True) is False:
            p = arguments.get("p", 0.5) if _name(node) == "dropout" else 0.0
            self._replace(node, _disabled(nn.Dropout(p)))

    def _replace(self, node: Node, replacement: nn.Module | Callable[..., Any], *arguments: Any) -> None:
        source = node.args[0] if node.args else node.kwargs["input"]
        graph = self.graph.graph
        with graph.inserting_before(node):
            if isinstance(replacement, nn.Module):
                name = node.name
                while hasattr(self.graph, name):
                    name += "_"
                self.graph.add_submodule(name, replacement)
                new = graph.call_module(name, (source,))
            else:
                new = graph.call_function(replacement, (source, *arguments))
        self.scopes[new.name] = self.scopes[node.name]
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "")


def _disabled(dropout: nn.Module) -> nn.Identity:
    identity = nn.Identity()
    identity.__dict__["dropout"] = dropout  # not a submodule: not part of the graph until training_graph restores it
    return identity


def _untraceable(module: nn.Module, error: Exception) -> str:
    """Return a message with the line and the layer of the model where tracing stopped."""
    internal = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
    names = {id(part): name for name, part in module.named_modules()}
    place, layer = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if path.startswith(internal):
            continue
        place = f"{path}:{line}: `{linecache.getline(path, line).strip()}`"
        layer = names.get(id(frame.f_locals.get("self")), layer)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    remedy = f", or leave that layer float: skip: [{layer}]" if layer else ""
    return (
        f"{place or 'the network'} can't be traced into a graph ({reason}). Write it without branches or loops that "
        f"depend on tensors{remedy}"
    )
