"""What can't be traced, run or computed rightly in int8 stays float, and is named, before any training."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe.events import Event, Notice
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    PrepareConfig,
    PrepareQatConfig,
    calibrate,
    convert,
    preparation,
    prepare,
    prepare_qat,
    stages,
)
from ptpipe_torch import Data, builder
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_torch.int8.layer_parity import LayerDifference
from ptpipe_torch.traced_hooks import hooked_layers

from ...processor import needs_fbgemm_fault
from .conftest import BACKENDS, NUM_CLASSES, logits_of, make_model, mixed_net

FIRST = BACKENDS[0]
STAGES: list[tuple[Any, Any]] = [(prepare, PrepareConfig), (prepare_qat, PrepareQatConfig)]


def notices(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


class Gate(nn.Module):
    """Branches on its input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x) if x.sum() > 0 else x


class Gated(nn.Module):
    """Two gates between layers; `branches`: the network itself branches on values, too."""

    def __init__(self, *, branches: bool, convolves: bool = True) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 4, 3), Gate(), nn.Conv2d(4, 4, 3), Gate()]
        self.features = nn.Sequential(*layers) if convolves else Gate()
        self.head = nn.Linear(64, NUM_CLASSES) if convolves else nn.Identity()
        self.branches = branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        if self.branches and x.sum() > 0:
            return self.head(x.flatten(1) + 1)
        return self.head(x.flatten(1))


@builder
def gated(*, branches: bool = False) -> nn.Module:
    return Gated(branches=branches)


@builder
def gate_alone(*, adds: bool = False) -> nn.Module:
    """All that could be quantized belongs to a layer that can't be traced, but for a sum."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Sequential(nn.Flatten(), nn.Linear(64, NUM_CLASSES))
            self.gate.__class__ = Branching

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate(x) + x.flatten(1)[:, :NUM_CLASSES] if adds else self.gate(x)

    return Wrapped()


class Branching(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_a_layer_that_can_not_be_traced_stays_float(ctx, events: list[Event], stage, config) -> None:
    prepared = stage(config(backend=FIRST), ctx, make_model(gated))
    assert prepared.recipe.prepare[0].arguments["skip"] == ["features.1", "features.3"]
    (notice,) = notices(events)
    assert notice.startswith("features.1, features.3 stay float: ")
    assert "`return self.scale(x) if x.sum() > 0 else x` can't be traced" in notice
    assert notice.endswith("; torch.where in its place could become int8")


@builder
def hooked(*, reads_values: bool = False) -> nn.Module:
    """A network most of whose function is in hooks; `reads_values`: one of which can't be traced."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, NUM_CLASSES)
    )
    net[3].register_forward_pre_hook(lambda _layer, inputs: (3 - inputs[0],))
    net[3].register_forward_hook(lambda _layer, _inputs, output: output.abs())
    net[0].register_forward_hook(
        lambda _layer, _inputs, output: -output * (float(output.max() > 0) if reads_values else 1)
    )
    return net.eval()


@pytest.mark.parametrize(("reads_values", "skip", "num_int8"), [(False, [], 3), (True, ["3"], 1)])
def test_what_hooks_do_is_part_of_the_network(ctx, digits: Data, metrics, reads_values, skip, num_int8) -> None:
    model = make_model(hooked, reads_values=reads_values)
    prepared = prepare(PrepareConfig(backend=FIRST, skip=skip), ctx, model)
    int8 = convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(num_samples=64), ctx, prepared, digits).model)
    assert metrics()["int8_layers"] == num_int8
    expected, found = (logits_of(each, digits, 64) for each in (model, int8))
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(("reads_values", "skip", "whole"), [(False, [], []), (True, ["3"], ["0", "3"])])
def test_qat_trains_what_hooks_do(ctx, events: list[Event], reads_values, skip, whole) -> None:
    model = make_model(hooked, reads_values=reads_values)
    prepared = prepare_qat(PrepareQatConfig(backend=FIRST, skip=skip), ctx, model)
    assert hooked_layers(prepared.build()) == whole
    assert [notice.split(": ")[0] for notice in notices(events)] == ["0 stays float"] * reads_values


class Gridded(nn.Module):
    """Keeps a table for inputs of the same sizes."""

    sizes = None

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sizes != x.shape:
            self.grid, self.sizes = torch.arange(x.shape[-1], device=x.device) / 4, x.shape
        return self.conv(x) + self.grid


class Positioned(Gridded):
    """Keeps a table from its first call on."""

    grid = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.grid is None:
            self.grid = torch.linspace(0, 1, x.shape[-1]).to(x)
        return self.conv(x) + self.grid


