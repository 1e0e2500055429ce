"""Networks that look at what their tensors are, as libraries do, traced for batches of any size.

Shape legend: B images, C channels, H height, W width.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F

from ptpipe_torch import BATCH, TensorSpec
from ptpipe_torch.int8.tracing import trace_graph

from ....networks import Applied
from ....signatures import pictures

SHAPE_CHW = (4, 6, 6)
Body = Callable[[torch.Tensor], Any]


class Network(nn.Module):
    """A function of the images behind a convolution."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.conv, self.body = nn.Conv2d(4, 4, 1), body

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        return self.body(self.conv(images_BCHW))


def refusing(x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"got {type(x)}")
    return torch.relu(x)


def asserting(x: torch.Tensor) -> torch.Tensor:
    assert torch.is_tensor(x)
    return torch.relu(x)


def searching(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(next(argument for argument in (None, x) if torch.is_tensor(argument)))


def choosing(x: Any) -> torch.Tensor:
    """Without an answer for the value, the wrong branch is taken without an error."""
    return torch.relu(x) if torch.jit.isinstance(x, torch.Tensor) else -x


def calling(x: Any) -> torch.Tensor:
    return torch.relu(x() if callable(x) else x)


def with_attribute(x: Any) -> torch.Tensor:
    x = x.tensors if hasattr(x, "tensors") else x
    return torch.relu(getattr(x, "last_hidden_state", x))


def with_named_fields(x: Any) -> torch.Tensor:
    found = torch.max(x, 1)
    return found.values + found.indices


def of_several(x: Any) -> torch.Tensor:
    parts = x.chunk(2, 1)
    return torch.cat(parts, 1) if isinstance(parts, tuple) else -x


def of_a_type(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex() or not torch.is_floating_point(x) or x.requires_grad or not x.is_contiguous():
        return -x
    return torch.relu(x)


def by_length(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(len(x), len(x[0]), -1).mean(2)


def as_tensor(x: Any) -> torch.Tensor:
    return torch.as_tensor(torch.relu(x), dtype=torch.float32)


def with_list(x: torch.Tensor) -> torch.Tensor:
    axes = [1] * x.dim()
    axes[1] = -1
    return x * torch.arange(x.size(1)).view(axes)


def with_named_results(x: torch.Tensor) -> torch.Tensor:
    parts = [x[:, number] for number in range(x.shape[1])]
    return x.max(1).values + x.sort(1).values[:, 0] + x.topk(2, 1).indices[:, 0] + parts[0]


def by_equal_shapes(x: torch.Tensor) -> torch.Tensor:
    y = x[..., ::2, ::2]
    if x.shape[2:] != y.shape[2:]:
        y = torch.nn.functional.interpolate(y, size=x.shape[2:])
    if x.shape != y.shape or x.size(0) != y.size(0):
        raise ValueError
    return x + y if x.size() == y.size() else x


def with_numpy_numbers(x: torch.Tensor) -> torch.Tensor:
    return np.sqrt(8) * x + x * np.float32(0.5) - np.int64(2)


def expanding(x: torch.Tensor) -> torch.Tensor:
    """As masks of transformers do: for one sample the branch is not taken, and changes nothing."""
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    if x.shape[0] != positions.shape[0]:
        positions = positions.expand(x.shape[0], -1)
    return x + positions[:, :, None, None] if x.shape[0] * x.shape[1] > 1 else x - x


BODIES: list[Body] = [
    *(refusing, asserting, searching, choosing, calling, with_attribute, with_named_fields, of_several, of_a_type),
    *(by_length, as_tensor, with_list, with_numpy_numbers, with_named_results),
    *(by_equal_shapes, expanding),
]


@pytest.mark.parametrize("body", BODIES)
def test_the_graph_is_the_same_function(body: Body) -> None:
    torch.manual_seed(0)
    network = Network(body).eval()
    graph, _ = trace_graph(network, pictures(SHAPE_CHW), ())
    traced = torch.fx.GraphModule(network, graph)
    with torch.no_grad():
        for num in (1, 5):
            x = torch.randn(num, *SHAPE_CHW)
            assert torch.equal(traced(x), network(x))


class Reader(nn.Module):
    """Reads texts of any length, after a check of their type."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        if not isinstance(tokens_BL, torch.Tensor):
            raise TypeError
        x_BLD = self.embed(tokens_BL)
        num, length, width = x_BLD.shape
        return self.mix(x_BLD.view(num * length, width)).view(num, length, width).mean(1)


def test_other_axes_may_have_any_size_too() -> None:
    network = Reader().eval()
    graph, _ = trace_graph(network, (TensorSpec("tokens", "int64", (BATCH, "length")),), ())
    traced = torch.fx.GraphModule(network, graph)
    for num, length in ((1, 3), (4, 20)):
        tokens_BL = torch.randint(50, (num, length), generator=torch.Generator().manual_seed(0))
        assert torch.equal(traced(tokens_BL), network(tokens_BL))


class Hashing(Reader):
    """Looks up remainders and quotients of the tokens."""

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens_BL % 7) + super().forward(tokens_BL // 7)


def test_remainders_of_values_are_recorded() -> None:
    network = Hashing().eval()
    graph, _ = trace_graph(network, (TensorSpec("tokens", "int64", (BATCH, "length")),), ())
    tokens_BL = torch.randint(50, (4, 20), generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.fx.GraphModule(network, graph)(tokens_BL), network(tokens_BL))


@contextmanager
def unchanged_builtins() -> Iterator[None]:
    before = dict(vars(builtins))
    yield
    assert vars(builtins) == before


@pytest.mark.parametrize("body", [refusing, by_length])
def test_tracing_leaves_python_as_it_was(body: Body) -> None:
    with unchanged_builtins():
        trace_graph(Network(body).eval(), pictures(SHAPE_CHW), ())


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_a_branch_on_the_size_of_the_batch_is_refused(size: int) -> None:
    with pytest.raises(torch.fx.proxy.TraceError):
        trace_graph(Network(lambda x: x + 1 if x.shape[0] == size else x).eval(), pictures(SHAPE_CHW), ())


def only_together(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] < 2:
        raise ValueError("one sample alone")
    return x


def squeezed(x: torch.Tensor) -> torch.Tensor:
    return x[0] if len(x) <= 1 else x


@pytest.mark.parametrize("body", [only_together, squeezed, lambda x: x * 2 if x.shape[0] > 1 else x])
def test_a_branch_that_sets_one_sample_apart_is_refused(body: Body) -> None:
    with pytest.raises(torch.fx.proxy.TraceError):
        trace_graph(Network(body).eval(), pictures(SHAPE_CHW), ())


def test_a_branch_on_an_axis_of_any_size_is_refused() -> None:
    specs = (TensorSpec("signal", "float32", (BATCH, "length")),)
    with pytest.raises(torch.fx.proxy.TraceError):
        trace_graph(Branching().eval(), specs, ())


SIGNAL = (TensorSpec("signal", "float32", (BATCH, "length")),)


def padded_to_even(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 1)) if x.shape[1] % 2 else x * 1


def padded_to_four(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 4 - x.shape[1] % 4)) if x.shape[1] % 4 != 0 else x * 1


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.shape[1] // 20 > 0 else x - 1


def within_a_block(x: torch.Tensor) -> torch.Tensor:
    return x - 1 if x.shape[1] == x.shape[1] % 20 + x.shape[1] // 20 else x + 1


@pytest.mark.parametrize("function", [padded_to_even, padded_to_four, in_blocks, within_a_block])
def test_a_branch_on_a_remainder_or_a_whole_quotient_is_refused(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(torch.fx.proxy.TraceError):
        trace_graph(Applied(function).eval(), SIGNAL, ())


@pytest.mark.parametrize("compare", [operator.gt, operator.lt, operator.ge, operator.le, operator.ne, operator.eq])
def test_a_branch_on_sizes_that_are_always_equal_is_decided(compare: Callable[[Any, Any], Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        missing = x.shape[1] + 1 - F.pad(x, (0, 1)).shape[1]
        return x + 1 if compare(missing, 0) else x - 1

    graph, _ = trace_graph(Applied(function).eval(), SIGNAL, ())
    x = torch.randn(3, 5)
    assert torch.equal(torch.fx.GraphModule(nn.Module(), graph)(x), function(x))


class Positions(nn.Module):
    """Has positions for so many tokens, and a mask of as many."""

    def __init__(self, condition: Callable[[Any, int], Any], *, raises: bool = True, size: int = 24) -> None:
        super().__init__()
        self.condition, self.raises, self.size = condition, raises, size
        self.register_buffer("mask", torch.tril(torch.ones(size, size)))

    def forward(self, signal_BL: torch.Tensor) -> torch.Tensor:
        length = signal_BL.shape[1]
        if self.condition(length, self.size):
            if self.raises:
                raise ValueError(f"{length} values are too many")
            return signal_BL[:, :1]
        number_L = torch.arange(length, device=signal_BL.device)
        return (signal_BL + number_L) @ self.mask[:length, :length]


CONDITIONS: list[Callable[[Any, int], Any]] = [
    *(operator.gt, lambda length, size: length >= size + 1, lambda length, size: not length <= size),
    *(lambda length, size: size < length, lambda length, size: length > size - 4),
]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_branch_that_refuses_sizes_is_decided(condition: Callable[[Any, int], Any]) -> None:
    network = Positions(condition).eval()
    graph, _ = trace_graph(network, SIGNAL, ())
    for length in (1, 5, 20):
        x = torch.randn(2, length)
        assert torch.equal(GraphModule(network, graph)(x), network(x))


def test_a_branch_for_sizes_that_are_taken_is_refused() -> None:
    with pytest.raises(torch.fx.proxy.TraceError):
        trace_graph(Positions(operator.gt, raises=False).eval(), SIGNAL, ())


def test_a_network_of_lengths_in_eights_is_traced() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        blocks = x.reshape(x.shape[0], -1, 8)
        return blocks * len(x[0, :8]) if blocks.dim() == 3 and blocks.shape[2] == 8 else x

    graph, _ = trace_graph(Applied(function).eval(), SIGNAL, ())
    x = torch.randn(3, 24)
    assert torch.equal(torch.fx.GraphModule(nn.Module(), graph)(x), function(x))


class Branching(nn.Module):
    """Treats short signals in another way."""

    def forward(self, signal_BL: torch.Tensor) -> torch.Tensor:
        return signal_BL.mean(1) if signal_BL.shape[1] > 4 else signal_BL.sum(1)


def test_a_loop_over_the_batch_is_refused() -> None:
    def looping(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[number] for number in range(len(x))])

    with unchanged_builtins(), pytest.raises(TypeError, match="interpreted as an integer"):
        trace_graph(Network(looping).eval(), pictures(SHAPE_CHW), ())


def test_a_number_of_parts_that_depends_on_the_batch_is_refused() -> None:
    def splitting(x: torch.Tensor) -> torch.Tensor:
        return x * len(x.split(1))

    with pytest.raises(TypeError, match="depends on the batch size"):
        trace_graph(Network(splitting).eval(), pictures(SHAPE_CHW), ())


class Remembering(nn.Module):
    """Keeps what it computed, which a later forward pass looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last, self.seen, self.by_name, self.others = nn.Linear(4, 4), None, [], {}, []
        self.register_buffer("positions", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) if self.last is None else self.linear(x) + 1
        self.positions = self.positions.to(x.device)
        self.last, self.new = y, y
        self.seen.append(y)
        self.by_name["y"] = y
        self.others.append("a library's hook")
        return y + self.positions


class Looping(nn.Module):
    """Can be traced with sizes alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, number] for number in range(x.shape[1])], 1)


@pytest.mark.parametrize("is_sized", [False, True], ids=["first tracer", "second tracer"])
def test_what_a_forward_pass_keeps_is_not_left_in_the_network(is_sized: bool) -> None:
    network = Remembering().eval()
    positions, tested = network.positions, nn.Sequential(network, *([Looping()] if is_sized else [])).eval()
    inputs = (TensorSpec("x", "float32", (BATCH, 4)),)
    one, other = (trace_graph(tested, inputs, ())[0] for _ in range(2))
    assert str(one) == str(other)
    assert network.positions is positions
    assert (network.last, network.seen, network.by_name) == (None, [], {})
    assert not hasattr(network, "new")
    assert network.others


class Gridded(nn.Module):
    """Makes a table where sizes are others than those of its last call, as heads of detectors do."""

    sizes = None

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        if self.sizes != images_BCHW.shape:
            self.grid = torch.arange(images_BCHW.shape[-1], device=images_BCHW.device) / 4
            self.sizes = images_BCHW.shape
        return self.conv(images_BCHW) + self.grid


def test_sizes_of_the_last_call_are_not_those_of_the_next() -> None:
    network = Gridded().eval()
    graph, _ = trace_graph(network, pictures(SHAPE_CHW), ())
    assert not hasattr(network, "grid")
    images_BCHW = torch.rand(5, *SHAPE_CHW)
    assert torch.equal(GraphModule(network, graph)(images_BCHW), network(images_BCHW))


class Trying(nn.Module):
    """Calls each part with an argument first that only some take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1)) for _ in range(2))

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            try:
                images_BCHW = layer(images_BCHW, lengths=None)
            except TypeError:
                images_BCHW = layer(images_BCHW)
        return images_BCHW


class MadeOfLayers(nn.Module):
    """Puts its layers together in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)])

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        return nn.Sequential(*self.layers)(images_BCHW)


@pytest.mark.parametrize(
    ("network", "layers"),
    [(Trying(), ["layers.0.0", "layers.1.0"]), (MadeOfLayers(), ["layers.0", "layers.1", "layers.2"])],
)
def test_layers_have_the_names_that_the_network_gives_them(network, layers) -> None:
    graph, _ = trace_graph(network, pictures(SHAPE_CHW), ())
    assert [node.target for node in graph.nodes if node.op == "call_module" and node.users] == layers
    x = torch.randn(2, *SHAPE_CHW)
    assert torch.equal(torch.fx.GraphModule(network, graph)(x), network(x))
