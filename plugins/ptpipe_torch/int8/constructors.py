"""Constructors of observers, which FX graph mode quantization calls far more often than it inserts an observer.

To read a data type it makes an observer, dozens of times for each operator (torch 2.13): half of the time that it takes
would be spent in their `__init__`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule

from ptpipe_torch.int8.engine import deprecations_silenced

with deprecations_silenced():
    from torch.ao.quantization.observer import _PartialWrapper


class _Copies:
    """Copies of the first observer of each kind, which share its tensors and submodules until they are separated."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[_Constructor, str], nn.Module] = {}
        self._made: dict[nn.Module, Callable[[], nn.Module]] = {}

    def make(self, constructor: _Constructor, keywords: dict[str, Any]) -> nn.Module:
        construct = partial(partial.__call__, constructor, **keywords)
        kind = (constructor, repr(keywords))
        if kind not in self._firsts:
            self._firsts[kind] = construct()
        made = copy.copy(self._firsts[kind])
        self._made[made] = construct
        return made

    def separate(self, network: nn.Module) -> None:
        """Give those in a network, some of which are called in several places, a state of their own."""
        for module in self._made.keys() & set(network.modules()):
            module.__dict__.update(self._made[module]().train(module.training).__dict__)


_COPIES: ContextVar[_Copies | None] = ContextVar("copies", default=None)


class _Constructor(partial):  # type: ignore[type-arg]
    """Makes observers; while `insert_by_copying` is under way, as copies of the first."""

    def __call__(self, **keywords: Any) -> Any:
        copies = _COPIES.get()
        return super().__call__(**keywords) if copies is None else copies.make(self, keywords)


def copying_constructor(constructor: Any) -> Any:
    """Return what makes the same observers as `constructor`, a type or its `with_args`, quickly where they are read."""
    if not isinstance(constructor, _PartialWrapper) or constructor.callable_args or type(constructor.p) is not partial:
        return constructor
    return _PartialWrapper(_Constructor(constructor.p))  # type: ignore[no-untyped-call]  # torch.ao is partly typed


def insert_by_copying(insert: Callable[[], GraphModule]) -> GraphModule:
    """Return the network in which `insert` has put observers, made by `copying_constructor`s or by others.

    They are those that it would have made without this function: each has a state of its own at the end. Nothing may
    go through them before.
    """
    copies = _Copies()
    token = _COPIES.set(copies)
    try:
        network = insert()
    finally:
        _COPIES.reset(token)
    copies.separate(network)
    return network
