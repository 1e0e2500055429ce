"""Export of networks for inputs whose axes may have any size, or any up to the largest one that the network takes.

torch.export refuses a network that branches on such a size. Often a branch makes no difference: of a table of 1024
positions, `[:length]` is the table itself for a length of 1024, and a picture of one row has other strides. Then
torch.export is asked to assert what it assumed, and where that doesn't hold the program is compared with the network.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from ptpipe_torch.errors import depends_on_size
from ptpipe_torch.largest_size import MAX_TRIED, is_largest_size, takes
from ptpipe_torch.model.axis_sizes import names_of, numbers_of, parsed, sized
from ptpipe_torch.model.example_inputs import computes_the_same, example_shapes, zeros
from ptpipe_torch.model.signature import BATCH, TensorSpec
from ptpipe_torch.torch_export import export_program

_NUMBER = re.compile(r"\b\d+\b")
_SMALLEST = re.compile(r"(\w+) = (?:Dim\('\w+', min=|L\[\S+ in the .* generated guard )(\d+)(?=[,)]| <=)")
"""What torch.export suggests, or misses, where a network takes no smaller sizes."""
_BATCH_SIZE = 2  # 1 would be specialized to a constant
_NUM_SMALLEST, _MAX_COMPARED = 4, 8
"""Sizes at which a program is compared with its network, for each assumption: the smallest ones, and of all others."""
_MAX_NUMBER = 1024
"""Of those, where an assumption is false for smaller ones, too: larger ones take long."""
_BATCH_SIZES = (1, 2, 3)
"""For which what was assumed must hold, too."""
_MAX_OF_TWO = 64
"""What is tried for each of two axes or more, where what was assumed is about all of them."""
_FUNCTIONS = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "TruncToInt": math.trunc,
}
"""Of sizes, that torch's expressions have beside those of sympy."""
_ASSERTION = torch.ops.aten._assert_scalar.default


def export_sized(network: nn.Module, inputs: Sequence[TensorSpec]) -> ExportedProgram:
    """Export a network, with dynamic axes where `inputs` have symbols. Raises whatever torch.export raises."""
    examples = zeros(inputs, _BATCH_SIZE)
    try:
        program = export_program(network, examples, _dynamic_shapes(inputs, {}, None))
    except Exception as error:
        if not depends_on_size(error):
            raise
        smallest = {name: int(size) for name, size in _SMALLEST.findall(str(error))}
        numbers = sorted({int(number) for number in _NUMBER.findall(str(error))})
        largest = next((number for number in numbers if is_largest_size(network, inputs, number)), None)
        try:
            shapes = _dynamic_shapes(inputs, smallest, largest)
            asserting = export_program(network, examples, shapes, asserts_assumptions=True)
        except Exception:  # noqa: BLE001  # the first error is the one that tells
            raise error from None
        if not _holds_for_all(asserting, network, inputs, smallest, largest or MAX_TRIED):
            raise
        return asserting
    names = names_of(symbol for spec in inputs for symbol in spec.symbols)
    # torch.export does not refuse what depends on one size being, or not being, another.
    if len(names) > 1 and not _holds_for_all(program, network, inputs, {}, MAX_TRIED):
        raise ValueError(f"Constraints violated ({', '.join(names)})")
    return program


