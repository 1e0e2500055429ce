"""Ranges of what a network returns: from the smallest value that calibration saw to the largest.

Observers that cut off large values for a finer grid (`mse`, `percentile`, `entropy`) lose little inside a network. Of
its outputs the large ones are those that count: the logit of the class or the token that is predicted. Outputs may have
units of their own, too, and steps far below torch's smallest one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch.fx import GraphModule, Node

from ptpipe_quant.float_nodes import has_weights
from ptpipe_torch.int8.observers import (
    ACTIVATION_FORMAT,
    fine_min_max_observer,
    observer_at,
    observer_calls,
    observes_activation_range,
    use_observer,
)


def observe_whole_outputs(prepared: GraphModule, chosen: Collection[str]) -> None:
    """Let min-max observers observe what a prepared network returns, in place.

    `chosen`: names of operators whose observer a user has chosen.
    """
    last = set(_last_observed(prepared))
    for observer, calls in observer_calls(prepared).items():
        is_chosen = any(call.all_input_nodes[0].name in chosen for call in last.intersection(calls))
        if not last.isdisjoint(calls) and not is_chosen and observes_activation_range(observer):
            use_observer(prepared, calls, fine_min_max_observer(**ACTIVATION_FORMAT))


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
            elif not has_weights(prepared, node):
                waiting.append(node)
