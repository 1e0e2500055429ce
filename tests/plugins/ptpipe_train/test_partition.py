"""Split points of a network, balance of the pipeline stages, and that its pieces together are the network.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

from ptpipe import StageError
from ptpipe_quant.transforms import prepare_qat
from ptpipe_torch import RangeObserver, TrainingCallback
from ptpipe_torch.traced_autocast import has_autocast_regions
from ptpipe_train.parallel.partition import (
    TracedNetwork,
    balanced,
    measure_costs_s,
    named_split_points,
    takes_network_input,
    trace_network,
)
from ptpipe_zoo.text_nets import text_transformer

from ...signatures import stored_pictures
from .conftest import Reversed
from .parallel_nets import Branching

CPU = torch.device("cpu")


def next_layers(network: TracedNetwork) -> list[str]:
    return [point.next_layer for point in network.split_points]


def images(num: int = 4, channels: int = 3) -> torch.Tensor:
    return torch.randn(num, channels, 8, 8, generator=torch.Generator().manual_seed(5))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.conv1(x)), inplace=True)
        return F.relu(x + self.conv2(y))


class Residual(nn.Module):
    """A stem, two blocks that are jumped over, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.relu(self.stem(x)))
        return self.fc(x.mean((2, 3)))


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(16, 5),
    )


class Tied(nn.Module):
    """The first and the third layer are one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 4, 1)
        self.shared, self.between, self.fc = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.between(self.shared(self.conv_in(x))))
        return self.fc(x.mean((2, 3)))


class TiedWeights(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x)))


def prepared() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    options = {"inputs": stored_pictures((3, 8, 8)), "weights": "per_channel", "skip": ()}
    return prepare_qat(net, backend="fbgemm", **options, batch_norm="fold", freeze_at=0.8)


class WithFactors(nn.Module):
    """Layers with a factor, by a parameter and by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.gamma, self.head = nn.Parameter(torch.full((4, 1, 1), 0.5)), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = x + self.gamma * self.one(x)
        return self.head((x + 0.2 * self.two(x)).mean((2, 3)))


def prepared_with_factors() -> nn.Module:
    options = {"inputs": stored_pictures((3, 8, 8)), "weights": "per_channel", "skip": (), "scaled_layers": True}
    return prepare_qat(WithFactors(), backend="fbgemm", **options, batch_norm="train", freeze_at=0.8)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "sequential": sequential,
    "residual": Residual,
    "tied": Tied,
    "prepared for int8": prepared,
    "prepared for int8, with factors": prepared_with_factors,
}


# Split points


def test_a_sequence_is_split_between_all_layers_but_those_that_work_in_place() -> None:
    # Before the first parameter and behind the last nothing would be trained.
    assert next_layers(trace_network(sequential())) == ["1", "3", "4", "5", "6", "7", "8"]


def test_no_split_inside_a_residual() -> None:
    network = trace_network(Residual())
    # Before the first layer of each block, the relu behind its sum, and in the head.
    assert next_layers(network) == ["blocks.0.conv1", "relu_2", "blocks.1.conv1", "relu_4", "mean", "fc"]


def test_no_split_between_two_uses_of_a_layer() -> None:
    network = trace_network(Tied())
    assert next_layers(network) == ["shared", "mean", "fc"]


def test_no_split_between_two_uses_of_a_weight() -> None:
    assert next_layers(trace_network(TiedWeights())) == ["three"]


@pytest.mark.parametrize(
    "in_place",
    [
        lambda x: F.relu(x, inplace=True),
        lambda x: F.relu(x, True),
        torch.relu_,
        lambda x: x.relu_(),
        lambda x: x.mul_(2),
        nn.ReLU(inplace=True),
        nn.Hardswish(inplace=True),
        nn.Dropout(0.5, inplace=True),
    ],
    ids=["keyword", "positional", "function", "method", "method with argument", "layer", "hardswish", "dropout"],
)
def test_no_stage_begins_with_what_changes_its_input(in_place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.act = in_place if isinstance(in_place, nn.Module) else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(in_place(self.one(x)) if self.act is None else self.act(self.one(x)))

    network = trace_network(Net())
    assert next_layers(network) == ["two"]
    assert all(cost_s > 0 for cost_s in measure_costs_s(network, images(), CPU))


@pytest.mark.parametrize("default", [None, 7])
def test_arguments_that_get_no_input_keep_their_defaults(default: Any) -> None:
    class Net(nn.Sequential):
        def forward(self, input: Any = default, mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
            value = self[1](self[0](input)).relu()
            value = value if mask is None else value * mask
            return self[2](-value if causal else value)

    module = Net(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 5))
    network = trace_network(module)
    assert network.num_pieces > 1
    assert torch.equal(network.piece(0, network.num_pieces)(images()), module(images()))


def test_control_flow_that_depends_on_values_is_refused() -> None:
    with pytest.raises(
        StageError, match=r"can't be split into pipeline stages: its control flow depends on values .*use mode ddp"
    ):
        trace_network(Branching(192, 5))


@pytest.mark.parametrize("wrap", [lambda x: {"logits": x}, lambda x: (x,)], ids=["dict", "tuple"])
def test_an_output_in_a_container_is_refused(wrap: Callable[[torch.Tensor], Any]) -> None:
    class Wrapped(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x))

    network = Wrapped(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(
        StageError, match="returns its output inside a dict, a list or a tuple; return the tensor itself"
    ):
        trace_network(network)


def test_a_single_layer_cannot_be_split() -> None:
    network = trace_network(nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.Softmax(1)))
    assert (next_layers(network), network.num_pieces) == ([], 1)
    module = network.piece(0, 1)
    assert torch.equal(module(images()), network.module(images()))