@builder
def gridded(*, once: bool = False) -> nn.Module:
    layer = Positioned() if once else Gridded()
    return nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.Flatten(), nn.Linear(144, NUM_CLASSES))


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_what_a_layer_keeps_of_its_last_call_is_no_obstacle(ctx, events: list[Event], stage, config, once) -> None:
    """A network that is built again must be traced to the graph of the stored tensors."""
    prepared = stage(config(backend=FIRST), ctx, make_model(gridded, once=once))
    assert not notices(events)
    assert prepared.recipe.prepare[0].arguments["skip"] == []
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(
        prepared.build_prepared()(x), make_model(gridded, once=once).build()(x), rtol=0.1, atol=0.1
    )


class Shifting(nn.Module):
    """Changes a part of a tensor in place, and uses the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        part = y[:, :2]
        part *= 2
        return y


@builder
def shifting() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), Shifting(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, NUM_CLASSES))


@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_a_layer_that_changes_views_in_place_stays_float(ctx, events: list[Event], stage, config) -> None:
    model = make_model(shifting)
    prepared = stage(config(backend=FIRST), ctx, model)
    assert prepared.recipe.prepare[0].arguments["skip"] == ["1"]
    (notice,) = notices(events)
    assert re.match(r"1 stays float: .*: `part \*= 2` changes a tensor in place that later operations use", notice)
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(prepared.build_prepared().eval()(x), model.build()(x), rtol=0.1, atol=0.1)


def test_its_branches_are_still_taken(ctx, digits: Data, metrics) -> None:
    prepared = prepare(PrepareConfig(backend=FIRST), ctx, make_model(gated))
    int8 = convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, digits).model)
    assert metrics()["int8_layers"] == 3
    network: Any = int8.build()
    (gate,) = {type(network.get_submodule(name)) for name in ("features.1", "features.3")}
    assert gate is Gate


def test_the_network_itself_must_be_traceable(ctx) -> None:
    message = r"`if self.branches and x.sum\(\) > 0:` can't be traced .* write it with torch.where, .* into a submodule"
    with pytest.raises(StageError, match=message):
        prepare(PrepareConfig(backend=FIRST), ctx, make_model(gated, branches=True))


@pytest.mark.parametrize("adds", [False, True])
def test_where_nothing_is_left_the_line_is_named(ctx, adds: bool) -> None:
    with pytest.raises(StageError, match=r"can't be traced into a graph .*skip: \[gate\]") as raised:
        prepare(PrepareConfig(backend=FIRST), ctx, make_model(gate_alone, adds=adds))
    assert "route: export" not in str(raised.value), "which can't trace it either"


@builder
def selecting() -> nn.Module:
    """A number that depends on values, and is the same wherever the inputs are zeros, as they are for a trace."""

    class Selecting(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bright = (x.flatten() > 0).nonzero()
            chosen = x.flatten()[bright[:, 0]] + torch.ones(bright.shape[0])
            rows = [x[:, :, number] for number in range(x.shape[2])]
            return super().forward(torch.stack(rows, 2)) + chosen.sum()

    return Selecting(nn.Flatten(), nn.Linear(64, NUM_CLASSES))


def test_a_number_that_was_fixed_by_tracing_is_no_exception(ctx) -> None:
    with pytest.raises(StageError, match=r"add .* of the traced network fails on other samples .* float with skip"):
        prepare(PrepareConfig(backend=FIRST), ctx, make_model(selecting))


@builder
def upsampling() -> nn.Module:
    """A transposed convolution of 2 x 2 whose output is a row longer than twice the input."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, 2, output_padding=1),
        nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 15 * 15, NUM_CLASSES),
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


@needs_fbgemm_fault
@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_transposed_convolutions_that_an_engine_gets_wrong_stay_float(
    ctx, events: list[Event], metrics, stage, config
) -> None:
    prepared = stage(config(backend="fbgemm"), ctx, make_model(upsampling))
    assert metrics()["kept_float"] == ["2"]
    assert ["2 stays float: fbgemm's" in event.text for event in events if isinstance(event, Notice)] == [True]
    assert prepared.recipe.prepare[0].arguments["skip"] == ["2"]
    stage(config(backend="qnnpack"), ctx, make_model(upsampling))


@pytest.mark.skipif("fbgemm" not in supported_engines(), reason="fbgemm is for x86 processors")
@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_what_an_engine_refuses_stays_float(ctx, monkeypatch, events: list[Event], stage, config) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("required rank 4 tensor to use channels_last format")

    from torch.ao.nn.intrinsic.quantized import ConvReLU2d

    monkeypatch.setattr(ConvReLU2d, "forward", refuse)
    prepared = stage(config(backend="fbgemm"), ctx, make_model(small_mean))
    names = prepared.recipe.prepare[0].arguments["float_operators"]
    assert names[0] == "features_0"
    assert notices(events) == [
        f"{name} stays float: fbgemm can't run it as int8 (required rank 4 tensor to use channels_last format)"
        for name in names
    ]


