"""Observers whose range FX uses for tensors that it does not fit.

Some have a fixed range: torch's int8 sigmoid has outputs on the grid of 0 to 1, tanh on that of -1 to 1. FX uses such
an observer in other places too. It observes the input of a sigmoid like its output, unless the operator
before it observes it; and where several tensors share one grid (concatenation), all are put on that of the first.
Values outside of 0 to 1 would then saturate, in the fake-quantized network, the int8 network and the file alike.

Others are shared: a reshape has the grid of its input, for which FX takes the last int8 tensor in front of it, also
where a float operator, whose output may have quite another range, stands between the two.

A piece of a tensor (`chunk`, `x[:, :8]`) is observed on its own, and would be rounded twice: its values are on the
grid of the whole already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.moved_integers import whole_of
from ptpipe_torch.int8.observers import fixed_grid, observer_at, observer_calls, operator_at, use_observer

with deprecations_silenced():
    from torch.ao.nn.intrinsic.modules.fused import _FusedModule
    from torch.ao.quantization.backend_config import BackendConfig, ObservationType


def observe_unbounded(prepared: GraphModule, mapping: Any, backend_config: BackendConfig) -> None:
    """Observe each tensor that could exceed its fixed range, in place.

    `mapping`: the QConfigMapping that the network was prepared with; its global QConfig has the observer to use. A
    float tensor that several operators read on grids of their own gets one for all of them.
    """
    ranges = _FixedRanges(prepared, mapping, backend_config)
    for observer, calls in observer_calls(prepared).items():
        unbounded = [call for call in calls if fixed_grid(observer) and not ranges.is_bounded(call)]
        if unbounded:
            observed = mapping.global_qconfig.activation()
            use_observer(prepared, unbounded, observed)
            for call in unbounded:
                ranges.share_grid(call.all_input_nodes[0], observed)
    _observe_once(prepared)
    prepared.graph.lint()
    prepared.recompile()


def observe_inputs_of_layers(prepared: GraphModule) -> None:
    """Observe what each layer with weights reads, in place, where FX (torch 2.13) forgets it.

    That is behind operators that move the network's input (`x.view(...).permute(...)`).
    """
    qconfigs = prepared.meta["_observed_graph_module_attrs"].node_name_to_qconfig
    for node in prepared.graph.find_nodes(op="call_module"):
        layer = _called(prepared, node)
        has_weights = hasattr(layer, "weight") or isinstance(layer, _FusedModule)
        if has_weights and qconfigs.get(node.name) is not None and observer_at(prepared, node) is None:
            source = node.all_input_nodes[0]
            if observer_at(prepared, source) is None:
                _observe_between(prepared, source, node, qconfigs[node.name].activation())


def observe_behind_float(prepared: GraphModule, mapping: Any, backend_config: BackendConfig) -> None:
    """Observe what is reshaped behind a float operator on its own, in place. The arguments are as above.

    The inputs of a concatenation must share one grid: what others read as well has its own in front of them.
    """
    ranges = _FixedRanges(prepared, mapping, backend_config)
    for call in [node for node in prepared.graph.nodes if observer_at(prepared, node) is not None]:
        operator = call.all_input_nodes[0]
        joins = [user for user in call.users if ranges.joins(user)]
        if ranges.shares_grid(operator) and not (joins and len(joins) == len(call.users)):
            for join in joins:
                _observe_between(prepared, call, join, _called(prepared, call))
            before = observer_at(prepared, _tensor_inputs(operator)[0])
            own = mapping.global_qconfig.activation() if before is None else before
            use_observer(prepared, [call], own)


def observe_pieces(prepared: GraphModule) -> None:
    """Put pieces of an observed tensor on its grid, in place, and with them what has the grid of a piece.

    One whose observer is that of other tensors too, as in front of a concatenation, keeps it.
    """
    for own, calls in observer_calls(prepared).items():
        tensor = whole_of(calls[0].all_input_nodes[0])
        whole = None if tensor is None else observer_at(prepared, tensor)
        if whole is not None and whole is not own and not fixed_grid(whole) and _observes_alone(calls):
            use_observer(prepared, calls, whole)
    prepared.recompile()


def _observes_alone(calls: Sequence[Node]) -> bool:
    """Return whether all calls of an observer but the first are behind operators on one tensor that it observed.

    Such operators have the grid of their input: reshapes, permutations.
    """
    sources = [_tensor_inputs(call.all_input_nodes[0]) for call in calls[1:]]
    return all(len(tensors) == 1 and tensors[0] in calls for tensors in sources)


def _fixed_grids(mapping: Any) -> dict[Any, tuple[float, int]]:
    """Return scale and zero point of each operator, by its type, function or method, that has a fixed range."""
    qconfigs = mapping.object_type_qconfigs
    grids = {qconfig: fixed_grid(qconfig.activation()) for qconfig in set(qconfigs.values()) if qconfig is not None}
    return {target: grid for target, qconfig in qconfigs.items() if (grid := grids.get(qconfig))}


def _sharing(backend_config: BackendConfig) -> set[Any]:
    """Return the operators whose output has the grid of their input."""
    return {
        config.pattern
        for config in backend_config.configs
        if config.observation_type is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    }


class _FixedRanges:
    """Knows which tensors can't exceed the fixed range that they are observed with."""

    def __init__(self, prepared: GraphModule, mapping: Any, backend_config: BackendConfig) -> None:
        self._prepared = prepared
        self._qconfigs = prepared.meta["_observed_graph_module_attrs"].node_name_to_qconfig
        self._grids, self._sharing = _fixed_grids(mapping), _sharing(backend_config)

    def is_bounded(self, call: Node) -> bool:
        """Return whether this observer's input comes from an operator with that range, or from such tensors alone."""
        grid, source = fixed_grid(_called(self._prepared, call)), call.all_input_nodes[0]
        target = operator_at(self._prepared, source)
        if target in self._grids:
            return self._grids[target] == grid
        is_int8 = self._qconfigs.get(source.name) is not None  # in float, an interpolation may leave the range
        return (
            is_int8
            and target in self._sharing
            and all(
                (observer := observer_at(self._prepared, node)) is not None
                and fixed_grid(observer) == grid
                and self.is_bounded(node)
                for node in _tensor_inputs(source)
            )
        )

    def shares_grid(self, operator: Node) -> bool:
        """Return whether an operator's output has the grid of its input."""
        return operator_at(self._prepared, operator) in self._sharing

    def joins(self, operator: Node) -> bool:
        """Return whether an operator puts several tensors on one grid."""
        return self.shares_grid(operator) and len(_tensor_inputs(operator)) > 1

    def share_grid(self, operator: Node, observer: nn.Module) -> None:
        """Put all inputs of an operator whose inputs and output share a grid on that of `observer`.

        In torch's int8 concatenation, the output has the grid of the first input, whatever was observed.
        """
        if not self.shares_grid(operator):
            return
        for node in _tensor_inputs(operator):
            if _called(self._prepared, node) is not observer:
                _observe_between(self._prepared, node, operator, observer)


def _tensor_inputs(operator: Node) -> list[Node]:
    """Return the tensors that an operator with one grid reads: a list of them, or one, which sizes may follow."""
    reads_list = any(isinstance(argument, list | tuple) for argument in operator.args[:1])
    return operator.all_input_nodes if reads_list else operator.all_input_nodes[:1]


def _called(prepared: GraphModule, node: Node) -> nn.Module:
    return prepared.get_submodule(str(node.target)) if node.op == "call_module" else prepared


def _observe_between(prepared: GraphModule, node: Node, reader: Node, observer: nn.Module) -> None:
    name = f"{node.name}_of_{reader.name}"
    prepared.add_submodule(name, observer)
    with prepared.graph.inserting_before(reader):
        reader.replace_input_with(node, prepared.graph.call_module(name, (node,)))


def _observe_once(prepared: GraphModule) -> None:
    for node in list(prepared.graph.nodes):
        first, *others = [user for user in node.users if observer_at(prepared, user) is not None] or [node]
        for other in others:
            if (observer := _called(prepared, other)) is not _called(prepared, first):
                use_observer(prepared, observer_calls(prepared)[observer], _called(prepared, first))
            other.replace_all_uses_with(first)
            prepared.graph.erase_node(other)