def test_a_prepared_network_keeps_its_observers() -> None:
    module = prepared()
    network = trace_network(module)
    watchers = [layer for layer in module.modules() if isinstance(layer, RangeObserver)]
    listeners = [layer for layer in module.modules() if isinstance(layer, TrainingCallback)]
    assert len(watchers) >= 3
    pieces = [network.piece(number, number + 1) for number in range(network.num_pieces)]
    assert len(pieces) >= 3
    for kind, whole in ((RangeObserver, watchers), (TrainingCallback, listeners)):
        inside = [id(layer) for piece in pieces for layer in piece.modules() if isinstance(layer, kind)]
        assert sorted(inside) == sorted(id(layer) for layer in whole)


@pytest.mark.parametrize("name", NETWORKS)
def test_pieces_have_the_very_parameters_under_the_same_names(name: str) -> None:
    module = NETWORKS[name]()
    network = trace_network(module)
    parameters: dict[str, int] = {}
    for number in range(network.num_pieces):
        own = {key: id(parameter) for key, parameter in network.piece(number, number + 1).named_parameters()}
        assert not own.keys() & parameters.keys()
        parameters |= own
    assert parameters == {key: id(parameter) for key, parameter in module.named_parameters()}


@pytest.mark.parametrize("name", NETWORKS)
def test_pieces_in_turn_are_the_network(name: str) -> None:
    """Bit by bit: logits, gradients and buffers, for every number of pipeline stages."""
    torch.manual_seed(0)  # some weights leave a ReLU nothing but zeros
    module = NETWORKS[name]().train()
    network = trace_network(module)
    before = {key: tensor.detach().clone() for key, tensor in module.state_dict().items()}

    def outcome(parts: list[nn.Module]) -> list[torch.Tensor]:
        module.load_state_dict(before)
        module.zero_grad()
        torch.manual_seed(11)  # of dropout
        value = images()
        ends: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in parts:
            received = value.detach().requires_grad_()
            value = part(received)
            ends.append((received, value))
        logits_NK, gradient = value.detach(), torch.cos(value).detach()
        for received, sent in reversed(ends):
            sent.backward(gradient)
            assert received.grad is not None
            gradient = received.grad
        grads = [parameter.grad for parameter in module.parameters()]
        assert all(grad is not None and grad.abs().sum() > 0 for grad in grads[-2:])
        buffers = [buffer.detach().clone() for buffer in module.buffers()]
        return [logits_NK, gradient, *(grad.clone() for grad in grads if grad is not None), *buffers]

    whole = outcome([module])
    last = network.num_pieces
    for num_cuts in range(1, last):
        # The first and the last of the possible partitions, and the finest.
        every = list(combinations(range(1, last), num_cuts))
        for cuts in {every[0], every[-1]}:
            parts = [network.piece(*bounds) for bounds in pairwise([0, *cuts, last])]
            for one, other in zip(whole, outcome(parts), strict=True):
                assert torch.equal(one, other)


# Where the user wants it


@pytest.mark.parametrize(
    ("names", "firsts"),
    [(["4"], [3]), (["1", "8"], [1, 7]), (["1", "3", "4", "5", "6", "7", "8"], [1, 2, 3, 4, 5, 6, 7]), ([], [])],
)
def test_named_split_points(names: list[str], firsts: list[int]) -> None:
    network = trace_network(sequential())
    assert named_split_points(network, names) == firsts
    for name, first in zip(names, firsts, strict=True):
        assert next(iter(network.piece(first, first + 1).graph.nodes)).next.target == name


def test_the_name_of_a_group_of_layers_is_its_first_layer() -> None:
    network = trace_network(Residual())
    assert named_split_points(network, ["blocks"]) == named_split_points(network, ["blocks.0"]) == [1]
    (second,) = named_split_points(network, ["blocks.1"])
    assert next_layers(network)[second - 1] == "blocks.1.conv1"


