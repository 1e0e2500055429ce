"""Lower a network to XNNPACK, and run the program. Only this file uses ExecuTorch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ptpipe import StageError
from ptpipe_torch import BATCH, Signature
from ptpipe_torch.errors import export_failure
from ptpipe_torch.int8.decomposed import DEQUANTIZE, QUANTIZE
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.model.outputs import exported_names
from ptpipe_torch.runtime import loggers_limited

Run: TypeAlias = Callable[[Sequence["npt.NDArray[Any]"]], list["npt.NDArray[Any]"]]

_METHOD = "forward"
_PARTITIONER_LOG = "executorch.backends.xnnpack.partition.config"
_LOGGERS = ("torch.export", "torch.__trace", "executorch", "root", "torchao")
_NO_COMPUTATION = ("getitem", "sym_size", "dequantize", "quantize", "choose_qparams", "executorch_call_delegate")
_ATEN = torch.ops.aten
_MOVES = (
    *(_ATEN.view.default, _ATEN.reshape.default, _ATEN.flatten.using_ints, _ATEN.permute.default),
    *(_ATEN.transpose.int, _ATEN.unsqueeze.default, _ATEN.slice.Tensor, _ATEN.cat.default),
    *(_ATEN.max_pool2d.default, _ATEN.hardtanh.default, _ATEN.clamp.default, _ATEN.relu.default),
)
_MEANS = (_ATEN.mean.dim, _ATEN.adaptive_avg_pool2d.default)
_open_pools: list[int] = []
"""Threads of each open program: ExecuTorch has one pool for all, and replacing it would pull it from under them."""


@dataclass(frozen=True)
class Operator:
    """An operator of a lowered network."""

    type: str
    """As ATen calls it: `convolution`, `linear`."""
    layer: str
    """The path of the module that it belongs to, or the operator's own name."""
    precision: str
    """`int8` or `float`; empty: it computes nothing that has one, or runs outside of XNNPACK."""
    reason: str = ""
    """Why XNNPACK doesn't compute it; empty if it does."""


@dataclass(frozen=True)
class Lowered:
    """A program, and how it computes."""

    content: bytes
    outputs: tuple[str, ...]
    """Names of its outputs, in its order."""
    operators: tuple[Operator, ...]
    num_delegates: int
    """Parts of the network that XNNPACK computes without a break."""


def lower(network: nn.Module, signature: Signature, sizes: Mapping[str, int]) -> Lowered:
    """Export a network in eval mode, and give XNNPACK all that it can compute.

    `sizes`: the largest size of each axis with a symbol; a batch of 1 is fixed. Raises StageError for a network that
    torch.export or ExecuTorch does not take.
    """
    _check_recurrent(network, sizes)
    with _one_line_errors("this network can't be exported to ExecuTorch"), _quiet() as reasons, torch.no_grad():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        program = _export(network, signature, sizes)
        outputs = exported_names(program, signature.outputs)
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        _restore_bounds(edge.exported_program())
        graph = edge.exported_program().graph_module
        operators = tuple(_operators(graph, reasons))
        num_delegates = sum(node.name.startswith("executorch_call_delegate") for node in graph.graph.nodes)
        content = bytes(edge.to_executorch().buffer)
    return Lowered(content, tuple(outputs), operators, num_delegates)


def _check_recurrent(network: nn.Module, sizes: Mapping[str, int]) -> None:
    """Raise StageError, naming them, for recurrent layers of sequences or batches of any size: they are unrolled.

    torch.export refuses such sequences, and makes a constant of the size of batches without a word (torch 2.13).
    """
    layers = [
        f"{name} ({type(layer).__name__})" for name, layer in network.named_modules() if isinstance(layer, nn.RNNBase)
    ]
    lengths = [name for name in sizes if name != BATCH]
    if not layers or (sizes[BATCH] == 1 and not lengths):
        return
    what = f"{', '.join(layers)}: ExecuTorch unrolls recurrent layers, which fixes the size of"
    if lengths:
        raise StageError(
            f"{what} sequences, and the axis {lengths[0]} may have any: use export.onnx, which takes these"
        )
    raise StageError(f"{what} batches: set max_batch_size: 1")


def _export(network: nn.Module, signature: Signature, sizes: Mapping[str, int]) -> ExportedProgram:
    fixed = sizes[BATCH] == 1
    dims = {
        name: torch.export.Dim(name, min=1, max=size) for name, size in sizes.items() if not (fixed and name == BATCH)
    }
    shapes = tuple(
        {axis: dims[size] for axis, size in enumerate(spec.shape) if isinstance(size, str) and size in dims}
        for spec in signature.inputs
    )
    examples = zeros(signature.inputs, 1 if fixed else 2)  # a batch size of 1 would be specialized to a constant
    largest = [tuple(slice(sizes.get(str(size))) for size in spec.shape) for spec in signature.inputs]
    inputs = tuple(example[within].contiguous() for example, within in zip(examples, largest, strict=True))
    program = torch.export.export(network, inputs, dynamic_shapes=shapes, strict=False)
    _keep_averaged_axes(program)
    _round_means_to_even_steps(program)
    _infer_symbolic_sizes(program)
    _requantize_before_moves(program)
    return program


