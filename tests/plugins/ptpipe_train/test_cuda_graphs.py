"""Trainings whose passes are CUDA graphs: the same bits as without, and passes that are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from ptpipe_quant import PrepareQatConfig, prepare_qat
from ptpipe_torch import ArrayColumn, Classification, Data, FunctionRef, Model, Regression, Split, builder
from ptpipe_train.cuda_graphs import NetworkState

from .conftest import NUM_CLASSES, SIDE, Lab, Reversed, Trained, assert_same_bits
from .device_nets import NETWORKS

EXACT = {"epochs": 3, "lr": 0.05, "device": "cuda"}


class Changing(nn.Module):
    """A layer that changes what it is told to."""

    def __init__(self, change: Callable[[Changing], object] = lambda layer: None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(1))
        self.rate, self.offset, self.change = 0.5, torch.zeros(1), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        y: torch.Tensor = self.linear(x) * self.scale + self.offset
        return y


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda layer: setattr(layer, "rate", layer.rate / 2), "0.rate"),
        (lambda layer: layer.linear.train(not layer.linear.training), "0.linear.training"),
        (lambda layer: setattr(layer, "offset", layer.offset + 1), "0.offset"),
        (lambda layer: setattr(layer, "scale", layer.scale + 1), "0.scale"),
        (lambda layer: layer.scale.add_(1), None),
    ],
    ids=["number", "mode", "tensor", "buffer", "values"],
)
def test_a_network_tells_what_each_pass_changes(change: Callable[[Changing], object], found: str | None) -> None:
    network = nn.Sequential(Changing(change))
    network(torch.zeros(1, 2))
    state = NetworkState(network)
    before = state.current()
    kept = [network[0].offset, network[0].scale]  # so that nothing new comes to lie where they were
    network(torch.zeros(1, 2))
    assert state.changed_since(before) == found, kept


def test_on_a_cpu_there_is_no_graph(lab: Lab) -> None:
    assert "cuda_graph_replays" not in lab.train(lab.make_model(), lab.make_data(), device="cpu").metrics


def with_and_without(
    lab: Lab, model: Model, teacher: Model | None = None, data: Data | None = None, **options: Any
) -> tuple[Trained, Trained]:
    """Train with and without graphs."""
    data = data or lab.make_data(100, num_val=20)
    graph, plain = (
        lab.train_afresh(model, data, teacher, **EXACT | options, cuda_graphs=cuda_graphs)
        for cuda_graphs in (True, False)
    )
    assert_same_bits(graph.model, plain.model)
    assert "cuda_graph_replays" not in plain.metrics
    return graph, plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 3},
        {"optimizer": "adamw", "clip_grad_norm": 0.5},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"ema": {"decay": 0.9}},
        {"mixup_alpha": 0.4, "cutmix_alpha": 0.4, "label_smoothing": 0.1},
        {"pruning": {"amount": 0.5, "begin": 0, "end": 5, "every": 1}},
        {"freeze": ["0.*"], "lr_factors": {"6.*": 0.5}},
        {"early_stopping": {"patience": 1}},
        {"profile": {"steps": 2}},
        {"drop_last": True},
    ],
    ids=str,
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_option_gives_the_same_bits(lab: Lab, options: dict[str, Any]) -> None:
    graph, _ = with_and_without(lab, lab.make_model(norm=True, dropout=0.3), **options)
    assert graph.metrics["cuda_graph_replays"] > 8, graph.log


@pytest.mark.parametrize(
    "options", [{}, {"batch_norm": "fold"}, {"freeze_at": 0.5}, {"weights": "per_tensor"}], ids=str
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_quantization_aware_training_gives_the_same_bits(lab: Lab, options: dict[str, Any], precision: str) -> None:
    config = PrepareQatConfig.model_validate({"backend": "fbgemm", **options})
    prepared = prepare_qat(config, lab.context(), lab.make_model(norm=True))
    graph, _ = with_and_without(lab, prepared, precision=precision, lr=0.005)
    assert graph.metrics["cuda_graph_replays"] > 8, graph.log


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_teacher_gives_the_same_bits(lab: Lab) -> None:
    teacher = lab.train_afresh(lab.make_model(norm=True), lab.make_data(100), device="cpu").model
    options = {"features": {"6": "6"}, "weight": 0.5}
    graph, _ = with_and_without(lab, lab.make_model(norm=True), teacher, distillation=options, lr=0.01)
    assert graph.metrics["cuda_graph_replays"] > 8, graph.log


@pytest.mark.parametrize("task", ["weighted classes", "regression"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_loss_with_constants_gives_the_same_bits(lab: Lab, task: str) -> None:
    data = lab.make_data(100, num_val=20)
    if task == "weighted classes":
        weighted = Classification(class_names=tuple("abcd"), class_weights=(1.0, 2.0, 0.5, 1.0))
        data = Data(replace(data.info, task=weighted), data.splits, data.loader)
        graph, _ = with_and_without(lab, lab.make_model(norm=True), data=data)
    else:
        numbers = Regression(target_names=tuple("abcd"), mean=(0.0,) * 4, std=(1.0, 2.0, 3.0, 4.0))
        info = replace(data.info, task=numbers)
        splits = {
            name: Split(split.ids, split.inputs, {"targets": ArrayColumn(one_hot(split))})
            for name, split in data.splits.items()
        }
        recipe = replace(lab.make_model(norm=True).recipe, signature=info.signature)
        model = Model.from_module(recipe, lab.make_model(norm=True).build())
        graph, _ = with_and_without(lab, model, data=Data(info, splits, data.loader))
    assert graph.metrics["cuda_graph_replays"] > 8, graph.log


def one_hot(split: Split) -> npt.NDArray[np.float32]:
    return np.eye(NUM_CLASSES, dtype=np.float32)[split.targets["labels"].values()]


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_precisions_are_timed_as_they_are_trained(lab: Lab, monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool) -> None:
    """In `precision: auto`; the bits are those of the precision that it takes."""
    replays: list[str] = []
    replay = torch.cuda.CUDAGraph.replay

    def noted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append("replay")
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", noted)
    options = EXACT | {"cuda_graphs": cuda_graphs}
    model, data = lab.make_model(norm=True, dropout=0.5), lab.make_data(100)
    auto = lab.train_afresh(model, data, **options, precision="auto")
    num_timed = len(replays) - auto.metrics.get("cuda_graph_replays", 0)
    assert num_timed >= 4 if cuda_graphs else num_timed == 0
    assert_same_bits(auto.model, lab.train_afresh(model, data, **options, precision=auto.metrics["precision"]).model)


@builder
def waiting_net() -> nn.Module:
    """A network that reads a value back."""
    return Peculiar(lambda layer, x: x * (2.0 if x.mean().item() > 0 else 1.0))


@builder
def selecting_net() -> nn.Module:
    """A network whose loss is that of the rows that it selects."""
    return Peculiar(lambda layer, x: x.index_put((x.flatten(1).sum(1) > 0).nonzero(as_tuple=True), x.new_zeros(())))


@builder
def drawing_net() -> nn.Module:
    """A network that drops its input by chance, decided on the CPU."""
    return Peculiar(lambda layer, x: x if torch.rand(()) < 0.5 else x * 0)


@builder
def counting_net() -> nn.Module:
    """A network that counts its passes."""
    return Peculiar(lambda layer, x: x * layer.count)


class Peculiar(nn.Module):
    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.change, self.count = nn.Linear(SIDE * SIDE, NUM_CLASSES), change, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.count += self.change.__code__.co_names == ("count",)
        y: torch.Tensor = self.linear(self.change(self, images).flatten(1))
        return y


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (waiting_net, "waits for the device"),
        (selecting_net, "waits for the device"),
        (drawing_net, "draws random numbers on the CPU"),
        (counting_net, "each forward pass changes count"),
    ],
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_depends_on_python_is_not_captured(lab: Lab, build: Any, reason: str) -> None:
    graph, _ = with_and_without(lab, lab.make_model(FunctionRef.to(build)))
    assert not graph.metrics["cuda_graph_replays"]
    assert any(line.startswith("no CUDA graph: ") and reason in line for line in graph.log), graph.log


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("build", NETWORKS)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_network_gives_the_same_bits(lab: Lab, build: Any, precision: str) -> None:
    model = lab.make_model(FunctionRef.to(build))
    for trained in (model, prepare_qat(PrepareQatConfig(), lab.context(), model)):
        for optimizer in ("sgd", "adamw"):
            graph, _ = with_and_without(lab, trained, lr=0.002, precision=precision, optimizer=optimizer)
            assert graph.metrics["cuda_graph_replays"] > 8, graph.log


@pytest.mark.parametrize("options", [{}, {"batch_norm": "fold", "freeze_at": 0.5}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_learned_range_gives_the_same_bits(lab: Lab, options: dict[str, Any], precision: str) -> None:
    config = PrepareQatConfig.model_validate({"backend": "fbgemm", "learned_step_size": True, **options})
    prepared = prepare_qat(config, lab.context(), lab.make_model(norm=True))
    graph, _ = with_and_without(lab, prepared, lr=0.005, precision=precision)
    assert graph.metrics["cuda_graph_replays"] > 8, graph.log
    before, after = prepared.tensors, graph.model.tensors
    assert any(not torch.equal(before[name], after[name]) for name in before if name.endswith("log_part"))


class DropPath(nn.Module):
    """Drops samples by chance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.empty(len(x), 1, device=x.device).bernoulli_(0.8) / 0.8 if self.training else x


class OwnGradients(nn.Module):
    """Frozen features, a gradient that is reversed, and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.hidden, self.drop, self.head = nn.Linear(4 * (SIDE - 2) ** 2, 16), DropPath(), nn.Linear(16, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.features(images)
        x = torch.relu(self.hidden(x))
        y: torch.Tensor = self.head(Reversed.apply(x + self.drop(x)))  # type: ignore[no-untyped-call]
        return y


@builder
def own_gradients() -> nn.Module:
    return OwnGradients()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gradients_of_ones_own_give_the_same_bits(lab: Lab) -> None:
    model = lab.make_model(FunctionRef.to(own_gradients))
    prepared = prepare_qat(PrepareQatConfig(backend="fbgemm"), lab.context(), model)
    for trained in (model, prepared):
        graph, _ = with_and_without(lab, trained, lr=0.01)
        assert graph.metrics["cuda_graph_replays"] > 8, graph.log
        name = next(name for name in trained.tensors if name.startswith("features.0.weight"))
        assert torch.equal(trained.tensors[name], graph.model.tensors[name])