def _dynamic_shapes(inputs: Sequence[TensorSpec], smallest: Mapping[str, int], largest: int | None) -> tuple[Any, ...]:
    symbols = {size: parsed(size) for spec in inputs for size in spec.shape if isinstance(size, str)}
    dims = {
        name: torch.export.Dim(name, min=smallest.get(name), max=None if name == BATCH else largest)
        for _, name in symbols.values()
    }
    sizes = {symbol: factor * dims[name] if factor > 1 else dims[name] for symbol, (factor, name) in symbols.items()}
    return tuple(
        {axis: sizes[size] for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in inputs
    )


def _holds_for_all(
    program: ExportedProgram,
    network: nn.Module,
    inputs: Sequence[TensorSpec],
    smallest: Mapping[str, int],
    largest: int,
) -> bool:
    """Return whether a program computes what its network does at sizes for which it assumes what is false.

    Of many such sizes a few are tried: an assumption that is false for all odd ones, or where two are equal, is of one
    branch.
    """
    graph: Any = program.module(check_guards=False).graph
    for node in graph.find_nodes(op="call_function", target=_ASSERTION):
        graph.erase_node(node)
    module = GraphModule(program.module(check_guards=False), graph)  # without hooks that check sizes
    names = names_of(symbol for spec in inputs for symbol in spec.symbols)
    shapes = example_shapes(inputs, _BATCH_SIZE)
    usual = numbers_of((spec.shape, shape) for spec, shape in zip(inputs, shapes, strict=True))
    assert usual is not None
    tried: list[Mapping[str, int]] = []
    for name, size in smallest.items():
        tried += _some([{name: number} for number in range(1, size)])
    for assumption in _assumptions(program, inputs):
        tried += _some(list(assumption.false_numbers(largest)))
    compared = dict.fromkeys(tuple({**usual, **numbers}[name] for name in names) for numbers in tried)
    return all(
        not takes(network, fixed, 0) or computes_the_same(module, network, fixed)
        for fixed in (_of_sizes(inputs, dict(zip(names, numbers, strict=True))) for numbers in compared)
    )


def _some(numbers: Sequence[Mapping[str, int]]) -> Sequence[Mapping[str, int]]:
    """Return the first few, and as many of all others, in no step with what comes again every 2, 3, 4, 5, 6, ..."""
    few = [each for each in numbers if max(each.values(), default=0) <= _MAX_NUMBER] or numbers
    step = max(1, len(few) // _MAX_COMPARED)
    while math.gcd(step, 30) > 1:
        step += 1
    return [*few[:_NUM_SMALLEST], *few[_NUM_SMALLEST::step]]


def _of_sizes(inputs: Sequence[TensorSpec], numbers: Mapping[str, int]) -> list[TensorSpec]:
    return [replace(spec, shape=sized(spec.shape, numbers)) for spec in inputs]


@dataclass(frozen=True)
class _Assumption:
    """What a program assumes of sizes."""

    holds: Callable[..., bool]
    """Of the sizes of its symbols."""
    sizes: Sequence[tuple[str, float]]
    """The name of each symbol, and by how much its number is to be multiplied."""
    largest_factor: int
    """Of the sizes of inputs: that of 32 in `32*height`."""

    def false_numbers(self, largest: int) -> Iterator[dict[str, int]]:
        """Yield what the names, but that of the batch, may stand for where it is false for a batch."""
        names = [name for name in dict.fromkeys(name for name, _ in self.sizes) if name != BATCH]
        last = largest if len(names) == 1 else min(largest, _MAX_OF_TWO)
        for numbers in product(range(1, last // self.largest_factor + 1), repeat=len(names)):
            named = dict(zip(names, numbers, strict=True))
            if not all(self._is_true({**named, BATCH: batch_size}) for batch_size in _BATCH_SIZES):
                yield named

    def _is_true(self, numbers: Mapping[str, int]) -> bool:
        try:
            return bool(self.holds(*(int(numbers[name] * factor) for name, factor in self.sizes)))
        except ZeroDivisionError:  # of a remainder, where an axis that follows from these has no place
            return False


def _assumptions(program: ExportedProgram, inputs: Sequence[TensorSpec]) -> list[_Assumption]:
    """Return what was assumed of sizes, of which sympy has expressions."""
    import sympy
    from torch.utils._sympy.functions import Mod, PythonMod

    symbols, known = {}, None
    for spec, name in zip(inputs, program.graph_signature.user_inputs, strict=True):
        (node,) = (node for node in program.graph.find_nodes(op="placeholder") if node.name == name)
        for size, found in zip(spec.shape, node.meta["val"].shape, strict=True):
            if isinstance(size, str) and isinstance(found, torch.SymInt):
                known, expression = found.node.shape_env, found.node.expr
                (symbol,) = expression.free_symbols
                factor, number = parsed(size)
                symbols[symbol] = (number, factor / int(expression.coeff(symbol)))
    assert known is not None
    largest_factor = max(parsed(size)[0] for spec in inputs for size in spec.shape if isinstance(size, str))
    asserted = [each.expr for some in known.deferred_runtime_asserts.values() for each in some]
    assumed = (each.xreplace(known.replacements) for each in (*(of.expr for of in known.guards), *asserted))
    # sympy writes torch's `Mod` as an operator without parentheses around sums, the other one as a call.
    every = dict.fromkeys(each.replace(Mod, PythonMod) for each in assumed)
    return [
        _Assumption(
            sympy.lambdify(own, each, [_FUNCTIONS, "math"]), [symbols[symbol] for symbol in own], largest_factor
        )
        for each in every
        for own in [sorted(each.free_symbols, key=str)]
    ]
