"""Trace a network by torch.export, which runs it: through branches, loops and types that FX's proxies can't follow.

torch.export records ATen operators. They become the functions, methods and layers that FX quantization knows; others
stay, and are float. What a network does in training alone (stochastic depth) is not in the graph, but dropout is.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_unflatten

from ptpipe_torch.int8.attribute_names import accept_keywords
from ptpipe_torch.int8.tracer import SOURCE_LINE, Scopes
from ptpipe_torch.model.axis_sizes import are_multiples
from ptpipe_torch.model.example_inputs import zeros
from ptpipe_torch.model.signature import TensorSpec
from ptpipe_torch.sized_export import export_sized
from ptpipe_torch.torch_export import export_program, module_path, source_line
from ptpipe_torch.traced_autocast import inline_autocast_regions

F = nn.functional

_BATCH_SIZE = 2
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(F, name)
        for name in (
            *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "conv1d"),
            *("conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "dropout", "elu"),
            *("gelu", "group_norm", "hardsigmoid", "hardswish", "hardtanh", "layer_norm", "leaky_relu", "linear"),
            *("max_pool1d", "max_pool2d", "max_pool3d", "mish", "pad", "relu6", "scaled_dot_product_attention"),
            "silu",
        )
    },
    **{
        name: getattr(torch, name)
        for name in ("add", "bmm", "cat", "matmul", "mul", "relu", "sigmoid", "stack", "sub", "tanh")
    },
}
_FUNCTIONS["dropout_"] = F.dropout  # which changes nothing in eval mode
"""Functions whose parameters are those of the ATen operator of that name."""
_NUM_PARAMETERS = {"layer_norm": 5, "group_norm": 5}
"""Of functions that don't have the operator's last one, which concerns cuDNN."""
_METHODS = {
    *("chunk", "clone", "contiguous", "expand", "flatten", "mean", "narrow", "permute", "repeat", "reshape", "select"),
    *("softmax", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
}
"""Methods of tensors with the parameters of the ATen operator of that name."""
_IN_PLACE_FUNCTIONS = ("elu_", "hardsigmoid_", "hardswish_", "hardtanh_", "leaky_relu_", "relu6_", "silu_")
_ASSERTIONS = re.compile(r"^aten\._assert|^aten\.sym_constrain|_guards_fn$")


def trace_by_export(module: nn.Module, inputs: Sequence[TensorSpec]) -> tuple[GraphModule, Scopes]:
    """Trace a network in eval mode into a graph; return it with the scope of each node.

    Axes with symbols stay of any size, as far as the network takes them. Raises whatever torch.export raises.
    """
    accept_keywords()
    with torch.no_grad():
        program = _exported(module, inputs)
    traced: Any = program.module(check_guards=False)
    inline_autocast_regions(traced)
    translation = _Translation(module, traced)
    return translation.graph_module(program.call_spec.out_spec), translation.scopes


def _exported(module: nn.Module, inputs: Sequence[TensorSpec]) -> ExportedProgram:
    if are_multiples(symbol for spec in inputs for symbol in spec.symbols):  # torch.export does not find them out
        return export_sized(module, inputs)
    any_size = torch.export.Dim.AUTO
    axes = ({axis: any_size for axis, size in enumerate(spec.shape) if not isinstance(size, int)} for spec in inputs)
    return export_program(module, tuple(zeros(inputs, _BATCH_SIZE)), tuple(axes))


class _Translation:
    """Copies an exported graph node by node."""

    def __init__(self, module: nn.Module, traced: GraphModule) -> None:
        self._modules = dict(module.named_modules())
        self._traced, self._graph = traced, Graph()
        self._copies: dict[Node, Node] = {}
        self.scopes: Scopes = {}

    def graph_module(self, out_spec: Any) -> GraphModule:
        """Return the translated network. `out_spec`: the containers of its outputs."""
        for node in self._traced.graph.nodes:
            if node.op == "output":
                flat = [self._copies.get(value, value) for value in node.args[0]]
                self._graph.output(_plain(tree_unflatten(flat, out_spec)))
            elif not _ASSERTIONS.search(str(node.target)):
                self._copies[node] = self._copied(node)
        for node in self._graph.find_nodes(op="get_attr"):
            if not node.users:  # of the tensors of batch norms
                self._graph.erase_node(node)
        return GraphModule(self._traced, self._graph)

    def _copied(self, node: Node) -> Node:
        args: Any = map_arg(node.args, self._copies.__getitem__)
        kwargs: Any = map_arg(node.kwargs, self._copies.__getitem__)
        if node.target is torch.ops.aten.batch_norm.default and (name := self._batch_norm(node)):
            copied = self._graph.call_module(name, args[:1])
        elif isinstance(node.target, torch._ops.OpOverload):
            makes_tensor = not any(isinstance(before.meta.get("val"), torch.Tensor) for before in node.all_input_nodes)
            call = _Call.of(node.target, *(_by_keyword(node.target, args, kwargs) if makes_tensor else (args, kwargs)))
            copied = self._graph.create_node(call.op, call.target, call.args, call.kwargs)
        else:
            copied = self._graph.create_node(node.op, node.target, args, kwargs, _name(node))
        self._describe(copied, node)
        return copied

    def _describe(self, copied: Node, node: Node) -> None:
        path = module_path(node)
        self.scopes[copied.name] = (path, type(self._modules.get(path)))
        copied.meta[SOURCE_LINE] = source_line(node)

    def _batch_norm(self, node: Node) -> str | None:
        """Put a layer in the place of the module that has a batch norm's tensors; return its name."""
        arguments: Any = node.args
        _, *tensors, _, momentum, eps, _ = arguments
        owners = {str(tensor.target).rpartition(".")[0] for tensor in tensors if isinstance(tensor, Node)}
        name = owners.pop() if len(owners) == 1 else ""
        if not name or any(isinstance(tensor, Node) and tensor.op != "get_attr" for tensor in tensors):
            return None
        original = self._modules.get(name)
        if not isinstance(original, nn.modules.batchnorm._BatchNorm):
            return None
        if not isinstance(self._traced.get_submodule(name), type(original)):
            layer = type(original)(original.num_features, eps, momentum, original.affine, original.track_running_stats)
            layer.load_state_dict(original.state_dict())
            self._traced.set_submodule(name, layer.eval())
        return name


