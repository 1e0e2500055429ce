"""The training graph against the graph to convert: same state, same values, fewer operators."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ptpipe_quant.fake_quant import ActivationFakeQuant
from ptpipe_quant.transforms import prepare_qat, prepare_static
from ptpipe_torch import TrainingCallback
from ptpipe_torch.int8.observers import is_observer
from ptpipe_torch.torchvision_compat import torchvision
from ptpipe_torch.traced_autocast import has_autocast_regions

from ...signatures import stored_pictures
from .conftest import Mixed, mixed_net, small_net

COMMON = {"inputs": stored_pictures((1, 8, 8)), "weights": "per_channel", "skip": []}
QAT = {"backend": "fbgemm", **COMMON}
STATIC = {"backend": "fbgemm", "observer": "min_max", **COMMON}


def pair(build: Any, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """The training graph and the converting graph of one network."""
    graphs = []
    for training in (True, False):
        torch.manual_seed(seed)
        freeze_at = 1.0 if training else None
        graphs.append(prepare_qat(build(), **QAT, **{"batch_norm": "fold", **options}, freeze_at=freeze_at))
    graphs[1].load_state_dict(graphs[0].state_dict())
    return graphs[0], graphs[1]


def observer_nodes(graph: Any) -> list[Any]:
    return [
        node for node in graph.graph.nodes if node.op == "call_module" and is_observer(graph.get_submodule(node.target))
    ]


def see(graph: Any, *batches: torch.Tensor) -> None:
    graph.train()
    for batch in batches:
        graph(batch)


def freeze(graph: Any) -> None:
    for part in graph.modules():
        if isinstance(part, ActivationFakeQuant):
            part.disable_observer()


def images(seed: int = 1, num: int = 16) -> torch.Tensor:
    return torch.randn(num, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("batch_norm", ["fold", "train"])
@pytest.mark.parametrize("build", [small_net, mixed_net])
def test_both_graphs_give_the_same_logits_after_training(build, batch_norm) -> None:
    quick, standard = pair(build, batch_norm=batch_norm)
    see(quick, images(1), images(2))
    assert quick.state_dict().keys() == standard.state_dict().keys()
    standard.load_state_dict(quick.state_dict())
    quick.eval(), standard.eval()
    with torch.no_grad():
        difference = (quick(images(3, 200)) - standard(images(3, 200))).abs()
    step = quick.get_submodule(observer_nodes(quick)[-1].target).scale
    assert difference.max() <= 2 * step  # batch norm folded in another order rounds a few values to the next integer
    assert (difference > step / 2).float().mean() < (0.001 if batch_norm == "fold" else 0.05)
    assert len(observer_nodes(quick)) < len(observer_nodes(standard))


def test_a_small_network_observes_each_range_once() -> None:
    quick, standard = pair(partial(small_net, dropout=0.5))
    assert len(observer_nodes(standard)) == 9
    assert len(observer_nodes(quick)) == 5  # input, two poolings, two linear layers
    assert not any("first" in node.kwargs for node in observer_nodes(quick))


class Branches(nn.Module):
    """Two branches of which one also goes on alone: its range can't be observed behind the concatenation only."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Conv2d(1, 2, 1), nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(x) * 1
        means = torch.cat([left, right], 1).mean((2, 3)) + torch.cat([self.last(left), left], 1).mean((2, 3))
        return self.head(means)


def test_a_range_of_several_places_advances_once_a_batch() -> None:
    quick, _ = pair(Branches)
    shared = [node for node in observer_nodes(quick) if "first" in node.kwargs]
    targets = {id(quick.get_submodule(node.target)): node.target for node in shared}
    assert targets
    seen: dict[str, list[torch.Tensor]] = {target: [] for target in targets.values()}
    for key, target in targets.items():
        module = quick.get_submodule(target)
        module.register_forward_hook(lambda m, args, out, target=target: seen[target].append(args[0].detach()))
        assert sum(node.kwargs["first"] for node in shared if id(quick.get_submodule(node.target)) == key) == 1
    see(quick, images(1))
    first = {target: quick.get_submodule(target).activation_post_process.max_val.item() for target in seen}
    for tensors in seen.values():
        tensors.clear()
    see(quick, images(2) / 3)
    for target, tensors in seen.items():
        assert len(tensors) > 1
        now = max(tensor.max().item() for tensor in tensors)
        observer = quick.get_submodule(target).activation_post_process
        assert observer.max_val.item() == pytest.approx(first[target] + 0.01 * (now - first[target]), rel=1e-5)


