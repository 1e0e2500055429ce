"""Attention layers as modules that call linear layers, which `quant.dynamic` can replace.

`nn.MultiheadAttention` keeps the weights of its projections in bare tensors, and gives them to one operator. So do
torch's transformer layers in eval mode, hence `transformer_layers`; and so does torchvision's window attention.

Shape legend: N batch, H heads, L queries, S keys, D features of a head, E = H D features of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from ptpipe import Context
from ptpipe_quant.attention import Projections, attention_weights
from ptpipe_quant.swin_attention import call_layers, is_window_attention
from ptpipe_quant.transformer_layers import use_traceable_layers

F = nn.functional
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class SeparateAttention(Projections):
    """`nn.MultiheadAttention`, called as that is."""

    def forward(  # noqa: PLR0913  # as torch has it
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the weights of the values. `is_causal` says what the mask is."""
        is_batched = query.dim() == 3
        if not is_batched:  # a batch of one, the second axis
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        query, key, value = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        is_batch_first = self.batch_first and is_batched
        if not is_batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        key, value, num_added = self._with_added_keys(key, value)
        query_NHLD, key_NHSD, value_NHSD = map(self._by_head, (query, key, value))
        scores_NHLS = torch.matmul(query_NHLD, key_NHSD.transpose(-2, -1))
        weights_NHLS = attention_weights(scores_NHLS, attn_mask, key_padding_mask, num_added_keys=num_added)
        weights_NHLS = F.dropout(weights_NHLS, self.dropout, self.training)
        output = self.out_proj(torch.matmul(weights_NHLS, value_NHSD).transpose(1, 2).flatten(2))
        if not is_batch_first:
            output = output.transpose(0, 1)
        weights = weights_NHLS.mean(1) if average_attn_weights else weights_NHLS
        if not is_batched:
            output, weights = output.squeeze(1), weights.squeeze(0)
        return output, weights if need_weights else None

    def _with_added_keys(
        self, key_NSE: torch.Tensor, value_NSE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return keys and values behind `add_bias_kv` and `add_zero_attn`, and how many there are more."""
        num_added = 0
        if self.bias_k is not None and self.bias_v is not None:
            key_NSE, value_NSE = (
                torch.cat([tensor, bias.expand(tensor.size(0), -1, -1)], 1)
                for tensor, bias in ((key_NSE, self.bias_k), (value_NSE, self.bias_v))
            )
            num_added += 1
        if self.add_zero_attn:
            key_NSE, value_NSE = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key_NSE, value_NSE))
            num_added += 1
        return key_NSE, value_NSE, num_added

    def _by_head(self, x_NLE: torch.Tensor) -> torch.Tensor:
        return x_NLE.reshape(x_NLE.size(0), -1, self.num_heads, self.head_dim).transpose(1, 2)


def separate_projections(module: nn.Module, names: Collection[str]) -> nn.Module:
    """Let these layers, for each of which `is_attention` holds, call linear layers, in place; return the module.

    Nor do torch's transformer layers use fused operators and nested tensors then, if all of their attention is such.
    """
    separated: dict[nn.Module, SeparateAttention] = {}
    for name in names:
        layer = module.get_submodule(name)
        if isinstance(layer, nn.MultiheadAttention):
            separated[layer] = SeparateAttention(layer).train(layer.training)
        else:
            call_layers(layer)
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if layer in separated:
            module.set_submodule(name, separated[layer])
    types = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, *_LAYERS)
    stacks = {name: layer for name, layer in module.named_modules() if isinstance(layer, types)}
    use_traceable_layers(module, [name for name, layer in stacks.items() if any(map(_is_whole, layer.modules()))])
    return module


def is_attention(layer: nn.Module) -> bool:
    """Return whether a layer is attention that gives the weights of its projections to one function."""
    return _is_whole(layer) or is_window_attention(layer)


def _is_whole(layer: nn.Module) -> bool:
    return isinstance(layer, nn.MultiheadAttention)


def separable_layers(build: Callable[[], nn.Module], is_same: Callable[[nn.Module], bool], ctx: Context) -> list[str]:
    """Return the names of the attention layers that can call linear layers; log why others can't.

    `build`: builds the float network. `is_same`: returns whether a network computes what the float one does.
    """
    layers = {name: layer for name, layer in build().named_modules() if is_attention(layer)}
    reasons: dict[str, str] = {}
    candidates = []
    for name, layer in layers.items():
        if _is_whole(layer) and type(layer) is not nn.MultiheadAttention:
            reasons[name] = "its type is derived from MultiheadAttention"
        elif layer._forward_hooks or layer._forward_pre_hooks:
            reasons[name] = "it has hooks"
        elif name:
            candidates.append(name)
    if candidates and not is_same(separate_projections(build(), candidates)):
        accepted: list[str] = []
        for name in candidates:
            if is_same(separate_projections(build(), [*accepted, name])):
                accepted.append(name)
            else:
                reasons[name] = "the network computes something else when its type is another"
        candidates = accepted
    for name, reason in reasons.items():
        ctx.log(f"{name} stays float: {reason}")
    return candidates