@pytest.mark.parametrize("name", ["2", "0", "conv", "block", ""])
def test_a_name_that_no_stage_can_begin_with(name: str) -> None:
    with pytest.raises(StageError) as caught:
        named_split_points(trace_network(sequential()), [name])
    assert str(caught.value) == (
        f"split_at: no pipeline stage can begin with {name} (possible split points: 1, 3, 4, 5, 6, 7, 8)"
    )


@pytest.mark.parametrize("names", [["4", "1"], ["4", "4"], ["1", "8", "4"]])
def test_names_out_of_order_or_twice(names: list[str]) -> None:
    with pytest.raises(StageError, match="in the order of the network, each once"):
        named_split_points(trace_network(sequential()), names)


# By cost


def max_cost(costs: list[float], firsts: list[int]) -> float:
    return max(sum(costs[first:end]) for first, end in pairwise([0, *firsts, len(costs)]))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=9), st.data())
def test_no_other_partition_is_better_balanced(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    firsts = balanced(costs, num_stages)
    assert len(firsts) == num_stages - 1
    assert firsts == sorted(set(firsts))
    assert all(0 < first < len(costs) for first in firsts), "no stage is empty"
    floats = [float(cost) for cost in costs]
    minimum = min(max_cost(floats, list(cuts)) for cuts in combinations(range(1, len(costs)), num_stages - 1))
    assert max_cost(floats, firsts) == minimum


def test_balanced_by_hand() -> None:
    assert balanced([1, 2, 3, 4, 5, 6, 7, 8, 9], 3) == [5, 7]  # Skiena's example: 15, 13, 17
    assert balanced([9, 1, 1, 1], 2) == [1]
    assert balanced([1.0], 1) == []


@pytest.mark.parametrize("name", NETWORKS)
def test_measuring_costs_leaves_no_trace(name: str) -> None:
    module = NETWORKS[name]().train()
    next(layer for layer in module.modules() if not list(layer.children())).eval()  # one is frozen
    network = trace_network(module)
    state = {key: tensor.detach().clone() for key, tensor in module.state_dict().items()}
    modes = [layer.training for layer in module.modules()]
    inputs = images()
    costs_s = measure_costs_s(network, inputs, CPU)
    assert len(costs_s) == network.num_pieces
    assert all(0 < cost_s < 10 for cost_s in costs_s)
    after = module.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in state.items())
    assert [layer.training for layer in module.modules()] == modes
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not inputs.requires_grad
    assert torch.equal(inputs, images())


def test_costs_distinguish_a_large_layer_from_a_small_one() -> None:
    module = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 128, 7, padding=3), nn.Conv2d(128, 2, 1))
    network = trace_network(module)
    costs_s = measure_costs_s(network, images(num=16), CPU)
    assert costs_s[1] == max(costs_s)


def test_a_graph_module_is_taken_as_it_is() -> None:
    traced = fx.symbolic_trace(sequential())
    assert trace_network(traced).graph is traced.graph


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x) * self.scale) * self.scale)


def test_no_split_between_two_uses_of_a_parameter() -> None:
    assert next_layers(trace_network(Scaled())) == ["mul", "three"]


def test_no_split_between_two_uses_of_statistics() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8, affine=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.three(self.norm(self.two(self.norm(self.one(x)))))

    assert next_layers(trace_network(Net())) == ["norm", "three"]


def test_what_hands_its_input_on_begins_no_stage_where_it_is_changed_later() -> None:
    layers = (nn.Linear(8, 8), nn.Identity(), nn.Dropout(0.1), nn.ReLU(inplace=True), nn.Linear(8, 8))
    network = trace_network(nn.Sequential(*layers))
    assert next_layers(network) == ["4"]
    assert all(cost_s > 0 for cost_s in measure_costs_s(network, images(), CPU))


class Parts(nn.Module):
    """Its second layer gives two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.two(self.one(x)).chunk(2, 1)
        return self.three(first + second)


def test_a_stage_never_begins_with_several_tensors() -> None:
    assert next_layers(trace_network(Parts())) == ["two", "chunk", "three"]


class Changing(nn.Module):
    """The output of the first layer is modified in place, by the given function."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.change = nn.Linear(6, 8), nn.Linear(8, 3), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.change(self.one(x)))


def through_a_view(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x.unflatten(1, (2, 4)).transpose(1, 2), inplace=True).transpose(1, 2).flatten(1)


