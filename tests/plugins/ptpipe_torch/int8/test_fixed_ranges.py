"""A tensor that goes beyond the range of a sigmoid or tanh is never put on their grid."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import disable_fake_quant
from torch.fx import Interpreter, Node

from ptpipe_quant.int8_parity import compare_with_reference
from ptpipe_quant.transforms import prepare_qat, prepare_static, to_int8
from ptpipe_torch.int8.engine import quantized_engine, supported_engines
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_torch.int8.observers import is_observer, observes_range
from ptpipe_torch.int8.read_ranges import read_range

from ....signatures import stored_pictures

BACKENDS = [backend for backend in ("fbgemm", "qnnpack") if backend in supported_engines()]
INPUT_SHAPE_CHW = (3, 12, 12)


class Net(nn.Module):
    """Convolutions with values of some -8 to 8, joined by `join`."""

    def __init__(self, join: Callable[[Any, torch.Tensor], torch.Tensor], channels: int) -> None:
        super().__init__()
        self.join = join
        self.stem, self.conv, self.sigmoid = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid()
        self.last, self.fc = nn.Conv2d(channels, 8, 1), nn.Linear(8, 5)
        for layer in (self.stem, self.conv):
            layer.weight.data *= 6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits_NK: torch.Tensor = self.fc(self.last(self.join(self, self.stem(x))).mean((2, 3)))
        return logits_NK


def gate(_net: Any, x: torch.Tensor) -> torch.Tensor:
    value, factor = x.chunk(2, 1)
    return value * factor.sigmoid()


def slices(_net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x[:, :4]) * x[:, 4:]


def float_with_two_readers(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.abs() - 1  # no int8 form
    return net.conv(x) * torch.sigmoid(x)


def sigmoid_first(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.sigmoid(), net.conv(x)], 1)


def layer_first(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([net.sigmoid(x), net.conv(x)], 1)


def sigmoid_last(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([net.conv(x), x.sigmoid()], 1)


def sigmoid_and_tanh(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.sigmoid(), net.conv(x).tanh()], 1)


def reshaped(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The sizes of the reshape are inputs of it too, but have no range."""
    x = net.conv(x).tanh()
    return x.reshape(x.shape[0], -1).clone().view(x.shape).sigmoid()


def shuffled(_net: Any, x: torch.Tensor) -> torch.Tensor:
    """One half passes, as in shufflenet: it is on the grid of the concatenation."""
    first, second = x.chunk(2, 1)
    return torch.cat([first, second * second], 1)


