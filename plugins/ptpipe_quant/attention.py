"""Write attention out as linear layers and products of activations, which have int8 forms.

`nn.MultiheadAttention` keeps its projections in bare tensors, and `scaled_dot_product_attention` is one operator: both
would stay float. Masks and softmax stay float here too: a mask of -inf has no range.

Source: A. Vaswani et al., Attention Is All You Need, NeurIPS 2017, section 3.2.
Shape legend: N batch, H heads, L queries, S keys, D features of a head, E = H D features of a token.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from ptpipe_quant.functionalize import SHAPE, TENSOR
from ptpipe_torch.int8.fx import pad_with_input
from ptpipe_torch.int8.tracer import SOURCE_LINE, Scopes

F = nn.functional

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""The linear layers that an `nn.MultiheadAttention` becomes, beneath its name."""

_HIDDEN = -1e30
"""Added to hidden scores, in the place of -inf: a query without any key would get weights that are not numbers."""
_SDPA: Any = F.scaled_dot_product_attention
_SDPA_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_FLAGS = ("need_weights", "average_attn_weights")


class Projections(nn.Module):
    """The linear layers of an `nn.MultiheadAttention`, with its weights. The queries' include the scale of the scores.

    Without a forward pass of its own: the graph calls the layers.
    """

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.batch_first = layer.num_heads, layer.head_dim, layer.batch_first
        self.add_zero_attn, self.dropout = layer.add_zero_attn, layer.dropout
        self.bias_k, self.bias_v = layer.bias_k, layer.bias_v
        packed, bias = layer.in_proj_weight, layer.in_proj_bias
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight) if packed is None else packed.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        scale = layer.head_dim**-0.5
        self.q_proj = _linear(weights[0], biases[0], scale)
        self.k_proj, self.v_proj = _linear(weights[1], biases[1]), _linear(weights[2], biases[2])
        self.out_proj = _linear(layer.out_proj.weight, layer.out_proj.bias)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, scale: float = 1.0) -> nn.Linear:
    num_outputs, num_inputs = weight.shape
    linear = nn.Linear(num_inputs, num_outputs, bias=bias is not None, device="meta")  # draws no random numbers
    linear.weight = nn.Parameter(weight.detach() * scale, requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach() * scale, requires_grad=bias.requires_grad)
    return linear


def layer_types(module: nn.Module) -> dict[str, str]:
    """Return the type of each submodule by name, with the layers that attention is going to be written out as."""
    types: dict[str, str] = {}
    for name, layer in module.named_modules():
        types.setdefault(name, type(layer).__name__)
        if type(layer) is nn.MultiheadAttention:
            types |= {f"{name}.{projection}".lstrip("."): nn.Linear.__name__ for projection in PROJECTIONS}
    types.pop("", None)
    return types


def derived_attention(module: nn.Module) -> dict[str, str]:
    """Return the layers whose type is derived from `nn.MultiheadAttention`, which can't be traced, with that reason."""
    reason = "its type is derived from MultiheadAttention"
    layers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.MultiheadAttention))
    return {name: reason for name, layer in layers if name and type(layer) is not nn.MultiheadAttention}


def write_out_attention(graph: GraphModule, scopes: Scopes, leaves: Collection[str]) -> dict[str, str]:
    """Replace attention by linear layers, products and softmax, in place; return the layers that can't be, and why.

    `leaves`: names of layers to leave as they are.
    """
    layers: dict[str, Any] = {
        name: layer for name, layer in graph.named_modules() if type(layer) is nn.MultiheadAttention
    }
    calls = [node for node in graph.graph.find_nodes(op="call_module") if node.target in layers.keys() - set(leaves)]
    obstacles = ((str(node.target), _obstacle(node, layers[str(node.target)])) for node in calls)
    kept = {name: reason for name, reason in obstacles if reason is not None}
    for node in [node for node in calls if node.target not in kept]:
        name = str(node.target)
        if type(layers[name]) is nn.MultiheadAttention:  # its first call
            layers[name] = Projections(layers[name])
            graph.set_submodule(name, layers[name])
        AttentionWriter(graph, scopes, node).write_layer(layers[name])
    for node in graph.graph.find_nodes(op="call_function", target=_SDPA):
        AttentionWriter(graph, scopes, node).write_function()
    return kept


