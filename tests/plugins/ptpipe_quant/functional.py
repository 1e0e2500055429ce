"""Networks that call functions with weights of their own. All take images of 3x12x12 and return logits of 5 classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .spellings import Net, conv, logits


class Weighted(nn.Module):
    """A module of the user's own with nothing but a weight, and a bias."""

    def __init__(
        self, function: Callable[..., torch.Tensor], *shape: int, num_outputs: int = 0, **options: Any
    ) -> None:
        super().__init__()
        self.function = function
        self.weight = weight(*shape)
        self.bias = weight(num_outputs) if num_outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight, self.bias)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 3)


def net(body: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> nn.Module:
    """Build a network with these parameters and layers."""
    network = Net(body, conv=conv())
    for name, part in parts.items():
        setattr(network, name, part)
    return network


def rows(n: Any, x: torch.Tensor) -> torch.Tensor:
    return F.relu(n.stem(x)).flatten(2).transpose(1, 2)


def of_rows(function: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of the last axis, and a linear layer without a name for that of the classes."""
    return lambda n, x: F.linear(F.relu(function(n, rows(n, x))).mean(1), n.head, n.head_bias)


def linear_net(function: Callable[[Any, torch.Tensor], torch.Tensor], size: int = 8, **parts: Any) -> nn.Module:
    return net(of_rows(function), head=weight(5, size), head_bias=weight(5), **parts)


def of_map(function: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda n, x: logits(n, F.relu(function(n, F.relu(n.stem(x)))))


def attention(n: Any, x: torch.Tensor) -> torch.Tensor:
    query, key, value = F.linear(x, n.packed[:8], n.packed_bias[:8]), x @ n.packed[8:16].t(), x @ n.packed[16:].T
    return torch.softmax(query @ key.transpose(1, 2), 2) @ value


def einsum_attention(n: Any, x: torch.Tensor) -> torch.Tensor:
    query, key, value = (torch.einsum("bnd,dhe->bhne", x, n.packed[part]) for part in range(3))
    scores = torch.einsum("bhqe,bhke->bhqk", query, key)
    return torch.einsum("bhne,hed->bnd", torch.softmax(scores, 3) @ value, n.back)


def one_row(n: Any, x: torch.Tensor) -> torch.Tensor:
    one, two = n.packed.chunk(2)
    return F.linear(x, one) + F.linear(x, two)


def volumes(n: Any, x: torch.Tensor) -> torch.Tensor:
    return logits(n, F.relu(F.conv3d(n.stem(x).unsqueeze(2), n.w, n.b, padding=(0, 1, 1))).squeeze(2))


def sequences(n: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.conv1d(n.stem(x).flatten(2), n.w, stride=2, groups=2)
    return n.fc(F.relu(F.conv_transpose1d(y, n.up, n.up_bias, 3, output_padding=1)).mean(2))


class Blocks(nn.Module):
    """A module with two weights, one of which has a bias behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.offset = weight(8, 12), weight(12, 8), weight(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (F.relu(x.matmul(self.one)) @ self.two + self.offset)


def normalized(n: Any, x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, n.w - n.w.mean((1, 2, 3), keepdim=True), padding=1)


BECOME_LAYERS: Mapping[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "linear": (lambda: linear_net(lambda n, x: F.linear(x, n.w, n.b), w=weight(8, 8), b=weight(8)), ("w", "head")),
    "matmul": (lambda: linear_net(lambda n, x: x @ n.w, 6, w=weight(8, 6)), ("w", "head")),
    "matmul_transposed": (lambda: linear_net(lambda n, x: torch.matmul(x, n.w.t()), w=weight(8, 8)), ("w", "head")),
    "matmul_and_bias": (
        lambda: linear_net(lambda n, x: torch.add(n.b, x.matmul(n.w)), w=weight(8, 8), b=weight(8)),
        ("w", "head"),
    ),
    "addmm": (
        lambda: net(lambda n, x: torch.addmm(n.b, n.stem(x).mean((2, 3)), n.w), w=weight(8, 5), b=weight(5)),
        ("w",),
    ),
    "einsum": (
        lambda: linear_net(lambda n, x: torch.einsum("bnd,dk->bnk", x, n.w) + n.b, w=weight(8, 8), b=weight(8)),
        ("w", "head"),
    ),
    "einsum_of_heads": (
        lambda: linear_net(einsum_attention, packed=weight(3, 8, 2, 4), back=weight(2, 4, 8)),
        ("packed_0", "packed_1", "packed_2", "back", "head"),
    ),
    "einsum_of_channels": (
        lambda: net(of_map(lambda n, x: torch.einsum("dc,bchw->bdhw", n.w, x)), w=weight(8, 8)),
        ("w",),
    ),
    "einsum_of_any_batch": (
        lambda: linear_net(lambda n, x: torch.einsum("...d,kd->...k", x, n.w * n.gain), w=weight(8, 8), gain=weight(8)),
        ("w", "head"),
    ),
    "packed": (
        lambda: linear_net(attention, packed=weight(24, 8), packed_bias=weight(8)),
        ("packed_0", "packed_1", "packed_2", "head"),
    ),
    "chunks": (lambda: linear_net(one_row, packed=weight(16, 8)), ("packed_0", "packed_1", "head")),
    "modules": (
        lambda: linear_net(lambda n, x: n.block(n.own(x)), own=Weighted(F.linear, 8, 8, num_outputs=8), block=Blocks()),
        ("own", "block.one", "block.two", "head"),
    ),
    "list": (
        lambda: linear_net(
            lambda n, x: F.linear(F.linear(x, n.ws[0]), n.ws[1]), ws=nn.ParameterList([weight(8, 8), weight(8, 8)])
        ),
        ("ws.0", "ws.1", "head"),
    ),
    "called_twice": (
        lambda: linear_net(lambda n, x: n.own(F.relu(n.own(x))), own=Weighted(F.linear, 8, 8)),
        ("own", "head", "own_call2"),
    ),
    "conv2d": (
        lambda: net(
            of_map(lambda n, x: F.conv2d(x, n.w, n.b, 2, "valid", groups=4)), w=weight(8, 2, 3, 3), b=weight(8)
        ),
        ("w",),
    ),
    "of_a_layer": (
        lambda: net(of_map(lambda n, x: F.conv2d(input=x, weight=n.conv.weight, bias=n.conv.bias, padding="same"))),
        ("conv",),
    ),
    "conv3d": (lambda: net(volumes, w=weight(8, 8, 1, 3, 3), b=weight(8)), ("w",)),
    "conv1d_and_back": (
        lambda: net(sequences, w=weight(6, 4, 3), up=weight(6, 8, 3), up_bias=weight(8)),
        ("w", "up"),
    ),
    "transposed": (
        lambda: net(of_map(lambda n, x: F.conv_transpose2d(x, n.w, None, 2, 1, 1)), w=weight(8, 8, 3, 3)),
        ("w",),
    ),
    "computed": (lambda: net(of_map(normalized), w=weight(8, 8, 3, 3)), ("w",)),
    "gathered": (
        lambda: linear_net(lambda n, x: F.linear(x, n.w[[0, 1, 2, 3, 0, 1, 2, 3]]), w=weight(4, 8)),
        ("w", "head"),
    ),
}
"""Networks, and the layers that their functions become."""


def embedded(n: Any, x: torch.Tensor) -> torch.Tensor:
    ids = (x[:, :, 0] * 3).long().clamp(0, 7)
    return F.linear(n.table(ids), n.table.weight)


STAY_FLOAT: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "dropped": (
        lambda: linear_net(lambda n, x: F.linear(x, F.dropout(n.w, 0.5, n.training)), w=weight(8, 8)),
        "its weight or bias is computed",
    ),
    "tied": (lambda: linear_net(embedded, table=nn.Embedding(8, 8)), "table.weight is used by something else"),
    "penalized": (
        lambda: linear_net(lambda n, x: F.linear(x, n.w) * n.w.norm(), w=weight(8, 8)),
        "w is used by something else",
    ),
    "other_options": (
        lambda: net(of_map(lambda n, x: F.conv2d(F.conv2d(x, n.w), n.w, padding=1)), w=weight(8, 8, 3, 3)),
        "w is used by something else",
    ),
    "overlapping": (
        lambda: linear_net(lambda n, x: F.linear(x, n.w[:8]) + F.linear(x, n.w[4:]), w=weight(12, 8)),
        "w is used by something else",
    ),
    "from_the_left": (
        lambda: linear_net(lambda n, x: (n.w @ x.transpose(1, 2)).transpose(1, 2), w=weight(8, 8)),
        "is not a matrix",
    ),
}
"""Networks whose function stays float, and why."""

NETWORKS = {name: make for name, (make, _) in (*BECOME_LAYERS.items(), *STAY_FLOAT.items())}


def build(name: str, seed: int = 0) -> nn.Module:
    """Build a network with random weights."""
    torch.manual_seed(seed)
    return NETWORKS[name]().eval()
