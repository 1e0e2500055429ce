"""What tracing would lose of a network's gradients: `torch.no_grad`, and backward passes of autograd functions.

A tracer follows the forward pass of a `torch.autograd.Function` and records what it computes. Its backward pass is then
the derivative of that, whatever the function's own says: a gradient that is reversed, or passed straight through a
sign, would be lost. Such functions are recorded as they are. Most only save memory, and have the same derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
from torch import nn
from torch.autograd.function import Function, FunctionCtx, _is_setup_context_defined
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.model.signature import TensorSpec

NO_GRAD = "no_grad"
"""Key of `Node.meta`: true of a node that is recorded inside of `torch.no_grad` or `torch.inference_mode`."""

RETURNS_INPUT = "returns_input"
"""Attribute of a recorded function: whether it returns its first argument unchanged."""

_Functions: TypeAlias = Collection[type[Function]]
_Call: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
_Forward: TypeAlias = Callable[..., Any]

_BATCH_SIZE = 2
_RTOL, _ATOL = 1e-3, 1e-5


class GradientRecorder:
    """Knows, while a network is traced, whether gradients are off, and which autograd functions are called.

    `recorded`: returns None for a function to trace into, else whether it returns its first argument.
    """

    def __init__(self, recorded: Callable[[type[Function]], bool | None]) -> None:
        self._recorded = recorded
        self._entered: list[Any] = []
        self._is_inside = False
        """Whether a function is traced into, in which gradients are off anyway."""
        self.followed: dict[type[Function], None] = {}
        """The functions that are traced into."""

    @property
    def is_off(self) -> bool:
        """Whether the line that is traced is inside of `no_grad` or `inference_mode`."""
        return bool(self._entered)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record inside the `with`."""
        with ExitStack() as stack:
            for mode in (torch.no_grad, torch.inference_mode):
                stack.enter_context(self._noting(mode))
            stack.enter_context(_computed_by(self._forward))
            yield

    @contextmanager
    def _noting(self, mode: Any) -> Iterator[None]:
        enter, leave = mode.__enter__, mode.__exit__

        def noted_enter(context: Any) -> Any:
            if getattr(context, "mode", True) and not self._is_inside:  # the mode of inference_mode may be False
                self._entered.append(context)
            return enter(context)

        def noted_leave(context: Any, *error: Any) -> Any:
            if context in self._entered:
                self._entered.remove(context)
            return leave(context, *error)

        with _attribute(mode, "__enter__", noted_enter), _attribute(mode, "__exit__", noted_leave):
            yield

    def _forward(self, function: type[Function], forward: _Forward, *args: Any, **kwargs: Any) -> Any:
        proxies = _proxies((args, kwargs))
        if not proxies:
            return forward(*args, **kwargs)
        if not function.__module__.startswith("torch."):  # of which activation checkpoints are
            if (returns_input := self._recorded(function)) is not None:
                recorded = _applying(function, returns_input)
                return proxies[0].tracer.create_proxy("call_function", recorded, args, kwargs)
            self.followed[function] = None
        inside, self._is_inside = self._is_inside, True
        try:
            return forward(*args, **kwargs)
        finally:
            self._is_inside = inside


class GradientTracer(Tracer):
    """Mixin of a tracer that marks nodes with `NO_GRAD`, and records autograd functions as `gradients` says."""

    gradients: GradientRecorder

    def trace(self, root: Any, concrete_args: Any = None) -> Graph:
        """Trace a network."""
        with self.gradients.active():
            return super().trace(root, concrete_args)

    def create_node(self, *arguments: Any, **named: Any) -> Node:
        """Record an operator."""
        node = super().create_node(*arguments, **named)
        node.meta[NO_GRAD] = self.gradients.is_off
        return node


@functools.cache
def _applying(function: Any, returns_input: bool) -> Callable[..., Any]:
    """Return a function with the name of this one: the code of a graph can't name a method of torch's."""

    def applied(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)

    applied.__name__, applied.__module__ = function.__name__, function.__module__
    setattr(applied, RETURNS_INPUT, returns_input)
    return applied


def functions_with_own_gradient(
    module: nn.Module, inputs: Sequence[TensorSpec], functions: _Functions
) -> dict[type[Function], bool]:
    """Return the functions whose backward pass is not the derivative of their forward pass.

    Of each, whether it returns its first argument. They are tried on random values, in the shapes in which the network
    in eval mode calls them for such inputs, so that the answer does not depend on weights.
    """
    calls: dict[type[Function], _Call] = {}

    def note(function: type[Function], forward: _Forward, *args: Any, **kwargs: Any) -> Any:
        calls.setdefault(function, (args, kwargs))
        return forward(*args, **kwargs)

    # A stored network may be built in inference mode, whose tensors have no gradients.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        with _computed_by(note), torch.no_grad():
            module(*zeros(inputs, _BATCH_SIZE))
        torch.manual_seed(0)
        tried = {function: _Trial.of(function, *calls[function]) for function in functions if function in calls}
    return {function: trial.returns_input for function, trial in tried.items() if trial.has_own_gradient}


