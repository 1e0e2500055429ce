"""Networks of token ids: a transformer encoder and an LSTM.

Both take one input, ids padded on the right, and find the padding in it; what they compute of a text does not depend on
how far its batch is padded.
Shape legend: B texts, L tokens, D features of a token, H heads, S hidden features of an LSTM, K outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch import DatasetInfo, FunctionRef, TokensInfo, builder
from ptpipe_zoo.config import TextLstmConfig, TextTransformerConfig
from ptpipe_zoo.nets import Rescale

F = nn.functional
Pooling: TypeAlias = Literal["mean", "first", "last"]

_HIDDEN = -1e4
"""Added to the scores of padding: e**-1e4 is 0, also in fp16's range. Infinity would give NaN in a text of padding."""
_EMBEDDING_STD = 0.02
"""Of the sum of token and position, in front of a norm (Devlin et al., 2019)."""


@dataclass(frozen=True)
class TextSizes:
    """What a network for texts needs to know of a data set: arguments of its builder."""

    vocabulary_size: int
    max_length: int
    padding_id: int
    num_outputs: int
    """K."""
    per_token: bool
    """Whether there are K outputs for each token, not for each text."""
    scale: tuple[float, ...]
    """Of each output, from units of a standard deviation to those of the target; empty: none."""
    shift: tuple[float, ...]

    @classmethod
    def of(cls, kind: str, info: DatasetInfo) -> TextSizes:
        """Return the sizes for a data set. Raises StageError for one of anything else than texts.

        `kind`: of the stage, for errors.
        """
        signature, columns = info.signature, list(info.inputs.values())
        if len(columns) == len(signature.outputs) == 1 and isinstance(tokens := columns[0], TokensInfo):
            facts = tokens.vocabulary_size, tokens.max_length, tokens.padding_id
            rescaling = info.task.output_scale, info.task.output_shift
            match signature.outputs[0].sample_shape:
                case (int(num_outputs),):
                    return cls(*facts, num_outputs, False, *rescaling)
                case (length, int(num_outputs)) if length == tokens.length:
                    return cls(*facts, num_outputs, True, *rescaling)
        raise StageError(
            f"{kind} takes texts (one input of token ids: data.text, or `tokens` of data.arrays and data.python) and "
            f"returns numbers for each text or token; {info.name} has {signature}"
        )

    @property
    def is_language_model(self) -> bool:
        """Whether each token gets a number for each token of the vocabulary: one of them is predicted."""
        return self.per_token and self.num_outputs == self.vocabulary_size


def transformer_ref(config: TextTransformerConfig, info: DatasetInfo) -> FunctionRef:
    """Return the builder of a transformer for the data set. Raises StageError where that is not of texts."""
    options = config.model_dump() | {"feed_forward_dim": config.feed_forward_dim or 4 * config.dim}
    return FunctionRef.to(text_transformer, **asdict(TextSizes.of("model.text_transformer", info)), **options)


def lstm_ref(config: TextLstmConfig, info: DatasetInfo) -> FunctionRef:
    """Return the builder of an LSTM for the data set. Raises StageError where that is not of texts."""
    sizes = asdict(TextSizes.of("model.text_lstm", info))
    del sizes["max_length"]
    return FunctionRef.to(text_lstm, **sizes, **config.model_dump())


@builder
def text_transformer(  # noqa: PLR0913  # by keyword: the arguments of a recipe
    *,
    vocabulary_size: int,
    max_length: int,
    padding_id: int,
    num_outputs: int,
    per_token: bool,
    dim: int,
    num_layers: int,
    num_heads: int,
    feed_forward_dim: int,
    dropout: float,
    pooling: Pooling,
    causal: bool,
    scale: Sequence[float] = (),
    shift: Sequence[float] = (),
) -> nn.Module:
    """Build a `TextTransformer`. For the arguments see `TextSizes` and `TextTransformerConfig`."""
    return TextTransformer(
        TokenEmbedding(vocabulary_size, dim, max_length, padding_id, dropout),
        [EncoderLayer(dim, num_heads, feed_forward_dim, dropout, causal=causal) for _ in range(num_layers)],
        None if per_token else pooling,
        _head(dim, num_outputs, scale, shift),
    )


@builder
def text_lstm(  # noqa: PLR0913  # by keyword: the arguments of a recipe
    *,
    vocabulary_size: int,
    padding_id: int,
    num_outputs: int,
    per_token: bool,
    dim: int,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    pooling: Pooling,
    scale: Sequence[float] = (),
    shift: Sequence[float] = (),
) -> nn.Module:
    """Build a `TextLstm`. For the arguments see `TextSizes` and `TextLstmConfig`."""
    return TextLstm(
        TokenEmbedding(vocabulary_size, dim, None, padding_id, dropout),
        nn.LSTM(dim, hidden_size, num_layers, batch_first=True, dropout=dropout if num_layers > 1 else 0.0),
        dropout,
        None if per_token else pooling,
        _head(hidden_size, num_outputs, scale, shift),
    )


def _head(num_features: int, num_outputs: int, scale: Sequence[float], shift: Sequence[float]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_features, num_outputs), *([Rescale(scale, shift)] if scale else []))


