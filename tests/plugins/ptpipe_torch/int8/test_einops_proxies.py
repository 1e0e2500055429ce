"""Networks that call einops: traced into what its functions consist of, for batches of any size.

Shape legend: B images, C channels, H height, W width.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import einops
import pytest
import torch
from einops.layers.torch import EinMix, Rearrange, Reduce
from torch import nn

from ptpipe_torch.int8.tracer import SOURCE_LINE
from ptpipe_torch.int8.tracing import trace_graph

from ....signatures import pictures

SHAPE_CHW = (4, 6, 6)


class Network(nn.Module):
    """Calls a function of itself and the images."""

    def __init__(self, call: Callable[[Any, torch.Tensor], torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.call, self.token = call, nn.Parameter(torch.randn(4))
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        return self.call(self, images_BCHW)


def with_token(n: Any, x: torch.Tensor) -> torch.Tensor:
    x = einops.rearrange(x, "b c h w -> b (h w) c")
    tokens = einops.repeat(n.token, "c -> b 1 c", b=x.shape[0])
    return einops.reduce(torch.cat((tokens, x), 1), "b n c -> b c", "mean")


def packed(n: Any, x: torch.Tensor) -> torch.Tensor:
    tokens = einops.repeat(n.token, "c -> b c", b=x.shape[0])
    joined, shapes = einops.pack([x, x[:, :, 0]], "b c *")
    first, second = einops.unpack(joined, shapes, "b c *")
    return first.mean(3) + second + tokens[..., None]


def halves(n: Any, x: torch.Tensor) -> torch.Tensor:
    one, two = einops.rearrange(x, "b (two c) h w -> two b c h w", two=2)
    return einops.rearrange([one, torch.relu(two)], "two b c ... -> b (c two) ...")


CALLS: dict[str, Callable[[], nn.Module]] = {
    "patches": lambda: Network(lambda n, x: einops.rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=2, q=3)),
    "token": lambda: Network(with_token),
    "packed": lambda: Network(packed),
    "halves": lambda: Network(halves),
    "einsum": lambda: Network(lambda n, x: einops.einsum(x, n.token, "b c h w, c -> b h w")),
    "largest": lambda: Network(lambda n, x: einops.reduce(x, "b c (h 2) (w 2) -> b c h w", "max")),
    "layers": lambda: Network(
        lambda n, x: n.mix(n.pool(n.turn(x))),
        turn=Rearrange("b c h w -> b h w c"),
        pool=Reduce("b (h p) w c -> b h w c", "mean", p=3),
        mix=EinMix("b h w c -> b h w d", weight_shape="c d", bias_shape="d", c=4, d=5),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_graph_is_the_same_function_of_batches_of_any_size(name: str) -> None:
    torch.manual_seed(0)
    network = CALLS[name]().eval()
    graph, _ = trace_graph(network, pictures(SHAPE_CHW), ())
    traced = torch.fx.GraphModule(network, graph)
    assert not [node for node in graph.nodes if "einops" in str(getattr(node.target, "__module__", ""))]
    for num in (1, 5):
        images_BCHW = torch.randn(num, *SHAPE_CHW)
        assert torch.equal(traced(images_BCHW), network(images_BCHW))


def test_nodes_have_the_lines_of_the_network() -> None:
    graph, _ = trace_graph(CALLS["patches"](), pictures(SHAPE_CHW), ())
    lines = [node.meta[SOURCE_LINE] for node in graph.nodes if node.op.startswith("call")]
    assert lines
    assert all("test_einops_proxies.py" in line for line in lines)


def test_einops_keeps_no_traced_network() -> None:
    """It caches what it computes of sizes, under the sizes, which are proxies here."""
    network = CALLS["token"]()
    graph, _ = trace_graph(network, pictures(SHAPE_CHW), ())
    kept = weakref.ref(graph), weakref.ref(network)
    del graph, network
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_einops_computes_tensors_as_before() -> None:
    trace_graph(CALLS["halves"](), pictures(SHAPE_CHW), ())
    assert einops.rearrange(torch.arange(6), "(a b) -> b a", a=2).tolist() == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(RuntimeError, match="Tensor type unknown to einops"):
        einops.rearrange("text", "a -> a")
