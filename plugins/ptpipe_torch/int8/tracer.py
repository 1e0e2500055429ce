"""Tracing of a network into an FX graph: with in-place operators, source lines and, where needed, known sizes."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import TraceError

from ptpipe_torch.answering_builtins import answering_builtins
from ptpipe_torch.errors import ON_VALUES
from ptpipe_torch.int8 import einops_proxies
from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.model.forward_arguments import has_kept_default
from ptpipe_torch.source_line import TORCH_FOLDER, running_line
from ptpipe_torch.traced_autocast import AutocastTracer
from ptpipe_torch.traced_gradients import GradientRecorder, GradientTracer
from ptpipe_torch.traced_hooks import HookTracer
from ptpipe_torch.training_layers import may_act_in_training_alone

with deprecations_silenced():
    from torch.ao.quantization.fx.tracer import QuantizationTracer

Scopes: TypeAlias = dict[str, tuple[str, Any]]
"""For each node of a graph: path and type of the module that it belongs to."""

SOURCE_LINE = "source_line"
"""Key of `Node.meta`: the line of the network that recorded the node, as `path:number: code`."""

ONLY_IN_TRAINING = "only_in_training"
"""Key of `Node.meta`: true of a layer that returns its input in eval mode."""

IN_PLACE_OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
} | {operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor}
"""From each in-place operator to the one that returns a new tensor."""

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_FOLDER = Path(__file__).parent
_INTERNAL = (TORCH_FOLDER, f"{_FOLDER}{os.sep}", f"{_FOLDER.parent}{os.sep}traced_")


class NetworkProxy(Proxy):
    """A proxy that records `x += y` and `x[i] = y`, whose effect all other references to `x` see.

    FX's own takes the first for `x = x + y` and refuses the second.
    """

    __array_ufunc__ = None
    """Lets numpy's numbers on the left of an operator ask the proxy, which is no array."""

    def __getattr__(self, name: str) -> Any:
        """Record an attribute of tensors. Raises TypeError for another one: `hasattr` would be true of any."""
        if not name.startswith("_") and not hasattr(torch.Tensor, name):
            raise TypeError(f"whether a value has {name} is not known before the network runs")
        return super().__getattr__(name)

    def __rmul__(self, other: Any) -> Any:
        if isinstance(other, list):  # `[1] * x.dim()`, whose items may be set
            raise TypeError("the length of a list depends on a tensor")
        return super().__rmul__(other)  # type: ignore[misc]  # FX adds it to the class

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _recording(in_place: Callable[..., Any]) -> Callable[[Proxy, Any], Proxy]:
    def method(self: Proxy, other: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", in_place, (self, other), {})

    return method


for _operator in IN_PLACE_OPERATORS:
    setattr(NetworkProxy, f"__{_operator.__name__}__", _recording(_operator))


class NetworkTracer(HookTracer, AutocastTracer, GradientTracer, QuantizationTracer):
    """Traces a network; arguments of its `forward` that get no input keep their defaults.

    `leaves`: names of submodules not to trace into. `functions`: autograd functions not to trace into. Of layers that
    may act in training alone, those are recorded that return their input.
    """

    def __init__(self, leaves: Iterable[str], num_inputs: int, functions: Mapping[Any, bool]) -> None:
        super().__init__(list(leaves), [])
        self._num_inputs = num_inputs
        self.gradients = GradientRecorder(functions.get)
        self._internal = (*_INTERNAL, *einops_proxies.folders())
        self.record_stack_traces = False  # its way of doing so imports torch's compiler

    def trace(self, root: Any, concrete_args: Any = None) -> Graph:
        with answering_builtins(("callable", "isinstance", "len"), Proxy, self.answer, self._internal):
            return super().trace(root, concrete_args)

    def answer(self, function: Callable[..., Any], proxy: Proxy, *arguments: Any) -> Any:
        """Return what a built-in function is to return for a proxy. Raises TypeError where a value would show it."""
        raise TypeError(f"what {function.__name__} returns depends on a value")

    def proxy(self, node: Node) -> Proxy:
        return NetworkProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """Record numbers of numpy as Python's: the code of a graph can't name their types."""
        return super().create_arg(a.item() if isinstance(a, np.generic) else a)

    def create_node(self, *arguments: Any, **named: Any) -> Node:
        """Record the user's line with the node."""
        node = super().create_node(*arguments, **named)
        node.meta[SOURCE_LINE] = running_line(self._internal)
        return node

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call; trace into a module that is none of the network's but made by it, of parts that are.

        Such are `nn.ReLU()(x)` and `nn.Sequential(*self.layers)(x)`.
        """
        if m not in (self.submodule_paths or {}) and not any(True for _ in m.parameters(recurse=False)):
            return forward(*args, **kwargs)
        stack = self.module_stack.copy()
        try:
            returned = super().call_module(m, forward, args, kwargs)
        except Exception:  # a network may catch it, as one that tries a call with lengths first
            self.module_stack = stack
            raise
        if args and returned is args[0] and may_act_in_training_alone(m):
            returned = self.create_proxy("call_module", self.path_of_module(m), args, kwargs)
            returned.node.meta[ONLY_IN_TRAINING] = True
        return returned

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether to record a call; trace into what wraps a network for training on several devices."""
        is_wrapper = isinstance(m, nn.DataParallel) and module_qualified_name not in self.skipped_module_names
        return not is_wrapper and super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Record a parameter for each input, also where `forward` takes `*args`; others keep their defaults."""
        parameters = list(inspect.signature(root_fn).parameters.values())
        names = [each.name for each in parameters[1:] if each.kind in _BY_POSITION]
        if len(names) == len(parameters) - 1:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        rest = next((each.name for each in parameters if each.kind is each.VAR_POSITIONAL), "input")
        names += [f"{rest}_{number}" for number in range(self._num_inputs - len(names))]
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in names[: self._num_inputs]]
        return root_fn, [self.root, *inputs]

    def _proxy_placeholder(self, name: str, concrete_args: Any, sig: inspect.Signature, fn: Any) -> Any:
        if has_kept_default(sig, name, self._num_inputs):
            return sig.parameters[name].default
        return super()._proxy_placeholder(name, concrete_args, sig, fn)


class DataDependentError(TraceError):
    """A branch, a loop or a number depends on the values of a tensor, which there are none of while it is traced."""

    def __init__(self) -> None:
        super().__init__(ON_VALUES)
