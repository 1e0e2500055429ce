"""quant.prepare* prove that nothing but rounding changes the network, and that it converts, before any training."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe.events import Event, Notice
from ptpipe_quant import PrepareConfig, PrepareQatConfig, prepare, prepare_qat, prepared_parity, transforms
from ptpipe_quant.prepared_parity import Expected
from ptpipe_torch import builder

from .conftest import BACKENDS, NUM_CLASSES, make_model, mixed_net

FIRST = BACKENDS[0]
STAGES: list[tuple[Any, Any]] = [(prepare, PrepareConfig), (prepare_qat, PrepareQatConfig)]


@builder
def two_outputs(*, as_dict: bool) -> nn.Module:
    """Returns more than logits."""

    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, NUM_CLASSES)

        def forward(self, x: torch.Tensor) -> Any:
            logits_NK = self.head(x.flatten(1))
            return {"logits": logits_NK, "other": x} if as_dict else (logits_NK, x)

    return TwoOutputs()


@pytest.mark.parametrize(("stage", "config"), STAGES)
@pytest.mark.parametrize("layer", ["relu", "left", "head"])
def test_a_pass_that_changes_the_function_is_found_with_its_layer(monkeypatch, ctx, stage, config, layer) -> None:
    trace_network = transforms.trace_network

    def broken(*arguments: Any, **options: Any) -> Any:
        network = trace_network(*arguments, **options)
        graph, scopes = network.graph, network.scopes
        for node in list(graph.graph.nodes):
            if scopes.get(node.name, ("",))[0] != layer:
                continue
            if layer == "relu":  # dropped
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
            else:
                with torch.no_grad():
                    graph.get_submodule(layer).bias += 1
        graph.recompile()
        return network

    monkeypatch.setattr(transforms, "trace_network", broken)
    message = rf"computes something else than the model in eval mode: .* first layer that differs is {layer}:"
    with pytest.raises(StageError, match=message):
        stage(config(backend=FIRST), ctx, make_model(mixed_net))


def test_qat_is_compared_in_train_mode_too(monkeypatch, ctx) -> None:
    from ptpipe_quant import qat_layers

    monkeypatch.setattr(qat_layers, "_TINY", 1e3)  # counts every channel as switched off, in train mode alone
    with pytest.raises(StageError, match=r"than the model in train mode: .* keeps batch norms in eval mode"):
        prepare_qat(PrepareQatConfig(backend=FIRST, batch_norm="train"), ctx, make_model(train_net))


@builder
def train_net() -> nn.Module:
    """Without dropout functions."""
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, NUM_CLASSES))


@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_the_check_leaves_the_model_as_it_was(ctx, metrics, stage, config) -> None:
    prepared = stage(config(backend=FIRST), ctx, model := make_model(train_net))
    assert metrics()["prepared_difference"] < 1e-5
    for name, tensor in model.tensors.items():
        if name.startswith("1.running"):
            kept = [value for key, value in prepared.tensors.items() if key.endswith(name.removeprefix("1."))]
            assert all(torch.equal(value, tensor) for value in kept)
    limits = [value for name, value in prepared.tensors.items() if name.endswith("min_val") and "weight" not in name]
    assert limits
    assert all(limit == float("inf") for limit in limits)


@pytest.mark.parametrize(("stage", "config"), STAGES)
@pytest.mark.parametrize(("as_dict", "found"), [(True, "a dict of logits, other"), (False, "a tuple of 2 values")])
def test_other_outputs_than_those_of_the_signature_are_refused(ctx, stage, config, as_dict, found) -> None:
    message = rf"the network returns {found}; it must return logits \(batch, {NUM_CLASSES}\) float32"
    with pytest.raises(StageError, match=message):
        stage(config(backend=FIRST), ctx, make_model(two_outputs, as_dict=as_dict))


class Amplifying(nn.Module):
    """Batch norm of values that hardly differ: in train mode it enlarges the rounding in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, eps=1e-12)
        self.norm.running_var.fill_(3)  # or scaling weights by it would round nothing
        self.head = nn.Linear(8 * 36, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(100 + 0.0002 * x)).flatten(1))


@builder
def amplifying() -> nn.Module:
    return Amplifying()


def test_rounding_that_the_users_network_amplifies_is_no_difference(ctx, monkeypatch, metrics) -> None:
    found = []
    actual = prepared_parity._beside_own_rounding
    monkeypatch.setattr(prepared_parity, "_beside_own_rounding", lambda *args: found.append(actual(*args)) or found[-1])
    prepare_qat(PrepareQatConfig(backend=FIRST, batch_norm="train"), ctx, make_model(amplifying))
    ((difference, tolerance),) = found
    assert prepared_parity.TOLERANCE < difference <= tolerance
    assert metrics()["prepared_difference"] == difference


@builder
def ranking() -> nn.Module:
    """Values in the order of nearly equal ones: columns of a softmax have the sum 1, up to rounding."""

    class Ranking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
            self.norm.running_var.fill_(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.conv(x)).flatten(1)
            scores = (y[:, :, None] * y[:, None]).softmax(1).sum(1)
            return y.gather(1, scores.topk(NUM_CLASSES)[1])

    return Ranking()


@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_networks_that_rank_are_compared_in_one_order(ctx, metrics, stage, config) -> None:
    stage(config(backend=FIRST), ctx, make_model(ranking))
    assert metrics()["prepared_difference"] < 1e-5


@builder
def sines_above(threshold: float) -> nn.Module:
    """Sines of large numbers, where values are above this: nothing is left of their digits."""

    class Sines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
            self.norm.running_var.fill_(3)
            self.head = nn.Linear(8 * 36, NUM_CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.conv(x))
            return self.head((y + torch.sin(1e6 * torch.relu(y - threshold))).flatten(1))

    return Sines()


@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_large_samples_whose_rounding_is_amplified_do_not_count(ctx, metrics, stage, config) -> None:
    model = make_model(sines_above, threshold=3)
    network = model.build().eval()
    (images,) = Expected.of(network, model.signature, train=False).inputs
    with torch.no_grad():
        own = prepared_parity.relative_difference(network(images), network.double()(images.double()).float())
    assert own > prepared_parity.TOLERANCE
    stage(config(backend=FIRST), ctx, model)
    assert metrics()["prepared_difference"] < 1e-5


@pytest.mark.parametrize(
    ("normal", "large", "is_refused"), [(0.002, 0, True), (0, 0.5, False), (0.002, 0.5, True), (1e-4, 0.5, False)]
)
def test_normal_samples_are_enough_to_tell_a_difference(normal: float, large: float, is_refused: bool) -> None:
    exact = torch.ones(4, 3)
    expected = [exact + torch.tensor([0, 0.1, 0, 0.1])[:, None]]
    found = [expected[0] + torch.tensor([0, large, normal, 0])[:, None]]
    difference, tolerance = prepared_parity._beside_own_rounding(found, expected, [[exact]])
    assert (difference > tolerance) == is_refused


@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_a_network_whose_outputs_are_rounding_alone_is_taken_with_a_notice(
    ctx, events: list[Event], stage, config
) -> None:
    stage(config(backend=FIRST), ctx, make_model(sines_above, threshold=-100))
    (notice,) = (event.text for event in events if isinstance(event, Notice))
    assert re.search(r"can't show that .* float32 changes them by [\d.]+ of the largest one", notice)