def _keep_averaged_axes(program: ExportedProgram) -> None:
    """Let means over the pixels of images keep these axes, in place, and drop them after: so XNNPACK takes them."""
    graph = program.graph_module.graph
    for mean in graph.find_nodes(op="call_function", target=_ATEN.mean.dim):
        arguments: Any = mean.args
        source, dims, *keeps = arguments
        rank = source.meta["val"].dim()
        if rank != 4 or any(keeps) or mean.kwargs or {dim % rank for dim in dims} != {2, 3}:
            continue
        readers = list(mean.users)
        mean.args = (source, [-1, -2], True)
        with graph.inserting_after(mean):
            dropped = graph.call_function(_ATEN.view.default, (mean, list(mean.meta["val"].shape)))
        dropped.meta = dict(mean.meta)
        mean.meta = {**mean.meta, "val": mean.meta["val"][:, :, None, None]}
        for reader in readers:
            reader.replace_input_with(mean, dropped)


def _round_means_to_even_steps(program: ExportedProgram) -> None:
    """Let ties of means over images become an even number of steps from zero, in place, as in torch's int8 networks.

    XNNPACK rounds them to the even integer, which is the same where the zero point is even: means get such a grid. It
    has all integers but the one farthest from zero, which is a mean only of pixels that nearly all have it.
    """
    for mean in [node for node in program.graph_module.graph.nodes if node.target in _MEANS]:
        source, readers = mean.all_input_nodes[0], list(mean.users)
        behind = [reader for user in readers for reader in (user.users if user.target in _MOVES else [user])]
        is_rounded = all(reader.target is QUANTIZE and reader.args[1:] == source.args[1:] for reader in behind)
        if source.target is not DEQUANTIZE or mean.meta["val"].shape[2:] != (1, 1) or not is_rounded:
            continue
        (scale, zero_point, *limits), num_pixels = source.args[1:], source.meta["val"].shape[2:].numel()
        if zero_point % 2 and not (isinstance(num_pixels, int) and num_pixels % 2):  # means of odd numbers are no ties
            zero_point += 1 if zero_point < 0 else -1
        elif behind == readers:
            continue
        rounded = _rounded(mean, (scale, zero_point, *limits))
        for reader in readers:
            reader.replace_input_with(mean, rounded)
    program.graph_module.recompile()


def _requantize_before_moves(program: ExportedProgram) -> None:
    """Let operators that only move or select integers have one grid, that of their output, in place.

    XNNPACK has these for one grid alone. Rounding to the new grid gives the same before them as after.
    """
    for move in [node for node in program.graph_module.graph.nodes if node.target in _MOVES]:
        reader = next(iter(move.users), None)
        if reader is None or reader.target is not QUANTIZE:
            continue
        for value in move.all_input_nodes:
            if value.target is DEQUANTIZE and value.args[1:] != reader.args[1:]:
                move.replace_input_with(value, _rounded(value, reader.args[1:]))
    program.graph_module.recompile()


def _rounded(value: Node, grid: Sequence[Any]) -> Node:
    """Return a value's rounding to a grid, whose nodes are inserted behind it. `grid`: the quantizing arguments."""
    with value.graph.inserting_after(value):
        integers = value.graph.call_function(QUANTIZE, (value, *grid))
    with value.graph.inserting_after(integers):
        rounded = value.graph.call_function(DEQUANTIZE, (integers, *grid))
    integers.meta = {**value.meta, "val": value.meta["val"].to(grid[-1])}
    rounded.meta = dict(value.meta)
    return rounded


def _restore_bounds(program: ExportedProgram) -> None:
    """Let axes of any size have their largest size again, for which memory is reserved.

    XNNPACK's partitioner leaves 15 (ExecuTorch 1.5.1 with torch 2.13).
    """
    for node in program.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            sizes: Any = value.shape if isinstance(value, torch.Tensor) else ()
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    size.node.shape_env.var_to_range.update(program.range_constraints)