class TokenEmbedding(nn.Module):
    """A vector for each token, plus one for its position where `max_length` is given."""

    def __init__(self, vocabulary_size: int, dim: int, max_length: int | None, padding_id: int, dropout: float) -> None:
        super().__init__()
        self.padding_id = padding_id
        self.tokens = nn.Embedding(vocabulary_size, dim)
        # Position 0 is in front of the first token: that of an empty text.
        self.positions = None if max_length is None else nn.Embedding(max_length + 1, dim)
        self.dropout = nn.Dropout(dropout)
        if self.positions is not None:
            for embedding in (self.tokens, self.positions):
                nn.init.normal_(embedding.weight, std=_EMBEDDING_STD)

    def is_token(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Return which ids are no padding, bool (B, L)."""
        return tokens_BL != self.padding_id

    def is_padding(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Return which ids are padding, bool (B, L)."""
        return tokens_BL == self.padding_id

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, L, D)."""
        x_BLD = self.tokens(tokens_BL)
        if self.positions is not None:
            # Tokens are counted: a range of L numbers can't be traced where L is a symbol.
            x_BLD = x_BLD + self.positions(torch.cumsum(self.is_token(tokens_BL), 1))
        embedded_BLD: torch.Tensor = self.dropout(x_BLD)
        return embedded_BLD


class TextTransformer(nn.Module):
    """Token and position embeddings, pre-norm encoder layers (Xiong et al., 2020), a norm, pooling, a linear layer.

    Without pooling, the linear layer is applied to each token.
    """

    def __init__(
        self, embedding: TokenEmbedding, layers: Sequence[EncoderLayer], pooling: Pooling | None, head: nn.Module
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(embedding.tokens.embedding_dim)
        self.pooling = pooling
        self.head = head

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, K), or (B, L, K) without pooling. `tokens_BL`: int64."""
        is_token_BL = self.embedding.is_token(tokens_BL)
        x_BLD = self.embedding(tokens_BL)
        bias_B11L = attention_bias(self.embedding.is_padding(tokens_BL))
        for layer in self.layers:
            x_BLD = layer(x_BLD, bias_B11L)
        x_BLD = self.norm(x_BLD)
        outputs: torch.Tensor = self.head(pooled(x_BLD, is_token_BL, self.pooling))
        return outputs


class EncoderLayer(nn.Module):
    """Attention and a feed-forward network, each behind a norm and added to its input (Vaswani et al., 2017).

    The linear layers are modules, so that they become int8; what is between them is float in int8 networks too.
    """

    def __init__(self, dim: int, num_heads: int, feed_forward_dim: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.feed_forward = nn.Sequential(nn.Linear(dim, feed_forward_dim), nn.ReLU(), nn.Linear(feed_forward_dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BLD: torch.Tensor, bias_B11L: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, L, D). `bias_B11L`: `attention_bias`."""
        x_BLD = x_BLD + self.dropout(self._attend(self.attention_norm(x_BLD), bias_B11L))
        y_BLD: torch.Tensor = x_BLD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BLD)))
        return y_BLD

    def _attend(self, x_BLD: torch.Tensor, bias_B11L: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x_BLD).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        # No token of a text is behind padding: where the future is hidden, so is padding.
        mask: dict[str, Any] = {"is_causal": True} if self.causal else {"attn_mask": bias_B11L}
        attended_BHLd = F.scaled_dot_product_attention(query, key, value, **mask)
        out_BLD: torch.Tensor = self.out(attended_BHLd.transpose(1, 2).flatten(2))
        return out_BLD


class TextLstm(nn.Module):
    """Token embeddings, LSTM layers, pooling, a linear layer; without pooling it is applied to each token.

    Unidirectional: backwards, an LSTM would begin with the padding, whose length depends on the batch.
    """

    def __init__(
        self, embedding: TokenEmbedding, lstm: nn.LSTM, dropout: float, pooling: Pooling | None, head: nn.Module
    ) -> None:
        super().__init__()
        self.embedding, self.lstm, self.dropout = embedding, lstm, nn.Dropout(dropout)
        self.pooling = pooling
        self.head = head

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Return float32 (B, K), or (B, L, K) without pooling. `tokens_BL`: int64."""
        x_BLS, _ = self.lstm(self.embedding(tokens_BL))
        features = pooled(x_BLS, self.embedding.is_token(tokens_BL), self.pooling)
        outputs: torch.Tensor = self.head(self.dropout(features))
        return outputs


def attention_bias(is_hidden_BL: torch.Tensor) -> torch.Tensor:
    """Return what is added to the scores of all heads and queries, float32 (B, 1, 1, L): it hides padding."""
    return is_hidden_BL.unsqueeze(1).unsqueeze(1).float() * _HIDDEN


def pooled(x_BLD: torch.Tensor, is_token_BL: torch.Tensor, pooling: Pooling | None) -> torch.Tensor:
    """Return (B, D): the mean over a text's tokens, or the vector of one; zeros for none. For None, the input.

    The weights are computed from truth values and integers, and multiplied in float: an int8 network, in which numbers
    of tokens would be rounded, divides by the right number.
    """
    if pooling is None:
        return x_BLD
    is_chosen_B1L = is_token_BL.unsqueeze(1)
    if pooling != "mean":
        number_B1L = torch.cumsum(is_chosen_B1L, 2)
        chosen_B11 = 1 if pooling == "first" else number_B1L.amax(2, keepdim=True)
        is_chosen_B1L = is_chosen_B1L & (number_B1L == chosen_B11)
    weights_B1L = is_chosen_B1L / is_chosen_B1L.sum(2, keepdim=True).clamp(min=1)
    return torch.bmm(weights_B1L, x_BLD).squeeze(1)
