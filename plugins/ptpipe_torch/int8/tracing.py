"""Tracing of a network into an FX graph, with known sizes only where it needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from ptpipe_torch.int8 import einops_proxies
from ptpipe_torch.int8.removed_proxies import proxies_removed
from ptpipe_torch.int8.sized_tracer import NumberOfBatchError, SizedTracer, whole_number
from ptpipe_torch.int8.tensor_properties import resolve_properties
from ptpipe_torch.int8.tracer import NetworkTracer, Scopes
from ptpipe_torch.model.signature import TensorSpec
from ptpipe_torch.traced_gradients import functions_with_own_gradient
from ptpipe_torch.whole_quotients import own_int


def trace_graph(
    module: nn.Module, inputs: Sequence[TensorSpec], leaves: Iterable[str], *, keeps_gradients: bool = False
) -> tuple[Graph, Scopes]:
    """Return the graph of a network and the scope of each node; sizes become constants only where they must be.

    `keeps_gradients`: do not trace into autograd functions with a gradient of their own.
    Raises whatever the network raises while it is traced.
    """
    leaves = list(leaves)
    einops_proxies.accept_proxies()
    graph, tracer = _traced(module, inputs, leaves, {})
    followed = tracer.gradients.followed if keeps_gradients else ()
    if followed and (functions := functions_with_own_gradient(module, inputs, followed)):
        graph, tracer = _traced(module, inputs, leaves, functions)
    resolve_properties(graph, module)
    return graph, tracer.node_name_to_scope


def _traced(
    module: nn.Module, inputs: Sequence[TensorSpec], leaves: Sequence[str], functions: Mapping[Any, bool]
) -> tuple[Graph, NetworkTracer]:
    tracer: NetworkTracer = NetworkTracer(leaves, len(inputs), functions)
    with torch.no_grad():  # or autograd functions want to save what are proxies
        # A network may raise anything, given proxies in the place of values.
        with suppress(Exception), proxies_removed(module):
            return tracer.trace(module), tracer
        try:
            return _traced_with_sizes(module, SizedTracer(leaves, inputs, functions))
        except NumberOfBatchError:
            with own_int(module, whole_number):
                return _traced_with_sizes(module, SizedTracer(leaves, inputs, functions))


def _traced_with_sizes(module: nn.Module, tracer: SizedTracer) -> tuple[Graph, NetworkTracer]:
    with torch.random.fork_rng(devices=[]), proxies_removed(module):
        return tracer.trace(module), tracer
