"""Forward hooks of layers, as operators of a traced graph around the call of the layer.

FX records the call of a layer alone. The layer then runs its hooks, until it is fused or becomes int8, and loses them.
Here what hooks do is recorded, and the graph calls a copy of the layer without them. A layer that is named to stay
float is called as a whole, with its hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from torch.fx import Graph, GraphModule, Proxy, Tracer
from torch.fx.proxy import Scope, ScopeContextManager

from ptpipe import StageError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ARE_RECORDED = "hooks_are_recorded"
"""Key of `Node.meta`: true of the call of a layer whose hooks are operators of the graph."""


class HookTracer(Tracer):
    """Mixin of a tracer that records what hooks do."""

    skipped_module_names: list[str]
    """Modules to call as a whole, with their hooks."""
    scope: Scope
    _leaf: nn.Module | None = None
    """The layer whose hooks run."""

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call, and what hooks do before and behind it."""
        record = super().call_module
        if self._leaf is not None and m in self._leaf.children():
            raise TypeError("a hook calls a layer inside of its own")  # a graph can't call both
        if not has_hooks(m) or (name := self.path_of_module(m)) in self.skipped_module_names:
            return record(m, forward, args, kwargs)
        hooks = {kind: self._tolerant(getattr(m, kind)) for kind in _HOOKS}
        if not self.is_leaf_module(m, name):
            with _attributes(m, hooks):
                return record(m, forward, args, kwargs)
        kept = _proxies(m)

        def between_hooks(*args: Any, **kwargs: Any) -> Any:
            with _attributes(m, own_forward | {kind: OrderedDict() for kind in _HOOKS}):
                if _proxies(m) != kept:  # weights that a hook has computed
                    with ScopeContextManager(self.scope, Scope(name, type(m))):
                        return m.forward(*args, **kwargs)
                returned = record(m, m.forward, args, kwargs)
            returned.node.meta[_ARE_RECORDED] = True
            return returned

        with _attributes(m, hooks | {"forward": between_hooks}) as own:
            own_forward, outer, self._leaf = {"forward": own["forward"]}, self._leaf, m
            try:
                return forward(*args, **kwargs)
            finally:
                self._leaf = outer

    def only_observes(self, _hook: Callable[..., Any], _args: Any, _kwargs: Any) -> bool:
        """Return whether a hook that can't be traced is known to change nothing."""
        return False

    def _tolerant(self, hooks: Mapping[int, Callable[..., Any]]) -> OrderedDict[int, Callable[..., Any]]:
        """Return hooks that may fail, given proxies in the place of values, if they change nothing."""

        def tolerant(hook: Callable[..., Any]) -> Callable[..., Any]:
            def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:  # errors are of `layer`, see `place_of_error`
                try:
                    return hook(layer, *args, **kwargs)
                except Exception:
                    if self.only_observes(hook, (layer, *args), kwargs):
                        return None
                    raise

            return run

        return OrderedDict((key, tolerant(hook)) for key, hook in hooks.items())


def has_hooks(layer: nn.Module) -> bool:
    """Return whether a layer has hooks on its forward pass."""
    return any(getattr(layer, kind) for kind in _HOOKS)


def hooked_layers(network: nn.Module) -> list[str]:
    """Return the names of the layers that have hooks on their forward pass."""
    return [name for name, layer in network.named_modules() if has_hooks(layer)]


def refuse_lost_hooks(converted: nn.Module, hooked: Sequence[str]) -> None:
    """Raise StageError if one of these layers has become int8, and lost the hooks that it had."""
    left = hooked_layers(converted)
    for name in hooked:
        if name not in left:
            raise StageError(f"{name} would lose its hooks as an int8 layer. Leave it float: skip: [{name}]")


def network_of(module: nn.Module, graph: Graph) -> GraphModule:
    """Return a network that computes a traced graph with the layers of `module`, which keep their hooks."""
    network = GraphModule(module, graph)
    for node in network.graph.find_nodes(op="call_module"):
        layer = network.get_submodule(str(node.target))
        if has_hooks(layer) and type(layer).__module__.startswith("torch.nn."):
            is_recorded = node.meta.get(_ARE_RECORDED, False)
            network.set_submodule(str(node.target), _without_hooks(layer) if is_recorded else _as_a_whole(layer))
    return network


def _without_hooks(layer: nn.Module) -> nn.Module:
    own = _copy(layer, type(layer))
    own.__dict__ |= {kind: OrderedDict() for kind in _HOOKS}
    return own


def _as_a_whole(layer: nn.Module) -> nn.Module:
    """Return the layer, of a type that is neither fused with others nor int8."""
    return _copy(layer, type(type(layer).__name__, (type(layer),), {"__module__": type(layer).__module__}))


def _copy(layer: nn.Module, type_: type[nn.Module]) -> nn.Module:
    copy: Any = type_.__new__(type_)
    copy.__dict__ |= layer.__dict__
    return cast(nn.Module, copy)


def _proxies(layer: nn.Module) -> dict[str, int]:
    return {name: id(value) for name, value in vars(layer).items() if isinstance(value, Proxy)}


@contextmanager
def _attributes(owner: nn.Module, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give a module other attributes inside the `with`, which gets its own; None: those of its class."""
    own = {name: vars(owner).get(name) for name in values}
    _set(owner, values)
    try:
        yield own
    finally:
        _set(owner, own)


def _set(owner: nn.Module, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is None:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = value