@dataclass(frozen=True)
class _Call:
    """A node's call, in the form that FX quantization knows."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        name = overload._schema.name.removeprefix("aten::")
        if overload.namespace != "aten":
            return cls("call_function", overload, args, kwargs)
        if name in _FUNCTIONS:
            return cls("call_function", _FUNCTIONS[name], args[: _NUM_PARAMETERS.get(name)], kwargs)
        if name in _METHODS:
            return cls("call_method", name, args, kwargs)
        if name in _IN_PLACE_FUNCTIONS:
            return cls("call_function", getattr(torch._C._nn, name), args, kwargs)
        if name.endswith("_") and hasattr(torch.Tensor, name):
            return cls("call_method", name, args, kwargs)
        if name == "sym_size":
            return cls("call_method", "size", args, kwargs)
        if name == "embedding":
            return cls("call_function", F.embedding, (args[1], args[0]), {})
        if name == "slice":
            return _slice(*args)
        return cls("call_function", overload, args, kwargs)


def _by_keyword(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Name all arguments of an operator that makes a tensor of numbers: FX takes the first one for a tensor."""
    names = (argument.name for argument in overload._schema.arguments)
    return (), {**dict(zip(names, args, strict=False)), **kwargs}


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> _Call:
    bounds = slice(start, None if end == torch.iinfo(torch.int64).max else end, step)
    before = (slice(None),) * dim if dim >= 0 else (Ellipsis,)
    behind = () if dim >= 0 else (slice(None),) * (-dim - 1)
    return _Call("call_function", operator.getitem, (x, (*before, bounds, *behind)), {})


def _name(node: Node) -> str | None:
    return node.name if node.op == "placeholder" else None


def _plain(outputs: Any) -> Any:
    """Return outputs in a container that graphs can return."""
    return outputs if isinstance(outputs, Node | tuple | list) else dict(outputs)