@dataclass(frozen=True)
class _Trial:
    """What an autograd function does on random values."""

    has_own_gradient: bool
    returns_input: bool = False

    @classmethod
    def of(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Self:
        leaves: list[torch.Tensor] = []

        def drawn(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if not value.is_floating_point():
                return torch.zeros(value.shape, dtype=value.dtype)
            leaves.append(torch.randn(value.shape, dtype=value.dtype).requires_grad_())
            return leaves[-1]

        args, kwargs = map_aggregate((tuple(args), dict(kwargs)), drawn)
        try:
            own = _gradients(function.apply, args, kwargs, leaves)
            derivative = _gradients(_forward_pass(function, len(args)), args, kwargs, leaves)
            with torch.no_grad():
                result = function.apply(*_copied(args), **_copied(kwargs))
        except Exception:  # noqa: BLE001  # such a function may raise anything where it is used otherwise
            return cls(has_own_gradient=True)
        is_same = all(
            torch.allclose(a, b, rtol=_RTOL, atol=_ATOL, equal_nan=True) for a, b in zip(own, derivative, strict=True)
        )
        returns_input = isinstance(result, torch.Tensor) and len(leaves) == 1 and torch.equal(result, leaves[0])
        return cls(not is_same, returns_input)


def _forward_pass(function: Any, num_args: int) -> Callable[..., Any]:
    if _is_setup_context_defined(function.setup_context):  # type: ignore[no-untyped-call]
        return function.forward  # type: ignore[no-any-return]
    context: Any = FunctionCtx()
    context.needs_input_grad = (True,) * num_args
    return lambda *args, **kwargs: function.forward(context, *args, **kwargs)


def _gradients(call: Callable[..., Any], args: Any, kwargs: Any, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of a random sum of the results: zeros where there is none."""
    torch.manual_seed(1)
    with torch.enable_grad():
        results = [value for value in tree_leaves(call(*_copied(args), **_copied(kwargs))) if _requires_grad(value)]
        total = sum((value * torch.randn(value.shape)).sum() for value in results)
        found = torch.autograd.grad(total, leaves, allow_unused=True) if results else [None] * len(leaves)
    return [torch.zeros_like(leaf) if value is None else value for value, leaf in zip(found, leaves, strict=True)]


def _copied(values: Any) -> Any:
    """Return arguments that a function may change in place."""
    return map_aggregate(values, lambda value: value.clone() if isinstance(value, torch.Tensor) else value)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _proxies(values: Any) -> list[Proxy]:
    return [value for value in tree_leaves(values) if isinstance(value, Proxy)]


@contextmanager
def _computed_by(handler: Callable[..., Any]) -> Iterator[None]:
    """Let `handler(function, forward, *args, **kwargs)` compute all autograd functions inside the `with`.

    `apply` would be the place, but torch 2.14 no longer looks it up where a network has stored it.
    """
    with ExitStack() as stack:
        # A list: they inherit from each other, and each is read before any is replaced.
        for function, replaced in [(function, _replaced(function, handler)) for function in _derived(Function)]:
            for name, value in replaced.items():
                stack.enter_context(_attribute(function, name, value))
        yield


def _derived(base: Any) -> Iterator[Any]:
    for derived in base.__subclasses__():
        yield derived
        yield from _derived(derived)


def _replaced(function: Any, handler: Callable[..., Any]) -> dict[str, Any]:
    """Return the methods by which an autograd function is computed by `handler`."""
    forward, setup_context = function.forward, function.setup_context
    has_setup = _is_setup_context_defined(setup_context)  # type: ignore[no-untyped-call]

    @functools.wraps(forward)  # `apply` reads its signature
    def replaced_forward(*args: Any, **kwargs: Any) -> Any:
        if has_setup:
            return handler(function, forward, *args, **kwargs)
        context, *values = args
        if getattr(context, "_forward_cls", None) is not function:  # not applied, but called by another's `forward`
            return forward(*args, **kwargs)
        return handler(function, functools.partial(forward, context), *values, **kwargs)

    def replaced_setup(context: Any, inputs: Any, output: Any) -> None:
        if not _proxies((inputs, output)):  # which have no backward pass to save anything for
            setup_context(context, inputs, output)

    setup = {"setup_context": staticmethod(replaced_setup)} if has_setup else {}
    return {"forward": staticmethod(replaced_forward), **setup}


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a class another attribute inside the `with`."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
