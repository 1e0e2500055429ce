"""Options by layer: which operators of a traced network they reach, and the QConfigs that these get.

A pattern names what `skip` names: a layer, or a module with all layers and operators inside it. The first pattern that
matches counts. Options reach what those of the stage reach: operators with a fixed range (sigmoid) keep it, and
transposed convolutions their one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.layer_forms import TRANSPOSED
from ptpipe_quant.trace import TracedNetwork, matching_names
from ptpipe_torch.int8.biases import weighted_part
from ptpipe_torch.int8.fx import FLOAT_SCOPE, operator_qconfig, set_operator_qconfigs
from ptpipe_torch.int8.observers import observer_at, operator_at

Options: TypeAlias = Mapping[str, Any]
"""`observer`, `percentile` and `weights`, as far as a layer has its own."""

_WITH_INT8_WEIGHTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


class QConfigs(NamedTuple):
    """What operators are quantized with."""

    common: Any
    per_tensor: Any
    """Of transposed convolutions."""
    narrow: Any
    """Of layers whose sums of products overflow with 8-bit weights."""


@dataclass(frozen=True)
class LayerRule:
    """A pattern, its options, and what it matches."""

    pattern: str
    options: Options
    names: Sequence[str]


def layer_rules(module: nn.Module, layers: Iterable[tuple[str, Options]]) -> list[LayerRule]:
    """Resolve the patterns of `layers`. Raises StageError for one without a match, with the nearest name or type."""
    return [LayerRule(pattern, options, matching_names(module, [pattern], "layers")) for pattern, options in layers]


def options_at(path: str, rules: Iterable[LayerRule]) -> dict[str, Any]:
    """Return the options of the first rule that matches a module or one around it; none without such a rule."""
    return next((dict(rule.options) for rule in rules if _is_inside(path, rule.names)), {})


class OptionsByLayer:
    """The rules of a traced network, and the operators that each of them decides."""

    def __init__(self, rules: Sequence[LayerRule], network: TracedNetwork, graph: GraphModule) -> None:
        """`graph`: that of the network, its batch norms folded or not."""
        self._rules, self._network, self._graph = rules, network, graph
        self._nodes: dict[str, list[Node]] = {rule.pattern: [] for rule in rules}
        for node in graph.graph.nodes if rules else ():
            path = self._path(node)
            rule = next((rule for rule in rules if path and _is_inside(path, rule.names)), None)
            if rule is not None:
                self._nodes[rule.pattern].append(node)

    def use_in(self, mapping: Any, qconfigs_of: Callable[[Options], QConfigs], narrow_names: Sequence[str]) -> None:
        """Give each operator the QConfig of its rule, in place. `narrow_names`: layers with narrow weights."""
        for rule in self._rules:
            qconfigs, found = qconfigs_of(rule.options), dict[Node, Any]()
            for node in self._nodes[rule.pattern]:
                own = operator_qconfig(mapping, operator_at(self._graph, node), qconfigs.common, qconfigs.per_tensor)
                if own is not None:
                    found[node] = qconfigs.narrow if node.target in narrow_names else own
            self._nodes[rule.pattern] = list(found)
            set_operator_qconfigs(mapping, self._network.scopes, found)

    def reached(self) -> dict[str, list[str]]:
        """Return the layers with weights that each pattern decides, before observers are inserted."""
        return {
            rule.pattern: [self._path(node) for node in self._nodes[rule.pattern] if self._has_int8_weights(node)]
            for rule in self._rules
        }

    def with_own_observer(self) -> set[str]:
        """Return the names of the operators whose rule has an observer."""
        return {node.name for rule in self._rules if "observer" in rule.options for node in self._nodes[rule.pattern]}

    def idle_weights(self) -> list[str]:
        """Return a message for each pattern that decides nothing, or no weights; before observers are inserted."""
        return [message for rule in self._rules if (message := self._idle_weights(rule))]

    def idle_observers(self, prepared: GraphModule, types: Mapping[str, type[nn.Module]]) -> list[str]:
        """Return a message for each pattern whose observer observes no tensor. `types`: of observers, by option."""
        nodes = {node.name: node for node in prepared.graph.nodes}
        messages = []
        for rule in self._rules:
            wanted = types.get(rule.options.get("observer", ""))
            called = [nodes[node.name] for node in self._nodes[rule.pattern] if node.name in nodes]
            around = [other for node in called for other in (*node.users, *node.all_input_nodes)]
            if (
                called
                and wanted is not None
                and not any(type(observer_at(prepared, node)) is wanted for node in around)
            ):
                messages.append(
                    f"layers: observer of {rule.pattern!r} has no effect: outputs of what it matches are float, have a "
                    "fixed range, or share that of another layer (concatenation): name that layer"
                )
        return messages

    def _idle_weights(self, rule: LayerRule) -> str | None:
        nodes = self._nodes[rule.pattern]
        if not nodes:
            return (
                f"layers: {rule.pattern!r} decides nothing: all that it matches stays float, is matched by a pattern "
                "above it, is one convolution with another branch, or is no layer of its own in the graph (route)"
            )
        if "weights" not in rule.options:
            return None
        operators = [operator_at(self._graph, node) for node in nodes if self._has_int8_weights(node)]
        if not operators:
            return f"layers: weights of {rule.pattern!r} has no effect: no layer with int8 weights matches"
        if rule.options["weights"] == "per_channel" and all(operator in TRANSPOSED for operator in operators):
            return (
                f"layers: weights of {rule.pattern!r} has no effect: int8 kernels of transposed convolutions take one "
                "scale for all weights, on every backend"
            )
        return None

    def _path(self, node: Node) -> str:
        """Return the module that an operator belongs to; empty for those of the whole network, and those left float."""
        path, _type = self._network.scopes.get(node.name, ("", None))
        target = str(node.target) if node.op == "call_module" else path
        is_float = path.startswith(FLOAT_SCOPE) or any(
            _is_inside(name, self._network.float_names) for name in (path, target)
        )
        return "" if is_float or not node.op.startswith("call_") else path

    def _has_int8_weights(self, node: Node) -> bool:
        if node.op != "call_module":
            return False
        return isinstance(weighted_part(self._graph.get_submodule(str(node.target))), _WITH_INT8_WEIGHTS)


def _is_inside(path: str, names: Iterable[str]) -> bool:
    return any(f"{path}.".startswith(f"{name}.") for name in names)
