"""`F.multi_head_attention_forward` written out: the same function, with linear layers, or left alone.

Shape legend: N batch, L queries, S keys, H heads, E features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe_quant.trace import TracedNetwork, trace_network
from ptpipe_quant.transforms import prepare_qat
from ptpipe_torch import BATCH, TensorSpec

L, S, E, H = 5, 7, 8, 2
INPUTS = (TensorSpec("x", "float32", (BATCH, L, E)), TensorSpec("y", "float32", (BATCH, S, E)))
PADDED = [False] * 5 + [True] * 2


class Attention(nn.Module):
    """Calls the function with the weights of four layers (`q_proj` ...), or with packed ones of its own."""

    def __init__(self, *, packed: bool = False, bias: bool = True, changes: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.changes, self.packed, self.bias = changes or {}, packed, bias
        names = ("out_proj",) if packed else ("q_proj", "k_proj", "v_proj", "out_proj")
        for name in names:
            self.add_module(name, nn.Linear(E, E, bias=bias))
        if packed:
            self.in_proj = nn.Parameter(torch.empty(3 * E, E))
            self.in_bias = nn.Parameter(torch.empty(3 * E)) if bias else None
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """Attend from (L, N, E) to (S, N, E)."""
        if self.packed:
            weights: dict[str, Any] = {"in_proj_weight": self.in_proj, "in_proj_bias": self.in_bias}
        else:
            layers = self.q_proj, self.k_proj, self.v_proj
            weights = {f"{name}_proj_weight": layer.weight for name, layer in zip("qkv", layers, strict=True)}
            bias = torch.cat([layer.bias for layer in layers]) if self.bias else None
            weights |= {"use_separate_proj_weight": True, "in_proj_weight": None, "in_proj_bias": bias}
        arguments = {
            "query": x,
            "key": y,
            "value": y,
            "embed_dim_to_check": E,
            "num_heads": H,
            "bias_k": None,
            "bias_v": None,
            "add_zero_attn": False,
            "dropout_p": 0.0,
            "training": self.training,
            "out_proj_weight": self.out_proj.weight,
            "out_proj_bias": self.out_proj.bias,
            "need_weights": False,
        }
        output, _ = F.multi_head_attention_forward(**(arguments | weights | self.changes))
        return output


class Network(nn.Module):
    """Attends from x to y, both (N, L, E), or from the first of each."""

    def __init__(self, *, first: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention, self.first = Attention(**options), first

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
        if self.first:  # without a batch axis
            return self.attention(x[:, 0], y[:, 0]) + x.sum()
        return self.attention(x, y).transpose(0, 1)


class WithPadding(Network):
    """Hides the last keys of each sample."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.attention.changes = {"key_padding_mask": (y[:, :, 0] * 0).bool() | torch.tensor(PADDED)}
        return super().forward(x, y)


class ReadingWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.randn(3 * E, E))
        self.out = nn.Linear(E, E)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        arguments = (E, H, self.part, None, None, None, False, 0.0, self.out.weight, self.out.bias, False)
        x, y = x.transpose(0, 1), y.transpose(0, 1)
        return F.multi_head_attention_forward(x, y, y, *arguments)


class DiscardingWeights(ReadingWeights):
    """As transformers' WavLM does."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        attended, weights = super().forward(x, y)
        weights[:, None].expand(-1, H, -1, -1)
        return attended


def traced(module: nn.Module, route: str = "fx", purpose: Any = "static") -> TracedNetwork:
    """Trace the network; the graph computes the same."""
    torch.manual_seed(0)
    x, y = torch.randn(3, L, E), torch.randn(3, S, E)
    expected = module.eval()(x, y)
    network = trace_network(module, INPUTS, route=route, purpose=purpose)
    torch.testing.assert_close(network.graph(x, y), expected, rtol=1e-4, atol=1e-5)
    return network


def linear_layers(network: TracedNetwork) -> list[str]:
    return [name for name, part in network.graph.named_modules() if type(part) is nn.Linear]


def calls(network: TracedNetwork) -> int:
    return len(network.graph.graph.find_nodes(op="call_function", target=F.multi_head_attention_forward))


MASK = torch.ones(L, S).tril(2).bool()
FORMS: dict[str, Callable[[], nn.Module]] = {
    "layers": Network,
    "layers without biases": lambda: Network(bias=False),
    "packed": lambda: Network(packed=True),
    "packed without biases": lambda: Network(packed=True, bias=False),
    "a mask of truth values": lambda: Network(changes={"attn_mask": ~MASK}),
    "a mask of numbers": lambda: Network(changes={"attn_mask": torch.zeros(L, S).masked_fill(~MASK, -torch.inf)}),
    "padding": WithPadding,
    "no batch axis": lambda: Network(first=True),
    "no batch axis, padding": lambda: Network(first=True, changes={"key_padding_mask": torch.tensor(PADDED)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_linear_layers(form: str) -> None:
    network = traced(FORMS[form]())
    assert calls(network) == 0
    assert len(linear_layers(network)) == 4
    if "packed" not in form:
        assert linear_layers(network) == [f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
    assert network.kept_float == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"add_zero_attn": True},
        {"bias_k": torch.ones(1, 1, E), "bias_v": torch.ones(1, 1, E)},
        {"static_k": torch.ones(2 * H, S, E // H), "static_v": torch.ones(2 * H, S, E // H)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_keys_stay_float(changes: dict[str, Any]) -> None:
    module = Network(changes=changes)
    network = trace_network(module, INPUTS) if "static_k" in changes else traced(module)
    assert calls(network) == 1


def test_weights_that_are_read_stay_float() -> None:
    assert calls(traced(ReadingWeights())) == 1


def test_weights_that_are_not_returned_are_no_reason() -> None:
    assert calls(traced(DiscardingWeights())) == 0


def test_dropout_acts_in_training() -> None:
    torch.manual_seed(0)
    inputs = [spec.to_json() for spec in INPUTS]
    scheme = {"inputs": inputs, "backend": "fbgemm", "weights": "per_channel", "skip": []}
    module = Network(changes={"dropout_p": 0.5})
    training = prepare_qat(module, batch_norm="fold", freeze_at=1.0, **scheme)
    x, y = torch.randn(3, L, E), torch.randn(3, S, E)
    training.train()(x, y)
    assert not torch.equal(training(x, y), training(x, y))
    training.eval()
    assert torch.equal(training(x, y), training(x, y))
