"""Tracing of a network into an FX graph: with in-place operators, source lines and, where needed, known sizes."""

from __future__ import annotations

import functools
import inspect
import linecache
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_aggregate
from torch.fx.proxy import Attribute, TraceError

from ptpipe_torch.answering_builtins import answering_builtins
from ptpipe_torch.errors import ON_VALUES
from ptpipe_torch.int8 import einops_proxies
from ptpipe_torch.int8.engine import deprecations_silenced
from ptpipe_torch.int8.removed_proxies import proxies_removed
from ptpipe_torch.int8.tensor_properties import resolve_properties
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.model.forward_arguments import has_kept_default
from ptpipe_torch.model.signature import TensorSpec
from ptpipe_torch.traced_gradients import NO_GRAD, GradientRecorder, functions_with_own_gradient
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

_BATCH_SIZES, _SYMBOL_SIZES = (2, 3), (16, 8)
_FACTORIES = ("as_tensor", "empty", "full", "ones", "tensor", "zeros")
_SIZED_METHODS = ("expand", "new_empty", "new_full", "new_ones", "new_zeros", "repeat", "reshape", "tile", "view")
_DECIDED_METHODS = ("is_complex", "is_contiguous", "is_floating_point")
_READING_METHODS = ("item", "tolist")
_DECIDED = (*_DECIDED_METHODS, torch.is_complex, torch.is_floating_point)
_VALUES = "_values_at_sizes"
"""Attribute of a proxy; one of a tensor or a result has no such name."""
_IF_EQUAL: dict[Any, bool] = {operator.eq: True, operator.ne: False}
_len = len  # which is another function while a network is traced
_INTERNAL = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


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


class NetworkTracer(QuantizationTracer):
    """Traces a network; arguments of its `forward` that get no input keep their defaults.

    `leaves`: names of submodules not to trace into. `functions`: autograd functions not to trace into. Of layers that
    may act in training alone, those are recorded that return their input.
    """

    def __init__(self, leaves: Iterable[str], num_inputs: int, functions: Mapping[Any, bool] | None = None) -> None:
        super().__init__(list(leaves), [])
        self._num_inputs = num_inputs
        self.gradients = GradientRecorder((functions or {}).get)
        self._internal = (*_INTERNAL, *einops_proxies.folders())
        self.record_stack_traces = False  # its way of doing so imports torch's compiler

    def trace(self, root: Any, concrete_args: Any = None) -> Graph:
        answering = answering_builtins(("callable", "isinstance", "len"), Proxy, self.answer, self._internal)
        with answering, self.gradients.active():
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
        """Record the user's line with the node, and whether it is inside of `torch.no_grad`."""
        node = super().create_node(*arguments, **named)
        node.meta |= {SOURCE_LINE: _source_line(self._internal), NO_GRAD: self.gradients.is_off}
        return node

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call; trace into a module that is none of the network's but made by it (`nn.ReLU()(x)`)."""
        if m not in (self.submodule_paths or {}) and next(m.parameters(), None) is None:
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

    def _proxy_placeholder(self, name: str, concrete_args: Any, sig: inspect.Signature, fn: Any) -> Any:
        if has_kept_default(sig, name, self._num_inputs):
            return sig.parameters[name].default
        return super()._proxy_placeholder(name, concrete_args, sig, fn)


class DataDependentError(TraceError):
    """A branch, a loop or a number depends on the values of a tensor, which there are none of while it is traced."""

    def __init__(self) -> None:
        super().__init__(ON_VALUES)


class SizedProxy(NetworkProxy):
    """A proxy of values at two batch sizes, and two sizes of other axes that have no fixed one.

    Sizes that are equal in both are known, others are recorded.
    """

    def size(self, dim: int | None = None) -> Any:
        """Return all sizes as a tuple, or one."""
        sizes = self._sizes()
        return sizes if dim is None else sizes[dim]

    def dim(self) -> Any:
        return len(self._tensors()[0].shape)

    def __len__(self) -> int:
        first, second = (len(value) for value in self.__dict__[_VALUES])
        if first != second:
            raise TypeError("the length depends on the batch size")
        return int(first)

    def __int__(self) -> int:
        raise DataDependentError if _reads_values(self) else TypeError("the number depends on the batch size")

    __float__ = __int__

    def __iter__(self) -> Iterator[Any]:
        """Return the parts of a tuple, or of a tensor along its first axis, if that has a known size."""
        parts: Any = self
        return iter([parts[index] for index in range(len(self))])

    def __getattr__(self, name: str) -> Any:
        if name == "ndim":
            return self.dim()
        if not name.startswith("_") and not hasattr(self.__dict__[_VALUES][0], name):
            raise AttributeError(name)
        if all(isinstance(value, torch.Tensor) for value in self.__dict__[_VALUES]):
            if name == "shape":
                return self._sizes()
            if name == "device":
                return DeviceProxy(self, name)
            if name in ("dtype", "requires_grad") or name.startswith("is_"):
                known = {getattr(value, name, None) for value in self.__dict__[_VALUES]}
                if len(known) == 1 and isinstance(value := known.pop(), torch.dtype | bool):
                    return value
        return Proxy.__getattr__(self, name)

    def _tensors(self) -> tuple[Any, Any]:
        first, second = self.__dict__[_VALUES]
        if len(first.shape) != len(second.shape):
            raise TypeError("the number of dimensions depends on the batch size")
        return first, second

    def _sizes(self) -> tuple[Any, ...]:
        first, second = self._tensors()
        return tuple(
            size if size == other else self.tracer.create_proxy("call_method", "size", (self, dim), {})
            for dim, (size, other) in enumerate(zip(first.shape, second.shape, strict=True))
        )


