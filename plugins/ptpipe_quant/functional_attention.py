"""Write `torch.nn.functional.multi_head_attention_forward` out as linear layers, products and softmax.

CLIP's pooling and fairseq call it with the weights of layers of their own. As one operator it would stay float.
Shape legend: as in `attention`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ptpipe_quant.attention import AttentionWriter, attention_weights
from ptpipe_quant.functionalize import SHAPE
from ptpipe_quant.normalize import JOINS
from ptpipe_torch.int8.tracer import Scopes

F = nn.functional
_FUNCTION: Any = F.multi_head_attention_forward
_NO_FORM = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")


def write_out_functional_attention(graph: GraphModule, scopes: Scopes) -> bool:
    """Replace calls of the function, in place; return whether there was any. New nodes have no `TENSOR` and `SHAPE`.

    A call stays if the network reads the weights of the values, gives it keys and values beside those it projects, or
    computes its number of heads.
    """
    calls = [node for node in graph.graph.find_nodes(op="call_function", target=_FUNCTION) if _can_be_written(node)]
    for node in calls:
        _Writer(graph, scopes, node).write()
    return bool(calls)


def _arguments(node: Node) -> Mapping[str, Any]:
    bound = inspect.signature(_FUNCTION).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _can_be_written(node: Node) -> bool:
    arguments = _arguments(node)
    reads_output_alone = all(
        user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in node.users
    )
    is_known = not any(isinstance(arguments[name], Node) for name in ("num_heads", "dropout_p"))
    projects_all_keys = all(arguments[name] is None or arguments[name] is False for name in _NO_FORM)
    return reads_output_alone and is_known and projects_all_keys


class _Writer(AttentionWriter):
    def write(self) -> None:
        """Replace the call."""
        arguments = _arguments(self._node)
        is_batched = len(arguments["query"].meta[SHAPE]) == 3
        with self.graph.inserting_before(self._node):
            output = self._attended(arguments, is_batched=is_batched)
        for user in list(self._node.users):
            user.replace_all_uses_with(output.node)
            self.graph.erase_node(user)
        self.graph.erase_node(self._node)
        joined = arguments["in_proj_bias"]
        if isinstance(joined, Node) and not joined.users:  # would be another reader of the parameters
            self.graph.erase_node(joined)

    def _attended(self, arguments: Mapping[str, Any], *, is_batched: bool) -> Any:
        num_heads, mask = arguments["num_heads"], self._proxy(arguments["key_padding_mask"])
        tensors = [self._proxy(arguments[name]) for name in ("query", "key", "value")]
        if not is_batched:  # a batch of one, the second axis
            tensors = [tensor.unsqueeze(1) for tensor in tensors]
            mask = None if mask is None else mask.unsqueeze(0)
        query_NHLD, key_NHSD, value_NHSD = (
            projected.reshape(projected.size(0), projected.size(1), num_heads, -1).permute(1, 2, 0, 3)
            for projected in map(F.linear, tensors, self._weights(arguments), self._thirds(arguments["in_proj_bias"]))
        )
        scores_NHLS = torch.matmul(query_NHLD, key_NHSD.transpose(-2, -1))
        scale = (arguments["query"].meta[SHAPE][-1] // num_heads) ** -0.5
        weights_NHLS = self._call(
            attention_weights, scores_NHLS, self._proxy(arguments["attn_mask"]), mask, scale=scale
        )
        if arguments["dropout_p"]:
            weights_NHLS = F.dropout(weights_NHLS, arguments["dropout_p"], False)
        attended_LNE = torch.flatten(torch.matmul(weights_NHLS, value_NHSD).permute(2, 0, 1, 3), 2)
        output = F.linear(attended_LNE, *(self._proxy(arguments[f"out_proj_{name}"]) for name in ("weight", "bias")))
        return output if is_batched else output.squeeze(1)

    def _weights(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Return those of queries, keys and values."""
        if arguments["use_separate_proj_weight"]:
            return [self._proxy(arguments[f"{name}_proj_weight"]) for name in ("q", "k", "v")]
        return self._thirds(arguments["in_proj_weight"])

    def _thirds(self, packed: Node | None) -> list[Any]:
        """Return the three parts of a packed parameter; where the network joins them, what it joins."""
        if packed is None:
            return [None] * 3
        parts: Any = packed.args[0] if packed.target in JOINS and len(packed.args) == 1 else ()
        if len(parts) == 3:
            return list(map(self._proxy, parts))
        size, proxy = packed.meta[SHAPE][0] // 3, self._proxy(packed)
        return [proxy[number * size : (number + 1) * size] for number in range(3)]
