"""In-place operators: what is refused, and which line is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe import StageError
from ptpipe_quant.trace import trace_network

from ...signatures import pictures
from .spellings import INPUT_SHAPE_CHW, Net, conv, logits


def graph_of(network: nn.Module, **options: Any) -> Any:
    return trace_network(network, pictures(INPUT_SHAPE_CHW), **options).graph


def through_a_view(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(x)
    flat = x.view(x.size(0), -1)
    flat.relu_()
    return logits(n, x)


def copied_into(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(x)
    part = x[:, 0]
    part.zero_()
    return logits(n, x) + part.mean()


def without_another_form(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = n.stem(x)
    x.copy_(n.conv(x))
    return logits(n, x)


@pytest.mark.parametrize("body", [through_a_view, copied_into, without_another_form])
def test_an_effect_that_would_be_lost_is_refused_with_its_line(body) -> None:
    with pytest.raises(StageError, match=r"test_functionalize.py:\d+: `.*_\(.*\)` changes a tensor in place"):
        graph_of(Net(body, conv=conv()))


def test_an_effect_of_a_layer_left_float_is_refused() -> None:
    class Changing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu_(x) if x.sum() > -1e9 else x

    def seen(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.stem(x)
        return logits(n, n.odd(x) + x)

    def unseen(n: Any, x: torch.Tensor) -> torch.Tensor:
        return logits(n, n.odd(n.stem(x)))

    with pytest.raises(StageError, match="changes a tensor in place"):
        graph_of(Net(seen, odd=Changing()), leaves=["odd"])
    assert "odd" in dict(graph_of(Net(unseen, odd=Changing()), leaves=["odd"]).named_modules())


def test_no_in_place_operator_is_left() -> None:
    def many(n: Any, x: torch.Tensor) -> torch.Tensor:
        size = x.size(0)
        size *= 2
        x = n.stem(x).add_(1).clamp_(min=0)
        x -= 1
        x /= 2
        return logits(n, F.hardtanh_(torch.tanh_(x))) * size

    x, network = torch.randn(3, *INPUT_SHAPE_CHW), Net(many).eval()
    expected = network(x.clone())
    graph = graph_of(network)
    names = [getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes]
    assert not [name for name in names if name.endswith("_") or name.startswith(("isub", "itruediv", "imul"))]
    torch.testing.assert_close(graph(x.clone()), expected)


def test_parts_of_a_tensor_are_updated_out_of_place() -> None:
    def updating(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.stem(x)
        y = x + 1
        y[..., 0] += 1
        y[:, 1:, ::2] *= x.mean()
        y[:, 0] /= 2
        return logits(n, y - x)

    graph = graph_of(Net(updating))
    network = Net(updating).eval()
    network.load_state_dict(graph.state_dict())
    x = torch.randn(3, *INPUT_SHAPE_CHW)
    assert torch.equal(graph(x.clone()), network(x.clone()))


def test_parts_of_a_tensor_are_assigned_out_of_place() -> None:
    def assigning(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.stem(x)
        y = x.new_empty(x.shape)
        y[:, :4].copy_(x[:, 4:])
        y[:, 4:].fill_(x.mean())
        y[:, 0, ::2].zero_()
        y[:, 1:2].copy_(x[:, :1] > 0)
        y[y > 100].zero_()  # of a copy, which nothing reads
        y[[0, 1]].fill_(7)
        x.split(4, 1)[0].zero_()
        return logits(n, y)

    graph = graph_of(Net(assigning))
    network = Net(assigning).eval()
    network.load_state_dict(graph.state_dict())
    x = torch.randn(3, *INPUT_SHAPE_CHW)
    with torch.no_grad():  # parts of several outputs may not be changed with gradients
        assert torch.equal(graph(x.clone()), network(x.clone()))


def test_an_updated_part_that_is_used_again_is_refused() -> None:
    def using(n: Any, x: torch.Tensor) -> torch.Tensor:
        x = n.stem(x)
        part = x[:, 0]
        part += 1
        x[:, 0] = part
        return logits(n, x) + part.mean()

    with pytest.raises(StageError, match="changes a tensor in place"):
        graph_of(Net(using))


def test_a_network_that_fails_on_its_images_is_refused_with_its_line() -> None:
    def wrong(n: Any, x: torch.Tensor) -> torch.Tensor:
        return n.fc(n.stem(x).flatten(1))

    with pytest.raises(StageError, match=r"test_functionalize.py:\d+: `return n.fc.*fails on inputs of shape \(2, 3"):
        graph_of(Net(wrong))


def test_images_of_a_size_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(StageError, match="too large"):
        trace_network(Net(logits), pictures((1 << 20, 1 << 20, 8)))