def _infer_symbolic_sizes(program: ExportedProgram) -> None:
    """Let views infer their axis of any size, in place: XNNPACK takes -1 there, but no symbol."""
    graph = program.graph_module.graph
    views = (_ATEN.view.default, _ATEN.reshape.default, _ATEN.flatten.using_ints)
    for node in [node for node in graph.nodes if node.target in views]:
        value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
        shape = [size if isinstance(size, int) else -1 for size in value.shape]
        if shape.count(-1) == 1 and source.is_contiguous():
            node.target, node.args = _ATEN.view.default, (node.args[0], shape)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _operators(graph: torch.fx.GraphModule, reasons: Mapping[str, str]) -> Iterator[Operator]:
    """Yield the operators that compute, delegated ones first in the order of the parts."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and hasattr(lowered := getattr(graph, str(node.target)), "original_module"):
            for inner in lowered.original_module.graph.nodes:
                if _computes(inner):
                    yield Operator(_type(inner), _layer(inner), "int8" if _is_int8(inner) else "float")
        elif _computes(node):
            reason = reasons.get(node.name, "XNNPACK has no such operator")
            yield Operator(_type(node), _layer(node), "", reason)


def _computes(node: Node) -> bool:
    is_size = isinstance(node.meta.get("val"), int | torch.SymInt)
    return node.op == "call_function" and not is_size and not _type(node).startswith(_NO_COMPUTATION)


def _type(node: Node) -> str:
    """Return `convolution` of `aten.convolution.default`."""
    parts = getattr(node.target, "__name__", str(node.target)).split(".")
    return str(parts[-2] if len(parts) > 1 else parts[0])


def _layer(node: Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]).removeprefix("L['self'].").strip(".") or node.name if stack else node.name


def _is_int8(node: Node) -> bool:
    """Return whether XNNPACK gets the integers that inputs are dequantized from, or makes integers of the output."""
    from executorch.backends.xnnpack.utils.quant_utils import is_dequant, is_quant, is_tagged_as_implicit_q_dq

    ends = [*filter(is_dequant, node.all_input_nodes), *filter(is_quant, node.users)]
    return any(map(is_tagged_as_implicit_q_dq, ends))


@contextmanager
def open_program(path: Path, inputs: Sequence[str], num_threads: int) -> Iterator[Run]:
    """Yield a function from a program's inputs to its outputs. `inputs`: their names.

    Raises StageError for one that can't be loaded or run, and while another one is open with other threads. The
    function raises it for inputs that are larger than the program takes.
    """
    failed = f"ExecuTorch can't run {path.name}"
    with _one_line_errors(failed), _quiet():
        _use_threads(num_threads)
        from executorch.runtime import Runtime

        programs = [Runtime.get().load_program(path)]
        methods = [programs[0].load_method(_METHOD)]
        limits = {name: methods[0].metadata.input_tensor_meta(number).sizes() for number, name in enumerate(inputs)}

    def run(arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        with _one_line_errors(failed):
            for (name, largest), array in zip(limits.items(), arrays, strict=True):
                if any(size > limit for size, limit in zip(array.shape, largest, strict=True)):
                    sizes = f"{name} of shape {array.shape}, where {largest} is the largest"
                    raise StageError(f"{failed} with {sizes}: give export.executorch a larger max_length")
            writable = (array if array.flags.writeable else array.copy() for array in arrays)  # or torch warns
            return [output.numpy() for output in methods[0].execute(tuple(map(torch.from_numpy, writable)))]

    _open_pools.append(num_threads)
    try:
        yield run
    finally:  # the caller may keep `run`, which would keep the weights
        _open_pools.remove(num_threads)
        methods.clear()
        programs.clear()


def _use_threads(num_threads: int) -> None:
    from executorch.extension.pybindings import portable_lib

    if portable_lib._threadpool_get_thread_count() == num_threads:
        return
    if _open_pools:
        raise StageError(f"an ExecuTorch program is open with {_open_pools[0]} threads: all must have as many")
    portable_lib._unsafe_reset_threadpool(num_threads)


class _Reasons(logging.Handler):
    """Collects why XNNPACK takes no operator, by the operator's name."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        node, reason = getattr(record.msg, "node", None), getattr(record.msg, "reason", "")
        if node is not None:
            self.found[node.name] = " ".join(str(reason).split())


@contextmanager
def _quiet() -> Iterator[Mapping[str, str]]:
    """Silence ExecuTorch and torch.export inside the `with`; yield why operators are not given to XNNPACK, by name."""
    log, reasons = logging.getLogger(_PARTITIONER_LOG), _Reasons()
    propagates = log.propagate
    with loggers_limited(_LOGGERS), loggers_limited([_PARTITIONER_LOG], logging.DEBUG):
        log.propagate = False
        log.addHandler(reasons)
        try:
            with warnings.catch_warnings(action="ignore"):
                yield reasons.found
        finally:
            log.removeHandler(reasons)
            log.propagate = propagates


@contextmanager
def _one_line_errors(failed: str) -> Iterator[None]:
    """Raise StageError in the place of what torch.export and ExecuTorch raise, which have no common base class."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        remedy = "set max_batch_size: 1 where the axis is that of the batch"
        raise StageError(f"{failed}: {export_failure(error, remedy=remedy)}") from error
