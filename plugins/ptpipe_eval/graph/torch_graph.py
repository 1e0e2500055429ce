"""Count what a torch network computes by running it once: eager, FX and int8 networks alike.

Operators are seen where they are dispatched, so that functions count as modules do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy.typing as npt
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptpipe_eval.graph import counts
from ptpipe_eval.graph.counts import INT8, GraphCounts
from ptpipe_torch import Model, quantized_engine, released_memory, torch_threads
from ptpipe_torch.int8.int8_state import is_quantized
from ptpipe_torch.runtime import large_blocks_mapped

_BOOKKEEPING = {"detach", "lift_fresh", "empty", "empty_like", "alias", "zeros", "_local_scalar_dense", "sym_size"}
_MOVES = """view _unsafe_view reshape transpose permute t unsqueeze squeeze expand clone copy slice select cat stack
split split_with_sizes unsafe_split unbind chunk narrow index index_select gather embedding pad constant_pad_nd flatten
_to_copy repeat roll flip as_strided contiguous fill full full_like zeros_like ones_like arange scalar_tensor"""
_WITHOUT_ARITHMETIC = _BOOKKEEPING | set(_MOVES.split()) | {"max_pool2d_with_indices", "max_pool1d"}
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
_HAS_PRODUCTS = re.compile(r"conv(?!ert)|mm(_|$)|matmul|linear|lstm|gru|rnn|attention|cdist|fft|(^|_)dot|(^|_)mv$")
_NO_PRODUCTS = re.compile(r"^(upsample|log_|_?logcumsum)")
_GATES = {"lstm": 4, "gru": 3}


def count_torch(model: Model, inputs: Mapping[str, npt.NDArray[Any]]) -> GraphCounts:
    """Return the counts of one prediction of these inputs."""
    backend = model.recipe.backend if model.recipe.convert else None
    with released_memory(), large_blocks_mapped(), torch_threads(1), quantized_engine(backend), torch.no_grad():
        args = [torch.from_numpy(inputs[spec.name].copy()) for spec in model.signature.inputs]
        return count_network(model.build(), args)  # no name here would keep the network while memory is released


def count_network(network: nn.Module, args: Sequence[torch.Tensor]) -> GraphCounts:
    """Return the counts of one call of a network."""
    counter = _Counter(network)
    with counter.names.followed(network), _decomposed(), torch.no_grad(), counter:
        network(*args)
    return counter.counts


@contextmanager
def _decomposed() -> Iterator[None]:
    """Let torch's encoder layers call the operators that they consist of, and not one for all."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _LayerNames:
    """The name of the innermost layer that is being called."""

    def __init__(self) -> None:
        self._stack = [""]

    @property
    def current(self) -> str:
        return self._stack[-1]

    @contextmanager
    def followed(self, network: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in network.named_modules():
                stack.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                stack.callback(module.register_forward_hook(self._left, always_call=True).remove)
            yield

    def _entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: self._stack.append(name)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts every operator that is dispatched."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts, self.names = GraphCounts(), _LayerNames()
        self._unread = {each.untyped_storage().data_ptr(): each.nbytes for each in _stored(network)}
        self._packed: dict[int, Any] = {}
        """Int8 weights that were read, kept so that no other object gets the same id."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        name = name.rstrip("_")  # in place: the same work
        if name not in _BOOKKEEPING:
            self._count(namespace, name, args, result)
        return result

    def _count(self, namespace: str, name: str, args: Any, result: Any) -> None:
        self.counts.operators[f"{namespace}.{name}"] += 1
        leaves = tree_leaves(args)
        self._read(name, leaves, result)
        is_eager_int8 = namespace == "quantized" or any(is_quantized(each) for each in (*leaves, *tree_leaves(result)))
        is_int8 = is_eager_int8 or name.startswith("quantized_")
        try:
            macs = _macs(name, args, result)
        except (LookupError, TypeError, AttributeError, RuntimeError):
            macs = None
        known = namespace in ("aten", "quantized", "prims")
        if macs is not None:
            self.counts.macs[INT8 if is_int8 else _dtype_name(args, result)] += macs
            if name.removeprefix("quantized_") in _GATES:  # whose packed weights can't be asked; a byte for each
                self.counts.weights_read_bytes += macs // (args[0].shape[0] * args[0].shape[1])
        elif not known or (_HAS_PRODUCTS.search(name) and not _NO_PRODUCTS.match(name)):
            self.counts.uncounted.append(self._place(f"{namespace}.{name}"))
        if not is_int8 and name not in _WITHOUT_ARITHMETIC and _has_float(result):
            self.counts.float_operators.append(self._place(name))

    def _place(self, operator: str) -> str:
        return f"{self.names.current} ({operator})" if self.names.current else operator

    def _read(self, name: str, leaves: Sequence[Any], result: Any) -> None:
        """Count the bytes of weights that are read for the first time."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                size_bytes = self._unread.pop(leaf.untyped_storage().data_ptr(), 0)
                rows_bytes = sum(each.nbytes for each in tree_leaves(result) if isinstance(each, torch.Tensor))
                self.counts.weights_read_bytes += min(size_bytes, rows_bytes) if name in _LOOKUPS else size_bytes
            elif isinstance(leaf, torch.ScriptObject) and id(leaf) not in self._packed:
                self._packed[id(leaf)] = leaf
                self.counts.weights_read_bytes += _packed_bytes(leaf)


def _stored(network: nn.Module) -> Iterator[torch.Tensor]:
    yield from network.parameters()
    yield from network.buffers()


def _macs(name: str, args: Sequence[Any], result: Any) -> int | None:
    """Return the multiply-accumulates of an operator; None where there is no formula for it."""
    out = result.shape if isinstance(result, torch.Tensor) else ()
    if name == "convolution":
        transposed = args[6]
        return (
            counts.transposed_convolution(args[0].shape, args[1].shape)
            if transposed
            else counts.convolution(out, args[1].shape)
        )
    if name in ("mm", "bmm", "linear", "matmul", "mv", "dot", "_int_mm"):
        return counts.matrix_product(out, args[0].shape[-1])
    if name in ("addmm", "baddbmm", "addmv"):
        return counts.matrix_product(out, args[1].shape[-1])
    if name.startswith(("_scaled_dot_product", "scaled_dot_product")):
        return counts.attention(*(each.shape for each in args[:3]))
    if re.match(r"linear(_relu|_dynamic|_relu_dynamic|_leaky_relu|_tanh)*$", name):  # of int8: (input, packed, ...)
        return counts.matrix_product(out, args[0].shape[-1])
    if re.match(r"conv[123]d(_relu|_dynamic|_add|_add_relu)*$", name):
        packed = next(each for each in args if isinstance(each, torch.ScriptObject))
        return counts.convolution(out, _packed_weight(packed).shape)
    if re.match(r"conv_transpose[123]d(_dynamic)?$", name):
        packed = next(each for each in args if isinstance(each, torch.ScriptObject))
        return counts.transposed_convolution(args[0].shape, _packed_weight(packed).shape)
    if name == "mkldnn_rnn_layer":
        num_steps = args[0].shape[0] * args[0].shape[1]
        return int(num_steps * (args[1].numel() + args[2].numel()))
    return _quantized_recurrent(name, args)


def _quantized_recurrent(name: str, args: Sequence[Any]) -> int | None:
    """Of `quantized_lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)`."""
    gates = _GATES.get(name.removeprefix("quantized_"))
    if gates is None or not name.startswith("quantized_") or args[0].dim() != 3:  # those of a PackedSequence are others
        return None
    input_, hidden, num_layers = args[0], tree_leaves(args[1])[0].shape[-1], args[4]
    directions = 2 if args[7] else 1
    sizes = [(input_.shape[-1] if layer == 0 else directions * hidden, hidden) for layer in range(num_layers)]
    return counts.recurrent(input_.shape[0] * input_.shape[1], gates, sizes * directions)


def _packed_weight(packed: Any) -> torch.Tensor:
    weight: torch.Tensor = packed.unpack()[0]
    return weight


def _packed_bytes(packed: Any) -> int:
    try:
        weight = _packed_weight(packed)
    except (AttributeError, RuntimeError, IndexError, TypeError):  # of recurrent cells: unknown
        return 0
    return weight.numel() * weight.element_size() if isinstance(weight, torch.Tensor) else 0


def _has_float(result: Any) -> bool:
    return any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in tree_leaves(result))


def _dtype_name(args: Any, result: Any) -> str:
    tensor = next((each for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)), None)
    return "unknown" if tensor is None else str(tensor.dtype).removeprefix("torch.")