class DeviceProxy(Attribute):
    """The device of a tensor: known where the network branches on it, else recorded, since the network may move."""

    @property
    def type(self) -> Any:
        return _value_of(self, 0).type

    def __eq__(self, other: object) -> bool:
        return bool(_value_of(self, 0) == _value_of(other, 0))

    def __ne__(self, other: object) -> bool:  # Proxy has one of its own
        return not self == other

    __hash__ = Attribute.__hash__


class SizedTracer(NetworkTracer):
    """Runs the network while it traces it, so that branches on sizes (`if x.shape[-1] > 8:`) can be decided.

    Likewise on types and devices. The graph is right for inputs of these shapes, in batches of any size.
    """

    def __init__(
        self, leaves: Iterable[str], inputs: Sequence[TensorSpec], functions: Mapping[Any, bool] | None = None
    ) -> None:
        super().__init__(leaves, len(inputs), functions)
        self._specs = inputs
        self._inputs = [iter(zeros(inputs, *sizes)) for sizes in zip(_BATCH_SIZES, _SYMBOL_SIZES, strict=True)]
        self._is_running = False

    def trace(self, root: Any, concrete_args: Any = None) -> Graph:
        with torch.no_grad():
            root(*zeros(self._specs, _BATCH_SIZES[0]))  # a network may keep tensors from its first call
        with _sizes_recorded():
            return super().trace(root, concrete_args)

    def answer(self, function: Callable[..., Any], proxy: Proxy, *arguments: Any) -> Any:
        value = _value_of(proxy, 0)
        if function is not _len:
            return function(value, *arguments)
        return proxy.size(0) if isinstance(value, torch.Tensor) else len(proxy)

    def proxy(self, node: Node) -> Proxy:
        return SizedProxy(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Proxy:
        # In its own frame: a proxy that is made for an attribute has its values from here as well.
        values = tuple(self._value(kind, target, args, kwargs, index) for index in range(len(_BATCH_SIZES)))
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **named)
        proxy.__dict__[_VALUES] = values
        return proxy

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_running:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        return attr_val if self._is_running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: Proxy) -> bool:
        """Decide a branch on dtype, layout, or two sizes that are the same; refuse any other that is recorded."""
        values = _value_of(obj, 0), _value_of(obj, 1)
        if obj.node.target in _DECIDED:
            return bool(values[0])
        if _reads_values(obj):
            raise DataDependentError
        # Sizes are multiples of the batch size: equal at two of them, they are equal at all.
        if _IF_EQUAL.get(obj.node.target) == values[0] == values[1]:
            return bool(values[0])
        return super().to_bool(obj)

    def _value(self, kind: str, target: Any, args: Any, kwargs: Any, index: int) -> Any:
        if kind == "placeholder":
            return next(self._inputs[index])
        args, kwargs = map_aggregate((args, kwargs), lambda value: _value_of(value, index))
        self._is_running = True
        try:
            with torch.no_grad():
                if kind == "call_method":
                    return getattr(args[0], target)(*args[1:], **kwargs)
                if kind == "call_module":
                    return self.root.get_submodule(target)(*args, **kwargs)
                return target(*args, **kwargs) if kind == "call_function" else operator.attrgetter(target)(self.root)
        finally:
            self._is_running = False


@contextmanager
def _sizes_recorded() -> Iterator[None]:
    """Let torch record functions of sizes, of which that of the batch is a proxy: it takes them for numbers."""
    tensor: Any = torch.Tensor
    with ExitStack() as restored:
        for name in _FACTORIES:
            restored.callback(setattr, torch, name, getattr(torch, name))
            setattr(torch, name, _recorded_for_proxies(getattr(torch, name), "call_function"))
        for name in _SIZED_METHODS:  # which torch.Tensor inherits
            setattr(tensor, name, _recorded_for_proxies(getattr(tensor, name), "call_method"))
            restored.callback(delattr, tensor, name)
        yield


def _recorded_for_proxies(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        proxies: list[Proxy] = []
        map_aggregate((args, kwargs), lambda value: proxies.append(value) if isinstance(value, Proxy) else None)
        if not proxies:
            return original(*args, **kwargs)
        target = original if kind == "call_function" else original.__name__
        return proxies[0].tracer.create_proxy(kind, target, args, kwargs)

    return function


def _value_of(value: Any, index: int) -> Any:
    if not isinstance(value, Proxy):
        return value
    if _VALUES not in value.__dict__:  # an attribute, whose node is recorded when it is used
        attribute: Any = value
        return getattr(_value_of(attribute.root, index), attribute.attr)
    return value.__dict__[_VALUES][index]


def _reads_values(proxy: Proxy) -> bool:
    """Return whether a proxy is a tensor, or a number that was read from one, and not one of sizes or strides alone."""
    needed = {proxy.node}
    for node in reversed(proxy.node.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return isinstance(_value_of(proxy, 0), torch.Tensor) or any(node.target in _READING_METHODS for node in needed)


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
        try:
            with proxies_removed(module):
                return tracer.trace(module), tracer
        except Exception:  # noqa: BLE001  # a network may raise anything, given proxies in the place of values
            tracer = SizedTracer(leaves, inputs, functions)
            with torch.random.fork_rng(devices=[]), proxies_removed(module):
                return tracer.trace(module), tracer


def _source_line(internal: tuple[str, ...]) -> str:
    """Return the innermost line that is executed outside of the folders `internal`."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(internal):
        frame = frame.f_back
    if frame is None:
        return ""
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"{path}:{line}: `{linecache.getline(path, line).strip()}`"
