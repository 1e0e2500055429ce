"""quant.prepare* prove that nothing but rounding changes the network, and that it converts, before any training."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe.events import Event, Notice
from ptpipe_quant import PrepareConfig, PrepareQatConfig, prepare, prepare_qat, prepared_parity, stages, transforms
from ptpipe_quant.prepared_parity import Expected
from ptpipe_torch import builder
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_torch.int8.layer_parity import LayerDifference

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


@builder
def upsampling() -> nn.Module:
    """The upsampling of every U-Net."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(8, 4, 3), nn.Flatten(),
        nn.Linear(4 * 14 * 14, NUM_CLASSES),
    )  # fmt: skip


@builder
def small_mean() -> nn.Module:
    """A mean over maps of one pixel, which fbgemm's kernel refuses."""

    class SmallMean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(1, 8, 8), nn.ReLU())
            self.head = nn.Linear(8, NUM_CLASSES)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.features(x).mean([2, 3]))

    return SmallMean()


@pytest.mark.parametrize(("stage", "config"), STAGES)
@pytest.mark.parametrize("layer", ["relu", "left", "head"])
def test_a_pass_that_changes_the_function_is_found_with_its_layer(monkeypatch, ctx, stage, config, layer) -> None:
    trace_network = transforms.trace_network

    def broken(*arguments: Any) -> Any:
        network = trace_network(*arguments)
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
    with pytest.raises(StageError, match="than the model in train mode"):
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


@pytest.mark.skipif("fbgemm" not in supported_engines(), reason="fbgemm is for x86 processors")
@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_transposed_convolutions_that_an_engine_gets_wrong_stay_float(
    ctx, events: list[Event], metrics, stage, config
) -> None:
    prepared = stage(config(backend="fbgemm"), ctx, make_model(upsampling))
    assert metrics()["kept_float"] == ["2"]
    assert ["2 stay float: fbgemm's" in event.text for event in events if isinstance(event, Notice)] == [True]
    assert prepared.recipe.prepare[0].arguments["skip"] == ["2"]
    stage(config(backend="qnnpack"), ctx, make_model(upsampling))


@pytest.mark.skipif("fbgemm" not in supported_engines(), reason="fbgemm is for x86 processors")
@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_what_an_engine_refuses_is_known_before_training(ctx, monkeypatch, stage, config) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("required rank 4 tensor to use channels_last format")

    from torch.ao.nn.intrinsic.quantized import ConvReLU2d

    monkeypatch.setattr(ConvReLU2d, "forward", refuse)
    with pytest.raises(StageError, match=r"fbgemm can't run .* at features.0: required rank 4 .*skip: \[features.0\]"):
        stage(config(backend="fbgemm"), ctx, make_model(small_mean))


@builder
def between(*, prelu: bool) -> nn.Module:
    """A layer whose int8 kernel in qnnpack computes another function (torch 2.13)."""
    layer = nn.PReLU() if prelu else nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), layer, nn.Conv2d(6, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 36, NUM_CLASSES)
    )


@pytest.mark.skipif("qnnpack" not in supported_engines(), reason="its kernels are wrong")
@pytest.mark.parametrize(("stage", "config"), STAGES)
@pytest.mark.parametrize("prelu", [True, False])
def test_what_an_engine_computes_wrongly_is_known_before_training(ctx, stage, config, prelu) -> None:
    with pytest.raises(StageError, match=r"qnnpack computes 1 wrongly: its output is up to \d+ steps"):
        stage(config(backend="qnnpack"), ctx, make_model(between, prelu=prelu))
    if "fbgemm" in supported_engines() and not prelu:
        stage(config(backend="fbgemm"), ctx, make_model(between, prelu=prelu))


@builder
def overshooting() -> nn.Module:
    """Bicubic interpolation leaves the range of a sigmoid, 0 to 1, whose grid its output has."""

    class Overshooting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 4, 3)
            nn.init.normal_(self.first.weight, std=9)
            self.head = nn.Linear(400, NUM_CLASSES)

        def forward(self, x: torch.Tensor) -> Any:
            x = nn.functional.interpolate(self.first(x).sigmoid(), scale_factor=2, mode="bicubic")
            return self.head(self.last(x).flatten(1))

    return Overshooting()


@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_values_outside_of_a_fixed_range_are_known_before_training(ctx, stage, config) -> None:
    with pytest.raises(StageError, match=r"the int8 range of \w+ is fixed at 0 to 1, but it has values of -\d"):
        stage(config(backend=FIRST), ctx, make_model(overshooting))


@pytest.mark.parametrize(("reduce_range", "is_refused"), [(False, False), ("auto", True), (True, True)])
def test_sums_may_saturate_where_the_user_wants_all_8_bits(ctx, monkeypatch, reduce_range, is_refused) -> None:
    monkeypatch.setattr(stages, "wants_reduced_range", lambda backend: (True, "no VNNI"))
    monkeypatch.setattr(stages, "dry_run", lambda *_: [LayerDifference("conv", "3", 40.0, 0.5)])
    config = PrepareConfig(backend=FIRST, reduce_range=reduce_range)
    with pytest.raises(StageError, match="computes 3 wrongly") if is_refused else nullcontext():
        prepare(config, ctx, make_model(mixed_net))
