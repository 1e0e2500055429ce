"""Operators that stay float in a prepared network: no observers between them, and no int8 kernels in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.observers import observer_at

with deprecations_silenced():
    from torch.ao.quantization.fx._lower_to_native_backend import is_copy_node, is_general_tensor_shape_node


def drop_idle_observers(prepared: GraphModule) -> None:
    """Remove observers between two operators that both stay float: what they observe is no int8 tensor."""
    is_float = _float_test(prepared)
    for node in list(prepared.graph.nodes):
        if observer_at(prepared, node) is not None and all(map(is_float, (node.all_input_nodes[0], *node.users))):
            node.replace_all_uses_with(node.all_input_nodes[0])
            prepared.graph.erase_node(node)
    prepared.recompile()


def fence_float_operators(prepared: GraphModule) -> None:
    """Put a function that torch does not know in front of each operator to leave float.

    Some that stand between int8 tensors (`sigmoid`, `nn.LeakyReLU`, norms) would become int8 all the same (torch 2.13).
    """
    qconfigs = prepared.meta["_observed_graph_module_attrs"].node_name_to_qconfig
    is_float = _float_test(prepared)
    for node in list(prepared.graph.nodes):
        if not is_float(node):
            continue
        for source in node.all_input_nodes:
            if observer_at(prepared, source) is not None:
                with prepared.graph.inserting_before(node):
                    fence = prepared.graph.call_function(_fence, (source,))
                node.replace_input_with(source, fence)
                qconfigs[fence.name] = None
    prepared.recompile()


def remove_fences(converted: GraphModule) -> None:
    """Take what `fence_float_operators` inserted out of the converted network."""
    for fence in converted.graph.find_nodes(op="call_function", target=_fence):
        fence.replace_all_uses_with(fence.args[0])
        converted.graph.erase_node(fence)
    converted.recompile()


def _fence(x: torch.Tensor) -> torch.Tensor:
    return x


def _float_test(prepared: GraphModule) -> Callable[[Node], bool]:
    """Return a function that says whether an operator of a prepared network stays float."""
    qconfigs = prepared.meta["_observed_graph_module_attrs"].node_name_to_qconfig
    modules = dict(prepared.named_modules(remove_duplicate=False))
    return lambda node: qconfigs.get(node.name, ...) is None or _changes_grid(prepared, node, modules)


def _changes_grid(prepared: GraphModule, node: Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether an operator has its output on another grid than its input, which its int8 form can't change.

    So it is in front of a concatenation, whose inputs share one grid, for reshapes, pooling, clamps and another
    concatenation.
    """
    keeps_grid: tuple[Any, ...] = (is_general_tensor_shape_node, is_copy_node)
    if node.target is not torch.cat and not any(any(is_kept(node, modules)) for is_kept in keeps_grid):
        return False
    observers = [observer_at(prepared, other) for other in (*node.all_input_nodes[:1], *node.users)]
    return any(observer not in (None, observers[0]) for observer in observers[1:])
