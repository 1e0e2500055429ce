"""Export of networks for inputs whose axes may have any size, or any up to the largest one that the network takes.

torch.export refuses a network that branches on such a size. Often a branch makes no difference: of a table of 1024
positions, `[:length]` is the table itself for a length of 1024. Then torch.export is asked to assert what it assumed,
and for the sizes at which that doesn't hold the program is compared with the network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ptpipe_torch.errors import depends_on_size
from ptpipe_torch.largest_size import MAX_TRIED, is_largest_size
from ptpipe_torch.model.example_inputs import computes_the_same, zeros
from ptpipe_torch.model.signature import BATCH, TensorSpec
from ptpipe_torch.torch_export import export_program

_NUMBER = re.compile(r"\b\d+\b")
_BATCH_SIZE = 2  # 1 would be specialized to a constant
_MAX_COMPARED = 8
"""Sizes at which a program is compared with its network."""
_BATCH_SIZES = (1, 2, 3)
"""For which what was assumed must hold, too."""
_ASSERTION = torch.ops.aten._assert_scalar.default


def export_sized(network: nn.Module, inputs: Sequence[TensorSpec]) -> ExportedProgram:
    """Export a network, with dynamic axes where `inputs` have symbols. Raises whatever torch.export raises."""
    examples = zeros(inputs, _BATCH_SIZE)
    try:
        return export_program(network, examples, _dynamic_shapes(inputs, None))
    except Exception as error:
        if not depends_on_size(error) or len({symbol for spec in inputs for symbol in spec.symbols}) != 1:
            raise
        numbers = sorted({int(number) for number in _NUMBER.findall(str(error))})
        largest = next((number for number in numbers if is_largest_size(network, inputs, number)), None)
        try:
            program = export_program(network, examples, _dynamic_shapes(inputs, largest), asserts_assumptions=True)
        except Exception:  # noqa: BLE001  # the first error is the one that tells
            program = None
        if program is None or not _holds_for_all(program, network, inputs, largest or MAX_TRIED):
            raise
        return program


def _dynamic_shapes(inputs: Sequence[TensorSpec], largest: int | None) -> tuple[Any, ...]:
    symbols = {size for spec in inputs for size in spec.shape if isinstance(size, str)}
    dims = {symbol: torch.export.Dim(symbol, max=None if symbol == BATCH else largest) for symbol in symbols}
    return tuple({axis: dims[size] for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in inputs)


def _holds_for_all(program: ExportedProgram, network: nn.Module, inputs: Sequence[TensorSpec], largest: int) -> bool:
    """Return whether a program computes what its network does at the few sizes for which it assumes what is false."""
    batch, assumptions = _assumptions(program)
    sizes = [size for size in range(1, largest + 1) if not all(_is_true(each, size, batch) for each in assumptions)]
    module: Any = program.module(check_guards=False)
    for node in module.graph.find_nodes(op="call_function", target=_ASSERTION):
        module.graph.erase_node(node)
    module.recompile()
    return len(sizes) <= _MAX_COMPARED and all(
        computes_the_same(module, network, inputs, symbol_sizes=(size,)) for size in sizes
    )


def _assumptions(program: ExportedProgram) -> tuple[Any, list[Any]]:
    """Return the symbol of the batch's size, and what was assumed of all sizes, as expressions of sympy."""
    symbols = [
        size.node
        for node in program.graph.find_nodes(op="placeholder")
        for size in getattr(node.meta.get("val"), "shape", ())[:1]
        if isinstance(size, torch.SymInt)
    ]
    known: Any = symbols[0].shape_env
    asserted = [each.expr for some in known.deferred_runtime_asserts.values() for each in some]
    return symbols[0].expr, list(dict.fromkeys([*(guard.expr for guard in known.guards), *asserted]))


def _is_true(assumption: Any, size: int, batch: Any) -> bool:
    sized = assumption.subs(dict.fromkeys(assumption.free_symbols - {batch}, size))
    return all(bool(sized.subs(batch, batch_size)) for batch_size in _BATCH_SIZES)