def moved_and_joined(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer reads what is moved, too, as in a U-Net."""
    moved = x.transpose(2, 3)
    return torch.cat([net.conv(moved), moved], 1)


NETWORKS = {
    reshaped: 8, gate: 4, slices: 4, float_with_two_readers: 8, sigmoid_first: 16, layer_first: 16, sigmoid_last: 16,
    sigmoid_and_tanh: 16, shuffled: 8, moved_and_joined: 16,
}  # fmt: skip


def build(join: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(join, NETWORKS[join]).eval()


def prepared(network: nn.Module, backend: str, *, qat: bool, converting: bool) -> Any:
    options = {"inputs": stored_pictures(INPUT_SHAPE_CHW), "weights": "per_channel", "skip": ()}
    options |= {"backend": backend, "narrow_weights": backend == "fbgemm"}
    if qat:
        return prepare_qat(copy.deepcopy(network), **options, batch_norm="fold", freeze_at=None if converting else 1.0)
    return prepare_static(copy.deepcopy(network), **options, observer="min_max", calibrating=not converting)


class Grids(Interpreter):
    """Runs a prepared network in float, and records by how many steps each tensor exceeds its grid."""

    def __init__(self, prepared: Any) -> None:
        super().__init__(prepared)
        self.excess: dict[str, float] = {}

    def run_node(self, n: Node) -> Any:
        observer = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if observer is None or not is_observer(observer):
            return super().run_node(n)
        value = self.fetch_args_kwargs_from_env(n)[0][0]
        scale, zero_point = (float(number) for number in observer.calculate_qparams())
        steps = value.clamp(*read_range(self.module, n)) / scale + zero_point
        beyond = torch.maximum(steps - getattr(observer, "quant_max", 255), -steps)
        self.excess[n.all_input_nodes[0].name] = beyond.max().item()
        return value


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qat", [False, True])
@pytest.mark.parametrize("join", NETWORKS)
def test_nothing_saturates(join, qat, backend) -> None:
    network = build(join)
    x = 2 * torch.randn(6, *INPUT_SHAPE_CHW, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings(action="ignore"), quantized_engine(backend), torch.no_grad():
        observed = prepared(network, backend, qat=qat, converting=False).train(qat).apply(disable_fake_quant)
        observed(x)
        networks = [prepared(network, backend, qat=qat, converting=True) for _ in range(3)]
        for standard in networks:
            standard.load_state_dict(observed.state_dict())
        grids = Grids(networks[0].eval())
        grids.run(x)
        difference = compare_with_reference(to_int8(networks[1], backend=backend), networks[2], [x])
    assert max(grids.excess.values()) <= 1.01, grids.excess
    assert not difference.missing
    assert difference.worst is not None
    assert difference.worst.max_steps <= 1.01


def pooled(_net: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.max_pool2d(x.sigmoid(), 2)


def joined(_net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.sigmoid(), (x - 1).sigmoid()], 1)


@pytest.mark.parametrize(
    ("join", "channels", "fixed"),
    [(pooled, 8, ["sigmoid", "max_pool2d"]), (joined, 16, ["sigmoid", "sigmoid_1", "cat"])],
)
def test_results_of_a_sigmoid_stay_on_its_grid(join, channels, fixed) -> None:
    with warnings.catch_warnings(action="ignore"):
        graph = prepared(Net(join, channels), BACKENDS[0], qat=False, converting=True)
    found = []
    for node in graph.graph.find_nodes(op="call_module"):
        layer = graph.get_submodule(node.target)
        if is_observer(layer) and not observes_range(layer):
            found.append(node.all_input_nodes[0].name)
    assert found == fixed


def pieces(_net: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, 1)
    return first * second + x[:, :4]


def observers(join: Any, channels: int, backend: str, *, qat: bool) -> dict[str, nn.Module]:
    """Return the observer of each tensor by the name of its node."""
    with warnings.catch_warnings(action="ignore"):
        graph = prepared(Net(join, channels), backend, qat=qat, converting=True)
    called = graph.graph.find_nodes(op="call_module")
    observers = {node.all_input_nodes[0].name: graph.get_submodule(node.target) for node in called}
    return {name: observer for name, observer in observers.items() if is_observer(observer)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qat", [False, True])
def test_what_is_moved_keeps_its_grid_where_a_layer_reads_it(qat: bool, backend: str) -> None:
    found = observers(moved_and_joined, 16, backend, qat=qat)
    assert found["transpose"] is found["stem"]
    (joined,) = (observer for name, observer in found.items() if name.startswith("activation_post_process"))
    assert joined is found["conv"] is found["cat"] is not found["stem"]


class SpaceToDepth(nn.Module):
    """Two layers read the network's input, moved."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = nn.Conv2d(12, 8, 3), nn.Conv2d(12, 8, 3), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 3, 6, 2, 6, 2).permute(0, 1, 3, 5, 2, 4).reshape(-1, 12, 6, 6)
        return self.fc((self.one(x) + self.two(x)).mean((2, 3)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qat", [False, True])
def test_layers_observe_an_input_that_is_moved(qat: bool, backend: str) -> None:
    graph = prepared(SpaceToDepth(), backend, qat=qat, converting=True)
    (one, two) = (graph.graph.find_nodes(op="call_module", target=name)[0] for name in ("one", "two"))
    assert one.args == two.args
    assert is_observer(graph.get_submodule(one.args[0].target))
    x = torch.randn(4, *INPUT_SHAPE_CHW)
    graph.train(qat)(x)
    with quantized_engine(backend):
        int8 = to_int8(copy.deepcopy(graph), backend=backend)
        assert has_int8_weights(int8.one)
        assert has_int8_weights(int8.two)
        layers = compare_with_reference(int8, graph.eval(), [x]).layers
    assert layers and all(layer.max_steps <= 1 for layer in layers)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qat", [False, True])
def test_pieces_have_the_grid_of_the_whole(qat: bool, backend: str) -> None:
    found = observers(pieces, 4, backend, qat=qat)
    assert {found["getitem"], found["getitem_1"], found["getitem_2"]} == {found["stem"]}
    found = observers(shuffled, 8, backend, qat=qat)
    assert found["getitem_1"] is found["stem"]
    assert found["getitem"] is found["cat"] is not found["stem"], "a concatenation has one grid"
