"""Branches of convolutions and batch norms whose outputs are added: one convolution in int8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import Context, StageError
from ptpipe.events import Event, Notice
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_quant import (
    AnalyzeConfig,
    CalibrateConfig,
    ConvertConfig,
    PrepareConfig,
    PrepareQatConfig,
    analyze,
    calibrate,
    convert,
    prepare,
    prepare_qat,
)
from ptpipe_quant.branches import merge_branches
from ptpipe_quant.repairs.adaround import adaround
from ptpipe_quant.repairs.bias_correct import bias_correct
from ptpipe_quant.repairs.config import AdaroundConfig, BiasCorrectConfig
from ptpipe_quant.trace import trace_network
from ptpipe_torch import Data, Model, builder

from ...branching import LEFT, MERGED, MIXED, SHAPE_CHW, Body, Branches, repvgg
from ...signatures import pictures
from .conftest import BACKENDS, NUM_CLASSES, accuracy, logits_of, make_model, train


def merged(
    body: Body, float_names: Sequence[str] = (), *, mixed_sizes: bool = False
) -> tuple[dict[str, list[str]], int]:
    """Return what is merged and how many sums are left, after a check that the network is the same function."""
    torch.manual_seed(1)
    network, x = Branches(body).eval(), torch.randn(2, *SHAPE_CHW)
    expected = network(x)
    graph = trace_network(network, pictures(SHAPE_CHW)).graph
    found = merge_branches(graph, float_names, mixed_sizes=mixed_sizes)
    torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-5)
    targets = [str(node.target) for node in graph.graph.find_nodes(op="call_module")]
    assert set(found) <= set(targets)
    return found, sum(any(word in node.name for word in ("add", "sub")) for node in graph.graph.nodes)


@pytest.mark.parametrize("mixed_sizes", [False, True])
@pytest.mark.parametrize("name", MERGED)
def test_branches_are_one_convolution(name: str, mixed_sizes: bool) -> None:
    check_merged(*MERGED[name], mixed_sizes=mixed_sizes)


@pytest.mark.parametrize("name", MIXED)
def test_dense_kernels_of_several_sizes_are_one_where_asked(name: str) -> None:
    check_merged(*MIXED[name], mixed_sizes=True)
    assert merged(MIXED[name][0])[1] > 0


def check_merged(body: Body, expected: dict[str, list[str]], *, mixed_sizes: bool) -> None:
    found, num_sums = merged(body, mixed_sizes=mixed_sizes)
    assert {layer: sorted(others) for layer, others in found.items()} == {
        layer: sorted(others) for layer, others in expected.items()
    }
    assert num_sums == 0


@pytest.mark.parametrize(
    ("name", "mixed_sizes"), [(name, mixed_sizes) for name in LEFT for mixed_sizes in (False, True)]
)
def test_what_is_no_branch_stays(name: str, mixed_sizes: bool) -> None:
    assert merged(LEFT[name], mixed_sizes=mixed_sizes) == ({}, 1)


def test_branches_that_must_be_float_stay() -> None:
    assert merged(repvgg, ["large", "large_norm"])[1] == 0  # one float convolution
    assert merged(repvgg, ["small"]) == ({}, 2)
    assert merged(repvgg, ["norm"]) == ({"large": ["small", "small_norm"]}, 1)


def test_layer_scale_of_branches_becomes_part_of_them() -> None:
    """FastViT's token mixer."""
    torch.manual_seed(1)
    network = Branches(lambda n, x: x + n.gamma * (n.small(x) + n.pixel(x) - n.norm(x))).eval()
    x = torch.randn(2, *SHAPE_CHW)
    expected = network(x)
    graph = trace_network(network, pictures(SHAPE_CHW)).graph
    assert merge_branches(graph, [], mixed_sizes=False) == {"small": ["pixel", "norm"]}
    torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-5)
    operators = [node.name for node in graph.graph.nodes if node.op in ("call_function", "call_module")]
    assert len(operators) == 2


def test_a_layer_that_is_called_twice_is_merged_once() -> None:
    found, num_sums = merged(lambda n, x: n.small(n.large(x) + n.pixel(x)) + n.pixel(n.large(x)))
    assert (list(found), num_sums) == (["large"], 1)