def beside_another(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    return F.relu(x, True) + y


@pytest.mark.parametrize("change", [through_a_view, beside_another])
def test_no_stage_begins_where_its_input_would_be_modified(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    network = trace_network(Changing(change))
    assert all(point.node.name != "one" for point in network.split_points)
    assert network.num_pieces > 1
    value = torch.randn(5, 6)
    for number in range(network.num_pieces):
        value = network.piece(number, number + 1)(value.detach().requires_grad_())
        value.sum().backward()


class Counting(nn.Module):
    """Counts its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.two(self.one(x))


def test_a_network_that_changes_its_own_state_is_refused() -> None:
    with pytest.raises(StageError, match="its forward pass assigns count"):
        trace_network(Counting())


def test_functions_with_a_gradient_of_their_own_keep_it() -> None:
    network = trace_network(Changing(Reversed.apply))
    graph = torch.fx.GraphModule(network.module, network.graph)
    x = torch.randn(5, 6)
    gradients = []
    for computed in (network.module, graph):
        gradients += torch.autograd.grad(computed(x).sum(), [network.module.one.weight])
    assert torch.equal(*gradients)


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return F.relu(x)


def test_parts_without_gradients_are_refused() -> None:
    with pytest.raises(StageError, match=r"computes relu without gradients \(torch.no_grad\)"):
        trace_network(Changing(without_gradients))


class WithoutAutocast(nn.Sequential):
    """Switches autocast off for its first layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self[0](x)
        return self[1](x)


def test_regions_without_autocast_are_refused_where_it_is_used() -> None:
    network = WithoutAutocast(nn.Linear(6, 8), nn.Linear(8, 3))
    with pytest.raises(StageError, match="switches autocast off, which pieces of it don't; use mode ddp, or precision"):
        trace_network(network, uses_autocast=True)
    traced = trace_network(network)
    assert [point.next_layer for point in traced.split_points] == ["1"]
    assert not has_autocast_regions(traced.graph)


class Positions(nn.Module):
    """Computes something of its input and a buffer without gradients, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("frequencies", torch.ones(8))

    @torch.no_grad()
    def angles(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x[:, :1]) * self.frequencies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x) * self.angles(x))


def test_what_has_no_gradient_in_any_case_is_accepted() -> None:
    assert trace_network(Positions()).num_pieces > 1


# Networks of token ids, whose layers all use a mask that is computed from the ids


def transformer() -> nn.Module:
    sizes = {"vocabulary_size": 30, "max_length": 9, "padding_id": 0, "num_outputs": 3, "per_token": False}
    options = {"dim": 8, "num_layers": 2, "num_heads": 2, "feed_forward_dim": 16, "dropout": 0.0}
    return text_transformer(**sizes, **options, pooling="mean", causal=False)


def tokens() -> torch.Tensor:
    ids_BL = torch.randint(1, 30, (4, 9), generator=torch.Generator().manual_seed(5))
    return ids_BL * (torch.arange(9) < torch.tensor([9, 4, 1, 0])[:, None])


def test_a_mask_computed_from_the_input_does_not_prevent_splits() -> None:
    network = trace_network(transformer())
    layers = [f"layers.{number}.{norm}" for number in (0, 1) for norm in ("attention_norm", "feed_forward_norm")]
    assert set(layers) <= set(next_layers(network))
    pieces = [network.piece(number, number + 1) for number in range(network.num_pieces)]
    assert any(map(takes_network_input, pieces)) and not all(map(takes_network_input, pieces))


def test_pieces_that_take_the_networks_input_are_together_the_network() -> None:
    module = transformer()
    network = trace_network(module)
    expected = module(tokens())
    for firsts in combinations(range(1, network.num_pieces), 2):
        value = tokens()
        for first, end in pairwise([0, *firsts, network.num_pieces]):
            piece = network.piece(first, end)
            value = piece(value, tokens()) if takes_network_input(piece) else piece(value)
        assert value.equal(expected), firsts
    costs_s = measure_costs_s(network, tokens(), CPU)
    assert len(costs_s) == network.num_pieces and min(costs_s) > 0
    assert not [name for name, parameter in module.named_parameters() if parameter.grad is not None]


class FromTheInput(nn.Module):
    """Two layers, the second of which gets a function of the input as well."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = self.function(x)
        return self.two(self.one(x) + other)


@pytest.mark.parametrize(
    ("function", "is_computed_twice"),
    [
        (lambda x: x.abs() * 2, True),
        (F.dropout, False),
        (torch.rand_like, False),
        (lambda x: x.abs().mul_(2), False),
        (lambda x: x.add_(1).abs(), False),
    ],
)
def test_what_is_random_or_modified_is_not_computed_twice(function: Any, is_computed_twice: bool) -> None:
    assert next_layers(trace_network(FromTheInput(function))) == (["add", "two"] if is_computed_twice else ["two"])
