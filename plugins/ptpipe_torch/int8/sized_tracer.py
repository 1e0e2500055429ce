"""Tracing of a network that branches on sizes, types or devices: it runs while it is traced, at two batch sizes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_aggregate
from torch.fx.proxy import Attribute

from ptpipe_torch.int8.tracer import DataDependentError, NetworkProxy, NetworkTracer
from ptpipe_torch.largest_size import is_largest_size, takes
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.model.outputs import tensors_of
from ptpipe_torch.model.signature import TensorSpec
from ptpipe_torch.whole_quotients import is_whole

_BATCH_SIZES = (2, 3)
_SYMBOL_SIZES = (16, 9, 8)
"""Of the other axes that have no fixed one: the first, and what to try for the second."""
_FACTORIES = ("as_tensor", "empty", "full", "ones", "tensor", "zeros")
_SIZED_METHODS = (
    *("__getitem__", "expand", "new_empty", "new_full", "new_ones", "new_zeros", "repeat", "reshape", "tile", "view"),
)
_TARGETS: Mapping[str, Any] = {"__getitem__": operator.getitem}
"""As what methods are recorded that Python has a spelling of its own for."""
_DECIDED_METHODS = ("is_complex", "is_contiguous", "is_floating_point")
_READING_METHODS = ("item", "tolist")
_DECIDED = (*_DECIDED_METHODS, torch.is_complex, torch.is_floating_point)
_VALUES = "_values_at_sizes"
"""Attribute of a proxy; one of a tensor or a result has no such name."""
_OPERANDS = "_operands"
_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_STEPS = (operator.floordiv, operator.mod)
"""Whose results may be equal at two sizes and differ at a third."""
_len = len  # which is another function while a network is traced


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
        raise DataDependentError if _reads_values(self) else NumberOfBatchError

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


class NumberOfBatchError(TypeError):
    """A number depends on the batch size."""

    def __init__(self) -> None:
        super().__init__("the number depends on the batch size")


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
    `symbol_sizes`: two sizes for the axes that have no fixed one; see `sizes_of_symbols`. `was_called`: whether the
    network runs once before, so that what it keeps from its first call are constants of the graph.
    `decides_for_samples`: whether to decide branches that are the same for all batches but that of one sample.
    """

    may_differ_for_one_sample = False
    """Whether such a branch was decided."""

    def __init__(
        self,
        leaves: Iterable[str],
        inputs: Sequence[TensorSpec],
        functions: Mapping[Any, bool],
        *,
        symbol_sizes: tuple[int, int],
        was_called: bool = True,
        decides_for_samples: bool = True,
    ) -> None:
        super().__init__(leaves, len(inputs), functions)
        self._was_called, self._decides_for_samples = was_called, decides_for_samples
        self._specs = inputs
        self._symbol_sizes = symbol_sizes
        self._inputs = [iter(zeros(inputs, *sizes)) for sizes in zip(_BATCH_SIZES, symbol_sizes, strict=True)]
        self._is_running = False
        self._steps = set[Node]()

    def trace(self, root: Any, concrete_args: Any = None) -> Graph:
        if self._was_called:
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
        proxy.__dict__ |= {_VALUES: values, _OPERANDS: args}
        if target in _STEPS and isinstance(values[0], int) and values[0] == values[1]:
            self._steps.add(proxy.node)
        return proxy

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_running:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def only_observes(self, hook: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Return whether a hook returns None for values, which it leaves as they are."""
        values = map_aggregate((args, kwargs), lambda value: _value_of(value, 0))
        before = [value.clone() for value in tensors_of(values)]
        with self._running(), torch.no_grad():
            returned = hook(*values[0], **values[1])
        return returned is None and all(map(torch.equal, before, tensors_of(values)))

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        return attr_val if self._is_running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: Proxy) -> bool:
        """Decide a branch on dtype, layout, or two sizes that are the same; refuse any other that is recorded.

        So is one that is the same for all sizes that the network takes (`assert length <= 1024`). One that is the same
        for all batches of several samples is decided for them, and the tracer marked.
        """
        values = _values_of(obj)
        if obj.node.target in _DECIDED:
            return bool(values[0])
        if _reads_values(obj):
            raise DataDependentError
        if _compares_equals(obj) and self._steps.isdisjoint(_needed(obj)):
            return bool(values[0])
        if self._is_refusal(obj):
            return bool(values[0])
        if self._decides_for_samples and _sets_one_sample_apart(obj):
            self.may_differ_for_one_sample = True
            return bool(values[0])
        return super().to_bool(obj)

    def _is_refusal(self, comparison: Proxy) -> bool:
        """Return whether a comparison has another outcome for sizes alone that the network does not take."""
        operands = comparison.__dict__[_OPERANDS]
        numbers = [each for each in operands if isinstance(each, int)]
        sizes = [_values_of(each) for each in operands if isinstance(each, Proxy)]
        if comparison.node.target not in _COMPARISONS or len(numbers) != 1 or sizes != [self._symbol_sizes]:
            return False
        compare: Any = comparison.node.target

        def outcome(size: int) -> bool:
            return bool(compare(*(size if isinstance(each, Proxy) else each for each in operands)))

        known = outcome(self._symbol_sizes[0])
        last = [size for size in (numbers[0] - 1, numbers[0]) if outcome(size) == known != outcome(size + 1)]
        if not last or last[0] < max(self._symbol_sizes):
            return False
        with self._running():
            return is_largest_size(self.root, self._specs, last[0])

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Let modules compute in place of being recorded."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _value(self, kind: str, target: Any, args: Any, kwargs: Any, index: int) -> Any:
        if kind == "placeholder":
            return next(self._inputs[index])
        args, kwargs = map_aggregate((args, kwargs), lambda value: _value_of(value, index))
        with self._running(), torch.no_grad():
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            if kind == "call_module":
                return self.root.get_submodule(target)(*args, **kwargs)
            return target(*args, **kwargs) if kind == "call_function" else operator.attrgetter(target)(self.root)


def sizes_of_symbols(network: nn.Module, inputs: Sequence[TensorSpec]) -> tuple[int, int]:
    """Return two sizes for the axes of inputs that have no fixed one. The network is left as it was.

    They have no common divisor, where the network takes such sizes: a remainder that is the same for both
    (`if length % 4:`) would be taken for that of all.
    """
    first, *others = _SYMBOL_SIZES
    has_symbols = any(spec.symbols for spec in inputs)
    taken = (size for size in others if has_symbols and takes(network, inputs, size, batch_size=_BATCH_SIZES[1]))
    return first, next(taken, others[-1])


@contextmanager
def _sizes_recorded() -> Iterator[None]:
    """Let torch record functions of sizes, of which that of the batch is a proxy: it takes them for numbers."""
    tensor: Any = torch.Tensor
    with ExitStack() as restored:
        for name in _FACTORIES:
            restored.callback(setattr, torch, name, getattr(torch, name))
            setattr(torch, name, _recorded_for_proxies(getattr(torch, name), getattr(torch, name)))
        for name in _SIZED_METHODS:  # which torch.Tensor inherits
            setattr(tensor, name, _recorded_for_proxies(getattr(tensor, name), _TARGETS.get(name, name)))
            restored.callback(delattr, tensor, name)
        yield


def _recorded_for_proxies(original: Callable[..., Any], target: Any) -> Callable[..., Any]:
    """Return a function that records a call of `target`, a function or a method's name, where it gets a proxy."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        proxies: list[Proxy] = []
        map_aggregate((args, kwargs), lambda value: proxies.append(value) if isinstance(value, Proxy) else None)
        if not proxies:
            return original(*args, **kwargs)
        kind = "call_method" if isinstance(target, str) else "call_function"
        return proxies[0].tracer.create_proxy(kind, target, args, kwargs)

    return function


def whole_number(value: Any) -> Any:
    """Return a whole number of sizes as it is, the whole number of a quotient of one, or None for any other value."""
    if not isinstance(value, SizedProxy) or _reads_values(value):
        return None
    if isinstance(_value_of(value, 0), int):
        return value
    if value.node.target is not operator.truediv:
        return None
    size, divisor = value.__dict__[_OPERANDS]
    return size // int(divisor) if isinstance(_value_of(size, 0), int) and is_whole(divisor) else None


def _compares_equals(comparison: Proxy) -> bool:
    """Return whether the two sides of a comparison are equal.

    Sizes grow with that of the batch, or of another axis: equal at two of them, they are equal at all.
    """
    if comparison.node.target not in _COMPARISONS:
        return False
    left, right = comparison.__dict__[_OPERANDS]
    return all(bool(one == other) for one, other in zip(_values_of(left), _values_of(right), strict=True))


def _sets_one_sample_apart(comparison: Proxy) -> bool:
    """Return whether a multiple of the batch size is compared with a number that it exceeds for several samples."""
    operands = comparison.__dict__[_OPERANDS]
    if comparison.node.target not in _COMPARISONS or not all(isinstance(_value_of(each, 0), int) for each in operands):
        return False
    sizes = [each for each in operands if isinstance(each, Proxy)]
    numbers = [each for each in operands if not isinstance(each, Proxy)]
    is_of_batch = all(_value_of(size, 0) * _BATCH_SIZES[1] == _value_of(size, 1) * _BATCH_SIZES[0] for size in sizes)
    return len(sizes) == 1 and is_of_batch and numbers[0] < _value_of(sizes[0], 0)


def _values_of(value: Any) -> tuple[Any, Any]:
    return _value_of(value, 0), _value_of(value, 1)


def _value_of(value: Any, index: int) -> Any:
    if not isinstance(value, Proxy):
        return value
    if _VALUES not in value.__dict__:  # an attribute, whose node is recorded when it is used
        attribute: Any = value
        return getattr(_value_of(attribute.root, index), attribute.attr)
    return value.__dict__[_VALUES][index]


def _reads_values(proxy: Proxy) -> bool:
    """Return whether a proxy is a tensor, or a number that was read from one, and not one of sizes or strides alone."""
    is_tensor = isinstance(_value_of(proxy, 0), torch.Tensor)
    return is_tensor or any(node.target in _READING_METHODS for node in _needed(proxy))


def _needed(proxy: Proxy) -> set[Node]:
    """Return the nodes that a value is computed from, its own included."""
    needed = {proxy.node}
    for node in reversed(proxy.node.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed
