"""Tracing of a network into an FX graph, with known sizes only where it needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Graph

from ptpipe_torch.int8 import einops_proxies
from ptpipe_torch.int8.attribute_names import accept_keywords
from ptpipe_torch.int8.sized_tracer import NumberOfBatchError, SizedTracer, sizes_of_symbols, whole_number
from ptpipe_torch.int8.tensor_properties import resolve_properties
from ptpipe_torch.int8.tracer import NetworkTracer, Scopes
from ptpipe_torch.kept_attributes import KeptAttributes, forget_sizes
from ptpipe_torch.model.example_inputs import computes_the_same, zeros
from ptpipe_torch.model.signature import TensorSpec
from ptpipe_torch.traced_gradients import functions_with_own_gradient
from ptpipe_torch.traced_hooks import network_of
from ptpipe_torch.whole_quotients import own_int

_Tracer = TypeVar("_Tracer", bound=NetworkTracer)


def trace_graph(
    module: nn.Module, inputs: Sequence[TensorSpec], leaves: Iterable[str], *, keeps_gradients: bool = False
) -> tuple[Graph, Scopes]:
    """Return the graph of a network and the scope of each node; sizes become constants only where they must be.

    `keeps_gradients`: do not trace into autograd functions with a gradient of their own.
    Raises whatever the network raises while it is traced.
    """
    leaves = list(leaves)
    einops_proxies.accept_proxies()
    accept_keywords()
    graph, tracer = _traced(module, inputs, leaves, {})
    followed = tracer.gradients.followed if keeps_gradients else ()
    if followed and (functions := functions_with_own_gradient(module, inputs, followed)):
        graph, tracer = _traced(module, inputs, leaves, functions)
    resolve_properties(graph, module)
    return graph, tracer.node_name_to_scope


def _traced(
    module: nn.Module, inputs: Sequence[TensorSpec], leaves: Sequence[str], functions: Mapping[Any, bool]
) -> tuple[Graph, NetworkTracer]:
    with torch.no_grad():  # or autograd functions want to save what are proxies
        with suppress(Exception):  # a network may raise anything, given proxies in the place of values
            return _recorded(module, NetworkTracer(leaves, len(inputs), functions))
        sizes = sizes_of_symbols(module, inputs)
        make_tracer = functools.partial(SizedTracer, leaves, inputs, functions, symbol_sizes=sizes)
        try:
            return _traced_with_sizes(module, inputs, make_tracer)
        except Exception:
            if not forget_sizes(module, zeros(inputs, 2)):
                raise
            return _traced_with_sizes(module, inputs, functools.partial(make_tracer, was_called=False))


def _traced_with_sizes(
    module: nn.Module, inputs: Sequence[TensorSpec], make_tracer: Callable[..., SizedTracer]
) -> tuple[Graph, NetworkTracer]:
    with torch.random.fork_rng(devices=[]):
        graph, tracer = _recorded_with_sizes(module, make_tracer)
        if tracer.may_differ_for_one_sample and not computes_the_same(
            network_of(module, graph), module, inputs, num_samples=1
        ):
            return _recorded_with_sizes(module, functools.partial(make_tracer, decides_for_samples=False))
    return graph, tracer


def _recorded_with_sizes(module: nn.Module, make_tracer: Callable[[], SizedTracer]) -> tuple[Graph, SizedTracer]:
    try:
        return _recorded(module, make_tracer())
    except NumberOfBatchError:
        with own_int(module, whole_number):
            return _recorded(module, make_tracer())


def _recorded(module: nn.Module, tracer: _Tracer) -> tuple[Graph, _Tracer]:
    """Trace a network, in which no proxies stay; if that fails, it is left as it was."""
    kept = KeptAttributes(module)
    try:
        graph = tracer.trace(module)
    except Exception:
        kept.restore()
        raise
    kept.remove_proxies()
    return graph, tracer