def attention_weights(
    scores_NHLS: torch.Tensor,
    mask: torch.Tensor | None = None,
    key_padding_mask_NS: torch.Tensor | None = None,
    *,
    num_added_keys: int = 0,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return the softmax over the keys, float32 (N, H, L, S). Masks hide what is True, or are added to the scores.

    `mask`: (L, S) or, for each head, (N H, L, S); both masks are without the last `num_added_keys` keys.
    """
    if scale != 1:
        scores_NHLS = scores_NHLS * scale
    if mask is not None:
        mask = mask.reshape(-1, scores_NHLS.shape[1], *mask.shape[1:]) if mask.dim() == 3 else mask
        scores_NHLS = scores_NHLS + F.pad(_bias(mask), (0, num_added_keys))
    if key_padding_mask_NS is not None:
        bias_NS = F.pad(_bias(key_padding_mask_NS), (0, num_added_keys))
        scores_NHLS = scores_NHLS + bias_NS.unsqueeze(-2).unsqueeze(-2)
    return F.softmax(scores_NHLS, -1)


def scaled_attention_weights(
    scores: torch.Tensor, mask: torch.Tensor | None = None, *, is_causal: bool = False, scale: float = 1.0
) -> torch.Tensor:
    """Return the softmax over the keys, float32 (..., L, S). A mask shows what is True, or is added to the scores."""
    scores = scores * scale
    if is_causal:
        visible_LS = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores + _bias(~visible_LS)
    if mask is not None:
        scores = scores + _bias(~mask if mask.dtype is torch.bool else mask)
    return F.softmax(scores, -1)


def _bias(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, _HIDDEN)
    return mask.clamp(min=_HIDDEN)


def _obstacle(node: Node, layer: nn.Module) -> str | None:
    """Return why a call of attention can't be written out, or None."""
    arguments = _layer_arguments(node)
    if not all(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users):
        return "the network does not take its outputs apart"
    if any(isinstance(arguments[flag], Node) for flag in _FLAGS):
        return "the input decides which weights it returns"
    weights = [user for user in node.users if user.args[1] in (1, -1) and user.users]
    if weights and not arguments["need_weights"]:
        return "the network reads weights that it has not asked for"
    return None


def _layer_arguments(node: Node) -> Mapping[str, Any]:
    bound = inspect.signature(nn.MultiheadAttention.forward).bind(None, *node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


class AttentionWriter(GraphAppendingTracer):
    """Records operators in front of a node, whose scope they get, and replaces the node by what they compute."""

    def __init__(self, graph: GraphModule, scopes: Scopes, node: Node) -> None:
        super().__init__(graph.graph)
        self._scopes, self._node = scopes, node

    def create_node(self, *arguments: Any, **named: Any) -> Node:
        node = super().create_node(*arguments, **named)
        self._scopes[node.name] = self._scopes[self._node.name]
        node.meta[SOURCE_LINE] = self._node.meta.get(SOURCE_LINE, "")
        return node

    def write_layer(self, layer: Projections) -> None:
        """Replace a call of the `nn.MultiheadAttention` that these are the layers of."""
        path, arguments = str(self._node.target), _layer_arguments(self._node)
        with self.graph.inserting_before(self._node):
            output, weights = self._attend(layer, path, arguments)
            results = (output, self._returned(weights, layer.num_heads, arguments))
        for user in list(self._node.users):
            if user.users:
                self._replace(user, results[user.args[1]])  # type: ignore[index]  # see `_obstacle`
            else:
                self.graph.erase_node(user)
        self.graph.erase_node(self._node)

    def write_function(self) -> None:
        """Replace a call of `scaled_dot_product_attention`."""
        given: dict[str, Any] = dict(zip(_SDPA_PARAMETERS, self._node.args, strict=False)) | dict(self._node.kwargs)
        query, key, value = (self._proxy(given[name]) for name in ("query", "key", "value"))
        shape, scale = given["query"].meta[SHAPE], given.get("scale")
        options = {"is_causal": given.get("is_causal", False), "scale": shape[-1] ** -0.5 if scale is None else scale}
        with self.graph.inserting_before(self._node):
            if given.get("enable_gqa") and (repeats := shape[-3] // given["key"].meta[SHAPE][-3]) > 1:
                key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
            scores = torch.matmul(query, key.transpose(-2, -1))
            weights = self._call(scaled_attention_weights, scores, self._proxy(given.get("attn_mask")), **options)
            if given.get("dropout_p", 0.0):
                weights = F.dropout(weights, given["dropout_p"])
            output = torch.matmul(weights, value)
        self._replace(self._node, output)

    def _attend(self, layer: Projections, path: str, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the output, and the weights of the values."""
        query, key, value = (self._proxy(arguments[name]) for name in ("query", "key", "value"))
        is_batched = len(arguments["query"].meta[SHAPE]) == 3
        if not is_batched:  # a batch of one, the second axis
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        batch, sequence = (0, 1) if layer.batch_first and is_batched else (1, 0)
        query = self._layer(f"{path}.q_proj", query)
        key, value, num_added = self._with_added_keys(
            layer, path, self._layer(f"{path}.k_proj", key), self._layer(f"{path}.v_proj", value), batch
        )
        by_head = (batch, 2, sequence, 3)
        query_NHLD, key_NHDS, value_NHSD = (
            tensor.reshape(tensor.size(0), -1, layer.num_heads, layer.head_dim).permute(*axes)
            for tensor, axes in ((query, by_head), (key, (batch, 2, 3, sequence)), (value, by_head))
        )
        masks = map(self._proxy, (arguments["attn_mask"], arguments["key_padding_mask"]))
        scores_NHLS = torch.matmul(query_NHLD, key_NHDS)
        weights_NHLS = self._call(attention_weights, scores_NHLS, *masks, num_added_keys=num_added)
        if layer.dropout:
            weights_NHLS = F.dropout(weights_NHLS, layer.dropout, False)
        attended_NHLD = torch.matmul(weights_NHLS, value_NHSD)
        axes = (0, 2, 1, 3) if batch == 0 else (2, 0, 1, 3)
        output = self._layer(f"{path}.out_proj", torch.flatten(attended_NHLD.permute(*axes), 2))
        return output if is_batched else output.squeeze(1), weights_NHLS

    def _with_added_keys(self, layer: Projections, path: str, key: Any, value: Any, batch_axis: int) -> Any:
        """Return keys and values behind `add_bias_kv` and `add_zero_attn`, and how many there are more."""
        num_added = 0
        if layer.bias_k is not None:
            key, value = (
                torch.cat([tensor, self._repeated(f"{path}.{name}", tensor, batch_axis)], 1 - batch_axis)
                for tensor, name in ((key, "bias_k"), (value, "bias_v"))
            )
            num_added += 1
        if layer.add_zero_attn:
            padding = [0, 0, 0, 1] if batch_axis == 0 else [0, 0, 0, 0, 0, 1]
            key, value = (self._call(pad_with_input, tensor, padding, "constant") for tensor in (key, value))
            num_added += 1
        return key, value, num_added

    def _repeated(self, parameter: str, like: Any, batch_axis: int) -> Any:
        sizes: list[Any] = [1, 1, 1]
        sizes[batch_axis] = like.size(batch_axis)
        return self.create_proxy("get_attr", parameter, (), {}).repeat(*sizes)

    def _returned(self, weights_NHLS: Any, num_heads: int, arguments: Mapping[str, Any]) -> Any:
        """Return the weights as the layer returns them; None if no one reads them."""
        if not any(user.args[1] in (1, -1) and user.users for user in self._node.users):
            return None
        # No mean, which would be int8.
        weights = weights_NHLS.sum(1) / num_heads if arguments["average_attn_weights"] else weights_NHLS
        return weights if len(arguments["query"].meta[SHAPE]) == 3 else weights.squeeze(0)

    def _replace(self, node: Node, result: Any) -> None:
        result.node.meta |= {key: node.meta[key] for key in (TENSOR, SHAPE)}
        node.replace_all_uses_with(result.node)
        self.graph.erase_node(node)

    def _proxy(self, value: Any) -> Any:
        return Proxy(value, self) if isinstance(value, Node) else value

    def _layer(self, name: str, x: Any) -> Any:
        proxy = self.create_proxy("call_module", name, (x,), {})
        self._scopes[proxy.node.name] = (name, nn.Linear)
        return proxy

    def _call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        return self.create_proxy("call_function", function, arguments, options)