@builder
def between() -> nn.Module:
    """A layer whose int8 kernel in qnnpack computes another function (torch 2.13)."""
    layer = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), layer, nn.Conv2d(6, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 36, NUM_CLASSES)
    )


@pytest.mark.skipif("qnnpack" not in supported_engines(), reason="its kernels are wrong")
@pytest.mark.parametrize(("stage", "config"), STAGES)
def test_what_an_engine_computes_wrongly_stays_float(ctx, events: list[Event], stage, config) -> None:
    prepared = stage(config(backend="qnnpack"), ctx, make_model(between))
    (notice,) = notices(events)
    assert re.match(r"1 stays float: qnnpack computes it wrongly: its output is up to \d+ steps", notice)
    assert prepared.recipe.prepare[0].arguments["float_operators"] == ["_1"]
    if "fbgemm" in supported_engines():
        stage(config(backend="fbgemm"), ctx, make_model(between))


@builder
def along_the_last_axis() -> nn.Module:
    """A softmax whose axis is counted from the end: qnnpack's kernel raises IndexError (torch 2.13)."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.Softmax(dim=-1), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(4 * 16, NUM_CLASSES)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_axis_that_is_counted_from_the_end(ctx, events: list[Event], backend) -> None:
    prepare(PrepareConfig(backend=backend), ctx, make_model(along_the_last_axis))
    assert len(notices(events)) == (backend == "qnnpack")


@builder
def decoder() -> nn.Module:
    """A transposed convolution with a batch norm behind it."""
    up = nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1)
    norm = nn.BatchNorm2d(4)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), up, norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 144, NUM_CLASSES)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_norm_behind_a_transposed_convolution_is_folded_while_others_train(
    ctx, events: list[Event], metrics, backend
) -> None:
    prepare_qat(PrepareQatConfig(backend=backend, batch_norm="train"), ctx, make_model(decoder))
    assert "3 is folded into the transposed convolution in front of it" in str(list(events))
    assert metrics()["prepared_difference"] < 1e-4


@builder
def three_axes() -> nn.Module:
    """Convolutions of one frame: qnnpack runs them, but does not return their int8 weights (torch 2.13)."""
    layers = [nn.Conv3d(1, 4, (1, 3, 3)), nn.ReLU(), nn.Conv3d(4, 4, 1), nn.Flatten(), nn.Linear(4 * 36, NUM_CLASSES)]
    return nn.Sequential(nn.Unflatten(1, (1, 1)), *layers)


@pytest.mark.parametrize(("stage", "config"), STAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_whose_int8_weights_an_engine_keeps_stay_float(ctx, events: list[Event], stage, config, backend) -> None:
    prepared = stage(config(backend=backend), ctx, make_model(three_axes))
    names = prepared.recipe.prepare[0].arguments["float_operators"]
    if backend != "qnnpack":
        assert (names, notices(events)) == ([], [])
        return
    assert names == ["_1", "_3"]
    for layer, type_, notice in zip("13", ("ConvReLU3d", "Conv3d"), notices(events), strict=True):
        assert notice.startswith(f"{layer} stays float: qnnpack runs {type_}, but does not return its int8 weights (")


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
def test_values_outside_of_a_fixed_range_stay_float(ctx, events: list[Event], stage, config) -> None:
    stage(config(backend=FIRST), ctx, make_model(overshooting))
    (notice,) = notices(events)
    assert re.match(r"interpolate stays float: its int8 range is fixed at 0 to 1, but it has values of -\d", notice)


@pytest.mark.parametrize(("reduce_range", "is_refused"), [(False, False), ("auto", True), (True, True)])
def test_sums_may_saturate_where_the_user_wants_all_8_bits(ctx, monkeypatch, reduce_range, is_refused) -> None:
    monkeypatch.setattr(stages, "wants_reduced_range", lambda backend: (True, "no VNNI"))
    monkeypatch.setattr(preparation, "wants_reduced_range", lambda backend: (True, "no VNNI"))
    monkeypatch.setattr(preparation, "dry_run", lambda *_: [LayerDifference("conv", "3", "conv_3", 40.0, 0.5)])
    config = PrepareConfig(backend=FIRST, reduce_range=reduce_range)
    with pytest.raises(StageError, match="computes 3 wrongly") if is_refused else nullcontext():
        prepare(config, ctx, make_model(mixed_net))
