"""torch.export, and which module and line of a network its operators and errors come from."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves

from ptpipe_torch import traced_hooks
from ptpipe_torch.answering_builtins import Answer, answering_builtins
from ptpipe_torch.equal_parts import EqualParts, counts_parts
from ptpipe_torch.errors import makes_constant_of_size
from ptpipe_torch.int8 import tracer
from ptpipe_torch.int8.tracer import SOURCE_LINE
from ptpipe_torch.kept_attributes import forget_sizes
from ptpipe_torch.runtime import loggers_limited
from ptpipe_torch.source_line import TORCH_FOLDER, described_line
from ptpipe_torch.whole_quotients import symbolic_quotients

_SHAPES_LOGGER = "torch.fx.experimental.symbolic_shapes"
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in .*\n\s*(.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Place:
    """Where in a network an operator or an error comes from."""

    module: str
    """The path of the innermost module; empty: the network itself, or unknown."""
    line: str
    """As `path:number: code`; empty: unknown."""

    @property
    def in_parentheses(self) -> str:
        """The end of a phrase that tells where it is; empty if that is unknown."""
        parts = [f"module {self.module}" if self.module else "", self.line]
        return f" ({', '.join(filter(None, parts))})" if any(parts) else ""


def export_program(
    network: nn.Module, inputs: Sequence[Any], dynamic_shapes: Sequence[Any], *, asserts_assumptions: bool = False
) -> ExportedProgram:
    """Call `torch.export.export` without the graph that it prints to stderr, and the warning, when it fails.

    A network that makes a constant of a size is tried once more, see `whole_quotients` and `equal_parts`; one that
    keeps sizes from its last call, without those. `asserts_assumptions`: the program asserts what it assumes of
    sizes, where torch.export would refuse the network. Raises whatever torch.export raises.
    """
    export = partial(_exported, network, inputs, dynamic_shapes, asserts_assumptions)
    try:
        return export()
    except Exception as error:
        if forget_sizes(network, inputs):
            return export()
        if counts_parts(error):
            with suppress(Exception), EqualParts():
                return export()
        if not makes_constant_of_size(error):
            raise
        with symbolic_quotients(network):
            return export()


def _exported(
    network: nn.Module, inputs: Sequence[Any], dynamic_shapes: Sequence[Any], asserts_assumptions: bool
) -> ExportedProgram:
    from torch._dynamo import trace_rules  # takes a second

    from ptpipe_torch.symbolic_sizes import SymbolicSizes  # so does that

    trace_rules.is_builtin_callable(len)  # fills a table of built-in functions, before one of them is another
    printed, graph = StringIO(), ""
    try:
        lengths = answering_builtins(("len",), torch.Tensor, _first_size, (TORCH_FOLDER,))
        with loggers_limited([_SHAPES_LOGGER]), redirect_stderr(printed), lengths, _masks_used(), SymbolicSizes():
            return torch.export.export(
                network,
                tuple(inputs),
                dynamic_shapes=_by_parameter(network, dynamic_shapes),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=asserts_assumptions,
            )
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", "")
        raise
    finally:
        # What the network itself prints.
        sys.stderr.write(printed.getvalue().replace(f"{graph}\n", "") if graph else printed.getvalue())


@contextmanager
def _masks_used() -> Iterator[None]:
    """Let `nn.Transformer` not look whether a mask is the causal one, which is a branch: it then uses the mask."""
    looks = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = looks


def _by_parameter(network: nn.Module, shapes: Sequence[Any]) -> tuple[Any, ...]:
    """Return what is dynamic of each input as torch.export takes it: of all inputs in `*inputs`, in one tuple."""
    return tuple(inspect.signature(network.forward).bind(*shapes).arguments.values())


def _first_size(length: Answer, tensor: torch.Tensor) -> Any:
    """Return the size of the first axis, as a symbol where it has one."""
    return tensor.shape[0] if tensor.dim() else length(tensor)


def insert_call(graph: Graph, operator: Any, *arguments: Any) -> Node:
    """Insert a call of an operator into an exported program's graph, with what is known of its result."""
    node = graph.call_function(operator, arguments)
    node.meta["val"] = operator(*map_arg(arguments, lambda value: value.meta["val"]))
    return node


def name_outputs(program: ExportedProgram) -> None:
    """Give the outputs in a program's signature the names of the nodes that its graph returns."""
    for spec, value in zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True):
        if isinstance(value, Node):
            spec.arg = TensorArgument(name=value.name)


def is_write(node: Node) -> bool:
    """Return whether a node is an operator in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def storages(node: Node) -> list[int]:
    """Return what identifies the memory of a node's tensors, in the trace of its network."""
    values = tree_leaves(node.meta.get("val"))
    return [value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)]


def module_path(node: Node) -> str:
    """Return the path of the innermost module that an operator of an exported network belongs to."""
    return next((str(path) for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values()))), "")


def original_names(node: Node) -> Iterator[str]:
    """Yield the name of a node, and of those that it was made from, in the graphs before it."""
    yield node.name
    sources = node.meta.get("from_node")
    while sources:
        yield sources[-1].name
        sources = sources[-1].from_node


def source_line(node: Node) -> str:
    """Return the last line of the network's own code that led to an exported operator; empty if it is unknown."""
    frames: Iterator[tuple[str, str, str]] = reversed(_FRAME.findall(node.meta.get("stack_trace") or ""))
    own = next((frame for frame in frames if not frame[0].startswith(TORCH_FOLDER)), None)
    return "" if own is None else f"{own[0]}:{own[1]}: `{own[2].strip()}`"


def place_of_operator(network: nn.Module, node: Node) -> Place:
    """Return where an operator of an exported network comes from; it has a line if stack traces were recorded.

    A network that is a graph itself has no code of its own: its nodes have the module and the line.
    """
    path, line = module_path(node), source_line(node)
    if isinstance(network, GraphModule):
        names = set(original_names(node))
        traced = next((traced for traced in network.graph.nodes if traced.name in names), None)
        if traced is not None:
            path = path or network.meta.get("scopes", {}).get(traced.name, "")
            line = line or str(traced.meta.get(SOURCE_LINE, ""))
    return Place(path, line)


def place_of_error(network: nn.Module, error: BaseException, caller: str) -> Place:
    """Return where in a network's code an exception was raised while the network was traced.

    `caller`: a file, whose folder has no code of the network's.
    """
    internal = (TORCH_FOLDER, *(f"{Path(file).parent}{os.sep}" for file in (__file__, tracer.__file__, caller)))
    names = {id(part): name for name, part in network.named_modules()}
    line, module = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        path, node = frame.f_code.co_filename, frame.f_locals.get("n")
        if isinstance(node, Node) and SOURCE_LINE in node.meta:  # of a graph that torch.fx runs
            line, module = str(node.meta[SOURCE_LINE]), module_path(node)
        elif path == traced_hooks.__file__:
            module = names.get(id(frame.f_locals.get("layer")), module)
        elif not path.startswith(internal):
            line = described_line(path, number)
            module = names.get(id(frame.f_locals.get("self")), module)
    return Place(module, line)
