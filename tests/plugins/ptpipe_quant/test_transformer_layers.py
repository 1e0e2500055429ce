"""torch's transformer layers as graphs that compute the same.

Shape legend: N batch, L and S tokens, E features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe_quant.trace import float_names, trace_network
from ptpipe_torch import BATCH, TensorSpec

N, L, S, E = 3, 5, 7, 8
INPUTS = (TensorSpec("x", "float32", (BATCH, L, E)), TensorSpec("y", "float32", (BATCH, S, E)))
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)


class Calling(nn.Module):
    """Calls a layer in one of many ways."""

    def __init__(self, part: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.part, self._call = part, call
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self._call(self.part, x, y)


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(E, 2, 16, **{"batch_first": True, "dropout": 0.0, **options})


def decoder_layer() -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(E, 2, 16, dropout=0.0, batch_first=True)


def own(part: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return part(x)


CALLS: dict[str, tuple[Any, Any, int]] = {
    "post_norm": (layer, own, 6),
    "pre_norm": (lambda: layer(norm_first=True), own, 6),
    "gelu": (lambda: layer(activation="gelu"), own, 6),
    "function": (lambda: layer(activation=torch.tanh, bias=False), own, 6),
    "module": (lambda: layer(activation=nn.ELU()), own, 6),
    "encoder": (lambda: nn.TransformerEncoder(layer(), 2, nn.LayerNorm(E)), own, 12),
    "causal": (
        lambda: nn.TransformerEncoder(layer(), 2), lambda part, x, y: part(x, mask=CAUSAL, is_causal=True), 12
    ),
    "padding": (
        lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
        lambda part, x, y: part(x, src_key_padding_mask=x[..., 0] > 1),
        12,
    ),
    "sequence_first": (
        lambda: nn.TransformerEncoder(layer(batch_first=False), 2, enable_nested_tensor=False),
        lambda part, x, y: part(x.transpose(0, 1)).transpose(0, 1),
        12,
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(decoder_layer(), 2, nn.LayerNorm(E)),
        lambda part, x, y: part(x, y, tgt_mask=CAUSAL, memory_key_padding_mask=y[..., 0] > 1),
        20,
    ),
    "transformer": (
        lambda: nn.Transformer(E, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        lambda part, x, y: part(y, x, tgt_mask=CAUSAL, tgt_is_causal=True),
        16,
    ),
}  # fmt: skip


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(N, L, E, generator=random), torch.randn(N, S, E, generator=random)


@pytest.mark.parametrize("name", CALLS)
def test_layers_are_traced_into(name: str) -> None:
    build, call, num_linears = CALLS[name]
    torch.manual_seed(0)
    network = Calling(build(), call)
    with torch.no_grad():
        expected = {train: network.train(train)(*inputs()) for train in (True, False)}
    traced = trace_network(network, INPUTS)
    assert sum(type(part) is nn.Linear for part in traced.graph.modules()) == num_linears
    assert not traced.kept_float
    for train, outputs in expected.items():
        torch.testing.assert_close(traced.graph.train(train)(*inputs()), outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "form", [torch.clone, lambda mask: torch.zeros(mask.shape).masked_fill(mask, -torch.inf)], ids=["bool", "float"]
)
@pytest.mark.parametrize("is_at_end", [True, False])
def test_padding_is_zero_where_nested_tensors_have_it_so(is_at_end: bool, form: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    lengths_N, tokens_L = torch.tensor([5, 2, 3]), torch.arange(L)
    is_padding_NL = tokens_L >= lengths_N[:, None] if is_at_end else tokens_L == lengths_N[:, None] - 1
    network = Calling(
        nn.TransformerEncoder(layer(), 2, nn.LayerNorm(E)), lambda part, x, y: part(x, src_key_padding_mask=form(y))
    ).eval()
    inputs = torch.randn(N, L, E), is_padding_NL
    specs = INPUTS[0], TensorSpec("y", "bool", (BATCH, L))
    with torch.no_grad():
        expected = network(*inputs)
        assert torch.equal(expected[is_padding_NL], torch.zeros(is_padding_NL.sum(), E)) == is_at_end
        torch.testing.assert_close(trace_network(network, specs).graph(*inputs), expected, rtol=1e-5, atol=1e-5)


class Mine(nn.Module):
    """A layer of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(E, 2, batch_first=True)

    def forward(self, src: torch.Tensor, src_mask: Any, is_causal: bool, src_key_padding_mask: Any) -> torch.Tensor:
        assert is_causal is False
        return 2 * src


def test_layers_of_other_types_are_called_as_torch_does() -> None:
    encoder = nn.TransformerEncoder(Mine(), 2, enable_nested_tensor=False)  # type: ignore[arg-type]  # as users do
    network = Calling(encoder, own).eval()
    graph = trace_network(network, INPUTS).graph
    assert type(graph.get_submodule("part")) is nn.TransformerEncoder
    torch.testing.assert_close(graph(*inputs()), 4 * inputs()[0])


@pytest.mark.parametrize(
    ("skip", "whole", "num_linears"),
    [("part", "part", 0), ("TransformerEncoder", "part", 0), ("part.layers.0", "part.layers.0", 6)],
)
def test_what_is_skipped_stays_whole(skip: str, whole: str, num_linears: int) -> None:
    network = Calling(nn.TransformerEncoder(layer(), 2), own).eval()
    type_ = type(network.get_submodule(whole))
    traced = trace_network(network, INPUTS, float_names(network, [skip]))
    assert type(traced.graph.get_submodule(whole)) is type_
    assert sum(type(node) is nn.Linear for node in called(traced.graph)) == num_linears


def called(graph: torch.fx.GraphModule) -> list[nn.Module]:
    return [graph.get_submodule(str(node.target)) for node in graph.graph.find_nodes(op="call_module")]