def test_gradients_are_those_of_the_converting_graph() -> None:
    # Without max pooling, where ties among rounded values let the two choose different elements of equal value, and
    # without ReLU6, whose gradient differs for the few values that round to its very ends.
    class NoPooling(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.stem[2] = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.relu(self.block["norm"](self.block["conv"](self.stem(x))) + self.stem(x))
            x = torch.cat([torch.relu(self.left(self.wide(x))), self.right(self.wide(x)).relu()], 1)
            logits_NK: torch.Tensor = self.head(torch.relu(self.hidden(x.mean((2, 3)))))
            return logits_NK

    quick, standard = pair(NoPooling)
    see(quick, images(1))
    standard.load_state_dict(quick.state_dict())
    for graph in (quick, standard):
        freeze(graph)
        F.cross_entropy(graph.train()(images(2)), torch.arange(16) % 10).backward()
    ours, theirs = (dict(graph.named_parameters()) for graph in (quick, standard))
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_relu_waits_for_pooling_with_the_same_gradient() -> None:
    quick, _ = pair(small_net)
    targets = [node.target for node in quick.graph.nodes if node.op != "placeholder"]
    assert targets.count(F.relu) == 2
    x = torch.randn(8, 3, 6, 6)
    early, late = x.clone().requires_grad_(), x.clone().requires_grad_()
    one, other = F.max_pool2d(F.relu(early), 2), F.relu(F.max_pool2d(late, 2), inplace=True)
    assert torch.equal(one, other)
    weights = torch.randn_like(one)
    (one * weights).sum().backward()
    (other * weights).sum().backward()
    assert torch.equal(early.grad, late.grad)


@pytest.mark.parametrize("static", [True, False])
def test_the_range_in_front_of_relu6_ends_where_relu6_does(static) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU6(), nn.Conv2d(4, 2, 1), nn.Flatten())
    nn.init.constant_(net[0].weight, 50.0)
    if static:
        graph = prepare_static(net, **STATIC, calibrating=True)
        graph(images())
        ends = [(part.min_val.item(), part.max_val.item()) for part in graph.children() if is_observer(part)]
    else:
        graph = prepare_qat(net, **QAT, batch_norm="fold", freeze_at=1.0)
        see(graph, images())
        observers = [part.activation_post_process for part in graph.children() if is_observer(part)]
        ends = [(observer.min_val.item(), observer.max_val.item()) for observer in observers]
    assert (0.0, 6.0) in ends
    assert (min(ends)[0], max(ends)[1]) > (-1000, 6)


def test_dropout_works_in_training_and_nowhere_else() -> None:
    quick, standard = pair(partial(small_net, dropout=0.5))
    see(quick, images())
    standard.load_state_dict(quick.state_dict())
    for graph, active in ((quick, True), (standard, False)):
        graph.train()
        freeze(graph)
        torch.manual_seed(1)
        assert torch.equal(graph(images()), graph(images())) is not active
        graph.eval()
        assert torch.equal(graph(images()), graph(images()))


class Block(nn.Module):
    """A block as libraries write them: layers that may be there, and often are not, between dropout and the next."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem, self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.drop, self.norm, self.shortcut = nn.Dropout(dropout), nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.mean(2).flatten(1))
        return self.fc2(self.shortcut(x) + self.norm(self.drop(torch.sigmoid(self.fc1(x)) * 3)))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_tensor_is_rounded_once_whatever_passes_it_on(dropout: float) -> None:
    quick, standard = pair(partial(Block, dropout))
    assert len(observer_nodes(standard)) == 12
    assert len(observer_nodes(quick)) == 8  # input, mean, three layers, sigmoid, product, sum
    assert any(isinstance(part, nn.Dropout) for part in quick.modules()) is (dropout > 0)


def test_ranges_do_not_cover_what_dropout_enlarges() -> None:
    quick, _ = pair(partial(Block, 0.5))
    see(quick, images(1))
    product = next(node for node in quick.graph.nodes if node.name.startswith("mul"))
    (observer,) = product.users
    largest = quick.get_submodule(observer.target).activation_post_process.max_val.item()
    assert 1 < largest <= 3


class Twice(nn.Module):
    """One layer called twice, of which one call alone is pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.pool = nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = self.relu(self.conv(x))
        return self.pool(self.relu(self.conv(once - 1))).flatten(1) + once.mean((2, 3))


