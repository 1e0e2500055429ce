"""torch's transformer layers without what can't be traced: fused operators, nested tensors, checks of shapes.

The layers keep their names and weights. What padding hides at the end of texts is zero behind a stack of layers, as
torch's nested tensors have it in eval mode; here it is so in train mode, too.

Shape legend: N batch, L tokens, E features.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn


class TraceableEncoderLayer(nn.TransformerEncoderLayer):
    """`nn.TransformerEncoderLayer` without its fused operator."""

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Compute the layer. `is_causal` says what the mask is, which changes nothing."""
        masks = src_mask, src_key_padding_mask
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), *masks)
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, *masks))
        y: torch.Tensor = self.norm2(src + self._ff_block(src))
        return y


class TraceableEncoder(nn.TransformerEncoder):
    """`nn.TransformerEncoder` without nested tensors."""

    def forward(
        self,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        """Compute the layers. `is_causal` says what the mask is, which changes nothing."""
        for layer in self.layers:
            src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
        if src_key_padding_mask is not None and mask is None and getattr(self, "use_nested_tensor", False):
            src = without_padding(src, src_key_padding_mask)
        return src if self.norm is None else self.norm(src)


def without_padding(x: torch.Tensor, padding_NL: torch.Tensor) -> torch.Tensor:
    """Return zeros for the tokens that padding hides, if in all texts these are the last ones.

    `x`: (N, L, E). `padding_NL`: what is not zero hides a token, be it True or -inf.
    """
    is_hidden_NL = padding_NL != 0
    is_behind_NL = ~is_hidden_NL & (is_hidden_NL.cumsum(1) > 0)
    return x.masked_fill((is_hidden_NL & ~is_behind_NL.any()).unsqueeze(-1), 0.0)


torch.fx.wrap("without_padding")


class TraceableDecoderLayer(nn.TransformerDecoderLayer):
    """`nn.TransformerDecoderLayer`, which a tracer takes for one operator if it has torch's own type."""


class TraceableDecoder(nn.TransformerDecoder):
    """`nn.TransformerDecoder` without a look at the values of its masks."""

    def forward(  # noqa: PLR0913  # as torch has it
        self,
        tgt: torch.Tensor,
        memory: torch.Tensor,
        tgt_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        tgt_key_padding_mask: torch.Tensor | None = None,
        memory_key_padding_mask: torch.Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> torch.Tensor:
        """Compute the layers. `tgt_is_causal` and `memory_is_causal` say what the masks are, which changes nothing."""
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        for layer in self.layers:
            tgt = layer(tgt, memory, *masks)
        return tgt if self.norm is None else self.norm(tgt)


class TraceableTransformer(nn.Transformer):
    """`nn.Transformer` without its checks of shapes."""

    def forward(  # noqa: PLR0913  # as torch has it
        self,
        src: torch.Tensor,
        tgt: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        tgt_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        tgt_key_padding_mask: torch.Tensor | None = None,
        memory_key_padding_mask: torch.Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> torch.Tensor:
        """Compute encoder and decoder. The arguments named `is_causal` say what the masks are."""
        memory = self.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask)
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        output: torch.Tensor = self.decoder(tgt, memory, *masks)
        return output


_TRACEABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.TransformerEncoderLayer: TraceableEncoderLayer,
    nn.TransformerEncoder: TraceableEncoder,
    nn.TransformerDecoderLayer: TraceableDecoderLayer,
    nn.TransformerDecoder: TraceableDecoder,
    nn.Transformer: TraceableTransformer,
}


def use_traceable_layers(module: nn.Module, leaves: Collection[str]) -> None:
    """Let transformer layers compute what a tracer can follow, in place, except for those in `leaves`.

    A stack of layers of the user's own types stays as it is.
    """
    within = tuple(f"{leaf}." for leaf in leaves)
    for name, layer in module.named_modules():
        layers: Any = getattr(layer, "layers", ())
        if type(layer) in _TRACEABLE and not f"{name}.".startswith(within) and all(map(_is_torchs, layers)):
            layer.__class__ = _TRACEABLE[type(layer)]


def _is_torchs(layer: nn.Module) -> bool:
    return type(layer) in (*_TRACEABLE, *_TRACEABLE.values())
