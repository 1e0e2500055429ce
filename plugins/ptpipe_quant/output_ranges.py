"""Ranges of what a network returns: from the smallest value that calibration saw to the largest.

Observers that cut off large values for a finer grid (`mse`, `percentile`, `entropy`) lose little inside a network. Of
its outputs the large ones are those that count: the logit of the class or the token that is predicted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_torch.int8.observers import (
    ACTIVATION_FORMAT,
    ACTIVATION_OBSERVERS,
    observer_at,
    observes_activation_range,
)


def observe_whole_outputs(prepared: GraphModule, chosen: Collection[str]) -> None:
    """Let min-max observers observe what a prepared network returns, in place.

    `chosen`: names of operators whose observer a user has chosen.
    """
    calls = list(_last_observed(prepared))
    own = {observer_at(prepared, call) for call in calls if call.all_input_nodes[0].name in chosen}
    for observer in dict.fromkeys(observer_at(prepared, call) for call in calls):
        if observer is not None and observer not in own and observes_activation_range(observer):
            _replace(prepared, observer, ACTIVATION_OBSERVERS["min_max"](**ACTIVATION_FORMAT))


def _last_observed(prepared: GraphModule) -> Iterator[Node]:
    """Yield the calls of observers from which outputs are reached without another one, or a layer with weights."""
    waiting, seen = [prepared.graph.output_node()], set[Node]()
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node in seen:
                continue
            seen.add(node)
            if observer_at(prepared, node) is not None:
                yield node
            elif not _has_weights(prepared, node):
                waiting.append(node)


def _has_weights(prepared: GraphModule, node: Node) -> bool:
    if node.op != "call_module":
        return False
    return any(True for _ in prepared.get_submodule(str(node.target)).parameters())


def _replace(prepared: GraphModule, observer: nn.Module, other: nn.Module) -> None:
    """Let another observer observe all that this one does: tensors may share it."""
    for node in prepared.graph.find_nodes(op="call_module"):
        if observer_at(prepared, node) is observer:
            prepared.set_submodule(str(node.target), other)