def test_a_layer_called_twice_keeps_its_relu() -> None:
    quick, standard = pair(Twice)
    see(quick, images(1), images(2))
    standard.load_state_dict(quick.state_dict())
    with torch.no_grad():
        assert torch.equal(quick.eval()(images(3)), standard.eval()(images(3)))


@pytest.mark.parametrize(("batch_norm", "learned"), [("fold", False), ("train", False), ("train", True)])
def test_a_training_that_was_interrupted_ends_with_the_same_bits(batch_norm, learned) -> None:
    def steps(graph: Any, optimizer: Any, numbers: range) -> None:
        graph.train()
        for number in numbers:
            for callback in [part for part in graph.modules() if isinstance(part, TrainingCallback)]:
                callback.on_progress(number / 8)
            F.cross_entropy(graph(images(number)), torch.arange(16) % 10).backward()
            optimizer.step()
            optimizer.zero_grad()

    def begin() -> tuple[Any, Any]:
        torch.manual_seed(0)
        options = {"batch_norm": batch_norm, "freeze_at": 0.75, "learned_step_size": learned}
        graph = prepare_qat(mixed_net(), **QAT, **options)
        dropout = [part for part in graph.modules() if isinstance(part, nn.Dropout)]
        assert len(dropout) == 1
        dropout[0].p = 0.0  # its random numbers are the trainer's to restore
        return graph, torch.optim.SGD(graph.parameters(), 0.05, momentum=0.9)

    whole, optimizer = begin()
    steps(whole, optimizer, range(8))
    for cut in (3, 7):
        first, optimizer = begin()
        steps(first, optimizer, range(cut))
        second, again = begin()
        second.load_state_dict(first.state_dict())
        again.load_state_dict(optimizer.state_dict())
        steps(second, again, range(cut, 8))
        assert all(torch.equal(value, second.state_dict()[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("batch_norm", ["fold", "train"])
@pytest.mark.parametrize("build", [partial(small_net, dropout=0.5), mixed_net])
def test_learned_ranges_are_those_of_both_graphs(build, batch_norm) -> None:
    quick, standard = pair(build, batch_norm=batch_norm, learned_step_size=True)
    see(quick, images(1), images(2))
    learned = {name: value for name, value in quick.named_parameters() if name.endswith("log_part")}
    trained = [parameter for parameter in learned.values() if parameter.requires_grad]
    with torch.no_grad():
        for number, parameter in enumerate(learned.values()):
            parameter.copy_(-torch.linspace(0.05, 0.3, parameter.numel()) * (1 + number % 3))
    quick(images(4)).logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in trained), "workers would wait for it"
    standard.load_state_dict(quick.state_dict())
    quick.eval(), standard.eval()
    with torch.no_grad():
        difference = (quick(images(3, 200)) - standard(images(3, 200))).abs()
    last = quick.get_submodule(observer_nodes(quick)[-1].target)
    step = last.scale
    assert step < 0.95 * last.activation_post_process.calculate_qparams()[0]
    assert difference.max() <= 2 * step
    assert (difference > step / 2).float().mean() < (0.001 if batch_norm == "fold" else 0.05)


class DenseBlock(nn.Module):
    """Batch norms as in DenseNet, in front of ReLU; one without ReLU; one in a skipped part."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.last_norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 10)
        self.odd = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4))
        self.skipped = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem_norm(self.stem(x))
        y = self.skipped(self.odd(self.conv(torch.relu(self.norm(x)))))
        logits_NK: torch.Tensor = self.head(self.last_norm(torch.cat([x, y], 1)).mean((2, 3)))
        return logits_NK


@pytest.mark.parametrize(("batch_norm", "num_norms"), [("fold", 3), ("train", 5)])
def test_every_batch_norm_freezes(batch_norm, num_norms) -> None:
    options = {**QAT, "skip": ["skipped"], "batch_norm": batch_norm}
    graph = prepare_qat(DenseBlock(), **options, freeze_at=0.5)
    norms = [layer for layer in graph.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == num_norms
    for fraction, moves in ((0.4, True), (0.6, False)):
        graph.train()
        for callback in [part for part in graph.modules() if isinstance(part, TrainingCallback)]:
            callback.on_progress(fraction)
        before = [norm.running_mean.clone() for norm in norms]
        graph(images(1) + 1)
        assert [not torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True)] == [
            moves
        ] * num_norms


def test_every_batch_norm_of_densenet_freezes() -> None:
    graph = prepare_qat(
        torchvision().models.densenet121(),
        **{**QAT, "inputs": stored_pictures((3, 64, 64))},
        batch_norm="fold",
        freeze_at=0.5,
    ).train()
    norms = [layer for layer in graph.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == 62 and all(norm.training for norm in norms)
    for callback in [part for part in graph.modules() if isinstance(part, TrainingCallback)]:
        callback.on_progress(0.5)
    assert not any(norm.training for norm in norms)


class StochasticDepth(nn.Module):
    """A layer that a traced network carries for training: it drops whole samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(torch.full((len(x), 1, 1, 1), 0.5)) / 0.5 if self.training else x


def test_whatever_layer_is_carried_for_training_comes_back() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.drop, self.head = nn.Conv2d(1, 1, 3, padding=1), nn.Identity(), nn.Linear(64, 10)
            self.drop.__dict__["_for_training"] = StochasticDepth()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits_NK: torch.Tensor = self.head((x + self.drop(self.conv(x))).flatten(1))
            return logits_NK

    quick, standard = pair(Residual)
    assert type(quick.get_submodule("drop")) is StochasticDepth
    assert type(standard.get_submodule("drop")) is nn.Identity
    (node,) = [node for node in quick.graph.nodes if node.target == "drop"]
    assert not any(user in observer_nodes(quick) for user in node.users)  # what int8 doesn't have isn't rounded


def test_a_users_own_attribute_called_dropout_is_no_layer() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Identity(), nn.Flatten(), nn.Linear(128, 10))
    net[1].dropout = 0.1  # a float, as in nn.MultiheadAttention and nn.LSTM
    graph = prepare_qat(net, **QAT, batch_norm="fold", freeze_at=1.0)
    assert type(graph.get_submodule("1")) is nn.Identity


class InFloat32(nn.Module):
    """Switches autocast off for a layer, a product and an activation, whose input it converts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            x = F.silu(self.layer(x.float()))
            x = self.attention(x, x, x, need_weights=False)[0] @ self.layer.weight
        return self.head(x.mean(1))


@pytest.mark.parametrize("route", ["fx", "export"])
def test_autocast_is_off_where_the_network_switches_it_off(route) -> None:
    def prepared(freeze_at: float | None) -> Any:
        torch.manual_seed(0)
        network = InFloat32()
        scheme = {"backend": "fbgemm", "weights": "per_channel", "skip": [], "route": route}
        inputs = stored_pictures((3, 4, 4))
        return prepare_qat(network, batch_norm="fold", freeze_at=freeze_at, inputs=inputs, **scheme)

    dtypes: dict[str, torch.dtype] = {}
    network, converting = prepared(1.0).train(), prepared(None)
    for name, layer in network.named_modules():
        if type(layer).__name__ in ("QatLayer", "Linear", "Conv2d") or name in ("stem", "layer", "head"):
            layer.register_forward_hook(lambda _layer, _inputs, output, name=name: dtypes.update({name: output.dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        network(torch.randn(2, 3, 4, 4))
    assert dtypes.pop("stem") == dtypes.pop("head") == torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}
    assert has_autocast_regions(network.graph)
    assert not has_autocast_regions(converting.graph)
    assert network.state_dict().keys() == converting.state_dict().keys()