class RepNet(nn.Module):
    """Blocks with branches."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(Block(16, groups=groups), Block(16, groups=groups))
        self.head = nn.Linear(16 * 64, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).flatten(1))


class Block(nn.Module):
    """RepVGG's, depthwise or dense, and MobileOne's pointwise one."""

    def __init__(self, width: int, *, groups: int) -> None:
        super().__init__()
        self.large = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=groups, bias=False), nn.BatchNorm2d(width)
        )
        self.small = nn.Sequential(nn.Conv2d(width, width, 1, groups=groups, bias=False), nn.BatchNorm2d(width))
        self.norm = nn.BatchNorm2d(width)
        self.mix = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))
        self.mix_norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.large(x) + self.small(x) + self.norm(x))
        return torch.relu(self.mix(y) + self.mix_norm(y))


@builder
def rep_net(*, groups: int) -> nn.Module:
    return RepNet(groups)


@pytest.fixture(scope="module")
def trained_rep(digits: Data) -> Model:
    return train(make_model(rep_net, groups=16), digits, lr=0.05, epochs=5)


@pytest.fixture(scope="module")
def trained_dense(digits: Data) -> Model:
    return train(make_model(rep_net, groups=1), digits, lr=0.05, epochs=5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("route", ["fx", "export"])
def test_a_network_with_branches(
    route: Any, backend: Any, trained_rep: Model, digits: Data, ctx: Context, metrics: Any
) -> None:
    prepared = prepare(PrepareConfig(backend=backend, route=route), ctx, trained_rep)
    int8 = convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, digits).model)
    expected, found = logits_of(trained_rep, digits), logits_of(int8, digits)
    assert accuracy(found, digits) > accuracy(expected, digits) - 0.01
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.98
    export_onnx(ExportConfig(num_samples=64), ctx, int8, digits)
    assert (metrics()["num_int8_layers"], metrics()["num_float_nodes"]) == (6, 0)
    assert metrics()["max_layer_difference_steps"] <= 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("route", ["fx", "export"])
def test_dense_branches_are_merged_in_training_with_folded_batch_norms(
    route: Any, backend: Any, trained_dense: Model, digits: Data, ctx: Context, metrics: Any
) -> None:
    options = PrepareQatConfig(backend=backend, route=route, batch_norm="fold")
    tuned = train(prepare_qat(options, ctx, trained_dense), digits, lr=0.002, epochs=1)
    int8 = convert(ConvertConfig(), ctx, tuned)
    assert accuracy(logits_of(int8, digits), digits) > accuracy(logits_of(trained_dense, digits), digits) - 0.01
    export_onnx(ExportConfig(num_samples=64), ctx, int8, digits)
    assert (metrics()["num_int8_layers"], metrics()["num_float_nodes"]) == (6, 0)
    assert metrics()["max_layer_difference_steps"] <= 1


def test_branches_that_stay_are_counted(
    trained_rep: Model, trained_dense: Model, ctx: Context, events: list[Event]
) -> None:
    prepared = prepare_qat(PrepareQatConfig(), ctx, trained_dense).build_prepared()
    assert {"blocks.0.large.0", "blocks.0.small.0", "blocks.0.norm"} <= dict(prepared.named_modules()).keys()
    assert "4 sums of parallel branches" in counted(events)
    prepare(PrepareConfig(), ctx, trained_dense)
    assert "2 sums of parallel branches" in counted(events)
    prepare(PrepareConfig(skip=["blocks.0.small"]), ctx, trained_dense)
    assert "1 sum of parallel branches" in counted(events)
    prepare(PrepareConfig(), ctx, trained_rep)
    prepare_qat(PrepareQatConfig(batch_norm="fold"), ctx, trained_dense)
    assert not counted(events)


def counted(events: list[Event]) -> str:
    """Return the notices about branches, and forget all events."""
    found = [event.text for event in events if isinstance(event, Notice) and "branches" in event.text]
    events.clear()
    return "\n".join(found)


def test_stages_between_name_the_branch_that_is_left(
    trained_rep: Model, digits: Data, ctx: Context, metrics: Any
) -> None:
    prepared = calibrate(CalibrateConfig(), ctx, prepare(PrepareConfig(), ctx, trained_rep), digits).model
    repaired = adaround(AdaroundConfig(num_samples=64, num_iterations=20), ctx, prepared, digits)
    repaired = bias_correct(BiasCorrectConfig(num_samples=64), ctx, repaired, digits)
    assert metrics()["corrected_layers"] == 6
    layers = [
        layer.name for layer in analyze(AnalyzeConfig(split="test", num_samples=64), ctx, repaired, digits).layers
    ]
    assert "blocks.0.large.0" in layers
    assert not any("small" in name or name.endswith("norm") for name in layers)
    int8 = convert(ConvertConfig(), ctx, repaired)
    assert accuracy(logits_of(int8, digits), digits) > accuracy(logits_of(trained_rep, digits), digits) - 0.01


def test_skip_and_layers(trained_rep: Model, digits: Data, ctx: Context, metrics: Any) -> None:
    config = PrepareConfig(skip=["blocks.0.large.0", "blocks.1.small"])
    prepared = calibrate(CalibrateConfig(), ctx, prepare(config, ctx, trained_rep), digits).model
    file = export_onnx(ExportConfig(num_samples=64), ctx, convert(ConvertConfig(), ctx, prepared), digits)
    assert file.path.exists()
    assert metrics()["num_int8_layers"] == 5  # the stem, two mixes, the head and blocks.1.large
    with pytest.raises(StageError, match="decides nothing"):
        prepare(
            PrepareConfig.model_validate({"layers": {"blocks.0.small": {"weights": "per_tensor"}}}), ctx, trained_rep
        )


def test_a_stored_model_of_a_former_version_has_its_branches(trained_rep: Model, ctx: Context) -> None:
    reference = prepare(PrepareConfig(backend=BACKENDS[0]), ctx, trained_rep).recipe.prepare[0]
    former = {name: value for name, value in reference.arguments.items() if name != "merged_branches"}
    graph = reference.resolve("transform")(trained_rep.build(), **former)
    assert sum("add" in node.name for node in graph.graph.nodes) == 6
